#include "matrix_module.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>

#include "arrays.h"
#include "matrix.h"

namespace nb = nanobind;

namespace cairn {
namespace {

// One part: its type ("int4", "int8", "fp4", "q4_k" ... for codes), its numbers or codes, scales and minima of codes, and those
// of super-blocks.
using Part = std::tuple<std::string, Weights, std::optional<Weights>, std::optional<Weights>, std::optional<Weights>,
                        std::optional<Weights>>;

constexpr std::pair<const char*, Form> ROWS[] = {{"iq2_xxs", Form::iq2_xxs},
                                                 {"iq2_xs", Form::iq2_xs},
                                                 {"iq2_s", Form::iq2_s},
                                                 {"iq3_xxs", Form::iq3_xxs},
                                                 {"iq3_s", Form::iq3_s}};

Form form_of(const std::string& name) {
    if (name == "int4") return Form::int4;
    if (name == "int8") return Form::int8;
    if (name == "fp4") return Form::fp4;
    if (name == "iq4") return Form::iq4;
    if (name == "q4_k") return Form::q4_k;
    if (name == "q5_k") return Form::q5_k;
    if (name == "q6_k") return Form::q6_k;
    if (name == "iq4_xs") return Form::iq4_xs;
    for (const auto& [named, form] : ROWS)
        if (name == named) return form;
    const Dtype kind = dtype_of(name);
    return kind == Dtype::f32 ? Form::f32 : kind == Dtype::f16 ? Form::f16 : Form::bf16;
}

bool in_blocks(Form form) {
    return form == Form::q4_k || form == Form::q5_k || form == Form::q6_k || form == Form::iq4_xs;
}
bool in_groups(Form form) {
    return form == Form::int4 || form == Form::int8 || (values_of(form) && form != Form::iq4_xs);
}

// The codes of `found` are in super-blocks.
void take_blocks(Source& found, const Part& part) {
    const auto& [name, data, scale, minimum, block_scale, block_minimum] = part;
    check(data.itemsize() == 1 && found.inner % SUPER == 0, "codes are bytes in super-blocks of 256");
    found.half = true, found.minimum = found.form == Form::q4_k || found.form == Form::q5_k;
    const auto fits = [&](const std::optional<Weights>& numbers, Index share, std::size_t size) {
        check(numbers && numbers->ndim() == 2 && numbers->shape(0) == data.shape(0) && numbers->itemsize() == size &&
                  static_cast<Index>(numbers->shape(1)) * share == found.inner,
              "a super-block has scales and minima in bytes, and a half for all of them");
        return numbers->data();
    };
    found.scales = fits(scale, found.form == Form::q6_k ? GROUP / 2 : GROUP, 1), found.block_scales = fits(block_scale, SUPER, 2);
    check(found.minimum == minimum.has_value() && found.minimum == block_minimum.has_value(), "q4_k and q5_k alone have minima");
    if (found.minimum) found.minima = fits(minimum, GROUP, 1), found.block_minima = fits(block_minimum, SUPER, 2);
}

Source source_of(const Part& part) {
    const auto& [name, data, scale, minimum, block_scale, block_minimum] = part;
    check(data.ndim() == 2 && data.shape(0) > 0 && data.shape(1) > 0, "a matrix part is [out, in]");
    Source found = {};
    found.data = data.data(), found.out = static_cast<Index>(data.shape(0)), found.inner = static_cast<Index>(data.shape(1));
    found.form = form_of(name);
    if (const Index bytes = row_block_bytes(found.form)) {
        check(data.itemsize() == 1 && found.inner % bytes == 0, "rows of a codebook are named by whole blocks");
        found.half = true, found.inner = found.inner / bytes * SUPER;
        return found;
    }
    if (in_blocks(found.form)) {
        take_blocks(found, part);
        return found;
    }
    if (!in_groups(found.form)) {
        check(data.itemsize() == (found.form == Form::f32 ? 4u : 2u), "a matrix part has the type it names");
        return found;
    }
    check(data.itemsize() == 1 && found.inner % GROUP == 0 && scale, "codes are bytes in groups of 32 with scales");
    const auto fits_groups = [&](const Weights& numbers) {
        return numbers.ndim() == 2 && numbers.shape(0) == data.shape(0) && numbers.shape(1) * GROUP == data.shape(1) &&
               numbers.itemsize() == scale->itemsize();
    };
    check(fits_groups(*scale) && (!minimum || fits_groups(*minimum)), "scales and minima are [out, in / 32], of one type");
    check(scale->itemsize() == 2 || scale->itemsize() == 4, "scales are halves or floats");
    found.half = scale->itemsize() == 2, found.scales = scale->data();
    found.minimum = minimum.has_value(), found.minima = minimum ? minimum->data() : nullptr;
    return found;
}

// A part without numbers: its type, whether scales are halves, whether there are minima, outputs and inputs.
using Shape = std::tuple<std::string, bool, bool, Index, Index>;

Source source_of(const Shape& shape) {
    const auto& [name, half, minimum, out, inner] = shape;
    check(out > 0 && inner > 0, "a matrix part is [out, in]");
    Source found = {};
    found.half = half, found.minimum = minimum, found.out = out, found.inner = inner;
    found.form = form_of(name);
    check(!in_groups(found.form) || inner % GROUP == 0, "codes are in groups of 32");
    check(!(in_blocks(found.form) || row_block_bytes(found.form)) || inner % SUPER == 0, "codes are in super-blocks of 256");
    return found;
}

template <class T>
Matrix make_matrix(const std::vector<T>& parts, const std::optional<ConstFloats>& bias,
                   const std::byte* mapped = nullptr) {
    std::vector<Source> sources;
    for (const T& part : parts) sources.push_back(source_of(part));
    std::vector<float> numbers;
    if (bias) numbers.assign(bias->data(), bias->data() + bias->size());
    return Matrix(sources, numbers, mapped);
}

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Matrix map_matrix(const std::vector<Shape>& shapes, const std::optional<ConstFloats>& bias, const Bytes& bytes) {
    check(reinterpret_cast<std::uintptr_t>(bytes.data()) % 64 == 0, "mapped panels begin at a multiple of 64 bytes");
    Matrix found = make_matrix(shapes, bias, reinterpret_cast<const std::byte*>(bytes.data()));
    check(found.bytes() == bytes.size(), "there are as many bytes as the panels of these parts have");
    return found;
}

}  // namespace

void bind_matrix(nb::module_& module) {
    nb::class_<Matrix>(module, "Matrix", nb::is_weak_referenceable())
        .def("__init__",
             [](Matrix* self, const std::vector<Part>& parts, const std::optional<ConstFloats>& bias) {
                 new (self) Matrix(make_matrix(parts, bias));
             },
             nb::arg("parts"), nb::arg("bias").none())
        .def("memory",
             [](Matrix& one) {
                 check(one.memory(), "the panels of this matrix are mapped");
                 return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(one.memory(), {one.bytes()});
             },
             nb::rv_policy::reference_internal, "Its panels as bytes, to be kept and to be filled.")
        .def_prop_ro("nbytes", &Matrix::bytes)
        .def_prop_ro("out", [](const Matrix& one) { return one.view().out; });
    module.def("set_codebook",
               [](const std::string& name, const Bytes& rows) {
                   const Form form = form_of(name);
                   check(row_block_bytes(form) > 0 && rows.size() == row_count(form) * (in_eights(form) ? 8 : 4),
                         "a codebook has all of its rows");
                   set_codebook(form, reinterpret_cast<const std::byte*>(rows.data()), rows.size());
               },
               nb::arg("form"), nb::arg("rows"), "Keep the rows that the blocks of a form name.");
    module.def("blank",
               [](const std::vector<Shape>& shapes, const std::optional<ConstFloats>& bias) {
                   return make_matrix(shapes, bias);
               },
               nb::arg("shapes"), nb::arg("bias").none(), "A matrix whose memory is to be filled.");
    module.def("mapped", &map_matrix, nb::arg("shapes"), nb::arg("bias").none(), nb::arg("bytes"), nb::keep_alive<0, 3>(),
               "A matrix whose panels are these bytes, which it keeps alive.");
}

}  // namespace cairn
