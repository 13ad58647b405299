#include "heads_module.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "arrays.h"

namespace nb = nanobind;

namespace cairn {
namespace {

void norm_heads(Program& program, const Floats& x, int first, int heads, int size,
                const std::optional<ConstFloats>& weight, double eps) {
    const auto wide = static_cast<Index>(x.shape(1));
    check(x.ndim() == 2 && first >= 0 && heads > 0 && size > 0 && Index{first + heads} * size <= wide,
          "the heads lie in their rows");
    check(!weight || static_cast<int>(weight->size()) == size, "a norm has the size of a head");
    program.norm_heads(x.data(), wide, Index{first} * size, heads,
                       {weight ? weight->data() : nullptr, size, static_cast<float>(eps)});
}

void layer_norm_heads(Program& program, const Floats& x, int first, int heads, int size, const ConstFloats& weight,
                      const std::optional<ConstFloats>& bias, double eps) {
    const auto wide = static_cast<Index>(x.shape(1)), numbers = static_cast<Index>(weight.size());
    check(x.ndim() == 2 && first >= 0 && heads > 0 && size > 0 && Index{first + heads} * size <= wide,
          "the heads lie in their rows");
    check(numbers == size || numbers == Index{heads} * size, "a norm has the size of a head or of all heads");
    check(!bias || static_cast<int>(bias->size()) == size, "a norm's bias has the size of a head");
    program.layer_norm_heads(x.data(), wide, Index{first} * size, heads, {weight.data(), size, static_cast<float>(eps)},
                             numbers != size, bias ? bias->data() : nullptr);
}

void turn_heads(Program& program, const ConstFloats& x, const ConstFloats& angles, const Floats& query) {
    check(query.ndim() == 3 && x.ndim() == 2 && x.shape(1) == query.shape(1) * query.shape(2), "x is [M, Q D]");
    const auto turned = static_cast<Index>(angles.shape(2)) * 2, size = static_cast<Index>(query.shape(2));
    check(angles.ndim() == 3 && turned <= size, "angles are [M, 2, D / 2] or less");
    program.turn_heads(x.data(), static_cast<Index>(query.shape(1)), size, angles.data(), turned, query.data());
}

void scale_by(Program& program, const Floats& hidden, const ConstFloats& factor) {
    check(hidden.ndim() == 2 && factor.size() == 1, "a hidden state is [M, H], and its factor one number");
    program.scale_by(hidden.data(), static_cast<Index>(hidden.shape(1)), factor.data());
}

void xielu(Program& program, const ConstFloats& x, const ConstFloats& positive, const ConstFloats& negative,
           const Floats& out) {
    check(x.ndim() == 2 && out.ndim() == 2 && x.shape(1) == out.shape(1), "an output has its input's width");
    check(positive.size() == 1 && negative.size() == 1, "an xIELU has two numbers");
    program.xielu(x.data(), static_cast<Index>(x.shape(1)), positive.data(), negative.data(), out.data());
}

void gate_with(Program& program, const ConstFloats& x, const std::string& activation, const ConstFloats& by, int first,
               const Floats& out) {
    check(x.ndim() == 2 && out.ndim() == 2 && x.shape(1) == out.shape(1), "an output has its input's width");
    const auto size = static_cast<Index>(x.shape(1)), wide = static_cast<Index>(by.shape(1));
    check(by.ndim() == 2 && first >= 0 && first + size <= wide, "what it is multiplied with lies in its rows");
    program.gate_with(x.data(), size, activation_of(activation), by.data(), wide, first, out.data());
}

}  // namespace

void bind_heads(nb::class_<Program>& program) {
    const auto array = nb::arg().noconvert();
    program
        .def("norm_heads", &norm_heads, array, nb::arg(), nb::arg(), nb::arg(), nb::arg().noconvert().none(), nb::arg())
        .def("layer_norm_heads", &layer_norm_heads, array, nb::arg(), nb::arg(), nb::arg(), array,
             nb::arg().noconvert().none(), nb::arg())
        .def("turn_heads", &turn_heads, array, array, array)
        .def("xielu", &xielu, array, array, array, array)
        .def("scale_by", &scale_by, array, array)
        .def("gate_with", &gate_with, array, nb::arg(), array, nb::arg(), array);
}

}  // namespace cairn
