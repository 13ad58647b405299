// The Python module: which variants run here, packed matrices, and programs. Arrays are checked here, once.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <tuple>

#include "matrix.h"
#include "program.h"
#include "sampler_module.h"
#include "team.h"

namespace nb = nanobind;

namespace cairn {

namespace portable {
extern const Variant variant;
}
namespace avx2 {
extern const Variant variant;
}
namespace avx512 {
extern const Variant variant;
}

namespace {

using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using ConstFloats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const std::int32_t, nb::c_contig, nb::device::cpu>;
using Pool = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Weights = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

bool runs(const std::string& name) {
#if defined(__x86_64__)
    if (name == "avx2")
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (name == "avx512")
        return runs("avx2") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
#endif
    return name == "portable";
}

// Variants that were compiled, the fastest first.
const std::vector<const Variant*>& compiled() {
    static const std::vector<const Variant*> all = {
#if defined(CAIRN_HAS_AVX512)
        &avx512::variant,
#endif
#if defined(CAIRN_HAS_AVX2)
        &avx2::variant,
#endif
        &portable::variant,
    };
    return all;
}

const Variant& find(const std::string& name) {
    for (const Variant* one : compiled())
        if (one->name == name && runs(name)) return *one;
    throw std::invalid_argument("the kernels " + name + " do not run here");
}

void check(bool right, const char* what) {
    if (!right) throw std::invalid_argument(what);
}

Dtype dtype_of(const std::string& name) {
    if (name == "float32") return Dtype::f32;
    if (name == "float16") return Dtype::f16;
    if (name == "bfloat16") return Dtype::bf16;
    throw std::invalid_argument("weights are float32, float16 or bfloat16, not " + name);
}

// One part: its type ("int4", "int8", "q4_k" ... for codes), its numbers or codes, scales and minima of codes, and those
// of super-blocks.
using Part = std::tuple<std::string, Weights, std::optional<Weights>, std::optional<Weights>, std::optional<Weights>,
                        std::optional<Weights>>;

Form form_of(const std::string& name) {
    if (name == "int4") return Form::int4;
    if (name == "int8") return Form::int8;
    if (name == "q4_k") return Form::q4_k;
    if (name == "q5_k") return Form::q5_k;
    if (name == "q6_k") return Form::q6_k;
    const Dtype kind = dtype_of(name);
    return kind == Dtype::f32 ? Form::f32 : kind == Dtype::f16 ? Form::f16 : Form::bf16;
}

bool in_blocks(Form form) { return form == Form::q4_k || form == Form::q5_k || form == Form::q6_k; }

// The codes of `found` are in super-blocks.
void take_blocks(Source& found, const Part& part) {
    const auto& [name, data, scale, minimum, block_scale, block_minimum] = part;
    check(data.itemsize() == 1 && found.inner % SUPER == 0, "codes are bytes in super-blocks of 256");
    found.half = true, found.minimum = found.form != Form::q6_k;
    const auto fits = [&](const std::optional<Weights>& numbers, Index share, std::size_t size) {
        check(numbers && numbers->ndim() == 2 && numbers->shape(0) == data.shape(0) && numbers->itemsize() == size &&
                  static_cast<Index>(numbers->shape(1)) * share == found.inner,
              "a super-block has scales and minima in bytes, and a half for all of them");
        return numbers->data();
    };
    found.scales = fits(scale, found.minimum ? GROUP : GROUP / 2, 1), found.block_scales = fits(block_scale, SUPER, 2);
    check(found.minimum == minimum.has_value() && found.minimum == block_minimum.has_value(), "q6_k alone has no minima");
    if (found.minimum) found.minima = fits(minimum, GROUP, 1), found.block_minima = fits(block_minimum, SUPER, 2);
}

Source source_of(const Part& part) {
    const auto& [name, data, scale, minimum, block_scale, block_minimum] = part;
    check(data.ndim() == 2 && data.shape(0) > 0 && data.shape(1) > 0, "a matrix part is [out, in]");
    Source found = {};
    found.data = data.data(), found.out = static_cast<Index>(data.shape(0)), found.inner = static_cast<Index>(data.shape(1));
    found.form = form_of(name);
    if (in_blocks(found.form)) {
        take_blocks(found, part);
        return found;
    }
    if (found.form != Form::int4 && found.form != Form::int8) {
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
    const bool codes = found.form == Form::int4 || found.form == Form::int8;
    check(!codes || inner % GROUP == 0, "codes are in groups of 32");
    check(!in_blocks(found.form) || inner % SUPER == 0, "codes are in super-blocks of 256");
    return found;
}

template <class T>
Matrix make_matrix(const std::vector<T>& parts, const std::optional<ConstFloats>& bias) {
    std::vector<Source> sources;
    for (const T& part : parts) sources.push_back(source_of(part));
    std::vector<float> numbers;
    if (bias) numbers.assign(bias->data(), bias->data() + bias->size());
    return Matrix(sources, numbers);
}

Norm norm_of(const ConstFloats& x, const ConstFloats& weight, double eps) {
    check(weight.ndim() == 1 && x.ndim() == 2 && x.shape(1) == weight.shape(0), "a norm has its input's width");
    return {weight.data(), static_cast<Index>(weight.shape(0)), static_cast<float>(eps)};
}

void fits(const ConstFloats& x, const Matrix& matrix, const Floats& out) {
    check(x.ndim() == 2 && static_cast<Index>(x.shape(1)) == matrix.view().inner, "an input has the matrix's width");
    check(out.ndim() == 2 && static_cast<Index>(out.shape(1)) == matrix.view().out, "an output has the matrix's width");
}

// KV as numpy holds it: float32, float16, or bfloat16 as 16-bit integers.
Pages pages_of(const Pool& kv, int layer) {
    check(kv.ndim() == 6 && kv.shape(2) == 2 && kv.shape(4) == BLOCK_TOKENS, "KV is [blocks, layers, 2, K, 16, D]");
    check(layer >= 0 && layer < static_cast<int>(kv.shape(1)), "the layer is in the KV");
    check(kv.shape(5) % 2 == 0 && kv.shape(5) <= MAX_HEAD, "a head has an even size of at most 1024");
    Dtype dtype = Dtype::f32;
    if (kv.dtype() == nb::dtype<std::uint16_t>())
        dtype = Dtype::bf16;
    else if (kv.dtype().code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float) && kv.dtype().bits == 16)
        dtype = Dtype::f16;
    else
        check(kv.dtype() == nb::dtype<float>(), "KV is float32, float16 or bfloat16");
    return {static_cast<std::byte*>(kv.data()), dtype, static_cast<Index>(kv.shape(1)), layer,
            static_cast<Index>(kv.shape(3)), static_cast<Index>(kv.shape(5))};
}

void embed(Program& program, const Weights& table, const std::string& dtype, const Ints& tokens,
           const Floats& hidden) {
    check(table.ndim() == 2 && hidden.ndim() == 2 && table.shape(1) == hidden.shape(1), "a table has hidden's width");
    check(table.itemsize() == (dtype_of(dtype) == Dtype::f32 ? 4u : 2u), "a table has the type it names");
    program.embed(table.data(), dtype_of(dtype), static_cast<Index>(table.shape(1)), tokens.data(), hidden.data());
}

void look_up(Program& program, const Matrix& table, const Ints& tokens, const Floats& hidden) {
    check(hidden.ndim() == 2 && static_cast<Index>(hidden.shape(1)) == table.view().inner, "a table has hidden's width");
    program.look_up(table.view(), tokens.data(), hidden.data());
}

void rope_angles(Program& program, const ConstFloats& frequencies, double factor, const Ints& positions,
                 const Floats& angles) {
    check(angles.ndim() == 3 && angles.shape(2) == frequencies.shape(0), "angles are [M, 2, D / 2]");
    program.rope_angles(frequencies.data(), factor, static_cast<Index>(frequencies.shape(0)), positions.data(),
                        angles.data());
}

void norm_project(Program& program, const ConstFloats& hidden, const ConstFloats& norm, double eps,
                  const Matrix& matrix, const Floats& out) {
    fits(hidden, matrix, out);
    program.norm_project(hidden.data(), norm_of(hidden, norm, eps), matrix.view(), out.data(),
                         static_cast<Index>(hidden.shape(0)));
}

void rope_write(Program& program, const ConstFloats& qkv, const ConstFloats& angles,
                const std::optional<ConstFloats>& q_norm, const std::optional<ConstFloats>& k_norm, double eps,
                const Pool& kv, int layer, const Ints& slots, const Floats& query) {
    const Pages pages = pages_of(kv, layer);
    check(query.ndim() == 3 && static_cast<Index>(query.shape(2)) == pages.size, "a query is [M, Q, D]");
    const auto heads = static_cast<Index>(query.shape(1));
    check(qkv.ndim() == 2 && static_cast<Index>(qkv.shape(1)) == (heads + 2 * pages.heads) * pages.size,
          "qkv is [M, (Q + 2K) D]");
    check(angles.ndim() == 3 && static_cast<Index>(angles.shape(2)) * 2 == pages.size, "angles are [M, 2, D / 2]");
    for (const auto* norm : {&q_norm, &k_norm})
        check(!*norm || static_cast<Index>((*norm)->size()) == pages.size, "a head's norm has the head's size");
    program.rope_write({qkv.data(), angles.data(), q_norm ? q_norm->data() : nullptr,
                        k_norm ? k_norm->data() : nullptr, static_cast<float>(eps), pages, slots.data(), query.data(),
                        heads});
}

void attention(Program& program, const ConstFloats& query, const Pool& kv, int layer, const Ints& rows,
               const Ints& tables, int window, double scale, const Floats& out) {
    const Pages pages = pages_of(kv, layer);
    check(query.ndim() == 3 && static_cast<Index>(query.shape(2)) == pages.size, "a query is [M, Q, D]");
    check(query.shape(1) % kv.shape(3) == 0, "query heads are a multiple of key-value heads");
    check(rows.ndim() == 2 && rows.shape(1) == 3 && tables.ndim() == 2, "rows are [B, 3], tables [B, width]");
    check(out.size() == query.size(), "attention's output is [M, Q D]");
    Attend job = {};
    job.query = query.data(), job.kv = pages, job.window = window, job.heads = static_cast<Index>(query.shape(1));
    job.scale = static_cast<float>(scale), job.out = out.data();
    program.attention(job, rows.data(), tables.data(), static_cast<Index>(tables.shape(1)),
                      static_cast<Index>(query.shape(0)));
}

void project_add(Program& program, const ConstFloats& x, const Matrix& matrix, const Floats& hidden) {
    fits(x, matrix, hidden);
    program.project_add(x.data(), matrix.view(), hidden.data(), static_cast<Index>(x.shape(0)));
}

void gated_mlp(Program& program, const Floats& hidden, const ConstFloats& norm, double eps, const Matrix& gate_up,
               const std::string& activation, const Matrix& down) {
    const MatrixView wide = gate_up.view(), back = down.view();
    check(activation == "silu" || activation == "gelu_tanh", "the activation is silu or gelu_tanh");
    check(hidden.ndim() == 2 && static_cast<Index>(hidden.shape(1)) == wide.inner && back.out == wide.inner &&
              wide.out == 2 * back.inner,
          "gate_up is [2F, H] and down [H, F]");
    program.gated_mlp(hidden.data(), norm_of(ConstFloats(hidden), norm, eps), wide,
                      activation == "silu" ? Activation::silu : Activation::gelu_tanh, back,
                      static_cast<Index>(hidden.shape(0)));
}

void logits(Program& program, const ConstFloats& hidden, const Ints& wanted, const ConstFloats& norm, double eps,
            const Matrix& head, const Floats& out) {
    fits(hidden, head, out);
    program.logits(hidden.data(), wanted.data(), norm_of(hidden, norm, eps), head.view(), out.data(),
                   static_cast<Index>(out.shape(0)));
}

// Both keep their result where the compiler cannot tell that nobody looks.
std::atomic<float> seen;

constexpr Index READ_PIECE = Index{1} << 18;  // floats

Index probe_read(const std::string& variant, Team& team, const ConstFloats& numbers) {
    const Variant& kernels = find(variant);
    const Index pieces = static_cast<Index>(numbers.size()) / READ_PIECE;
    team.run(pieces, [&](Index piece, int) {
        seen.store(kernels.read_all(numbers.data() + piece * READ_PIECE, READ_PIECE), std::memory_order_relaxed);
    });
    return pieces * READ_PIECE * static_cast<Index>(sizeof(float));
}

Index probe_multiply(const std::string& variant, Team& team, Index turns) {
    const Variant& kernels = find(variant);
    const Index pieces = 8 * team.size();
    team.run(pieces, [&](Index, int) {
        seen.store(kernels.multiply_add(turns, 0.5f), std::memory_order_relaxed);
    });
    return pieces * turns * kernels.chains * LANES * 2;
}

nb::list variant_list() {
    nb::list all;
    for (const Variant* one : compiled()) all.append(nb::make_tuple(one->name, runs(one->name)));
    return all;
}

}  // namespace
}  // namespace cairn

NB_MODULE(_native, m) {
    using namespace cairn;
    // A converted array would be a copy that dies while the program still points into it.
    const auto array = nb::arg().noconvert();
    const auto maybe = nb::arg().noconvert().none();
    m.def("probe_read", &probe_read, nb::arg(), nb::arg(), array, nb::call_guard<nb::gil_scoped_release>(),
          "Read whole MiB of the floats on the team's threads; returns the bytes read.");
    m.def("probe_multiply", &probe_multiply, nb::call_guard<nb::gil_scoped_release>(),
          "So many turns of multiply-adds in registers on the team's threads; returns the operations done.");
    m.def("variants", &variant_list, "(name, whether it runs here) of each compiled variant, the fastest first.");
    nb::class_<Matrix>(m, "Matrix", nb::is_weak_referenceable())
        .def("__init__",
             [](Matrix* self, const std::vector<Part>& parts, const std::optional<ConstFloats>& bias) {
                 new (self) Matrix(make_matrix(parts, bias));
             },
             nb::arg("parts"), nb::arg("bias").none())
        .def("memory",
             [](Matrix& one) {
                 return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(one.memory(), {one.bytes()});
             },
             nb::rv_policy::reference_internal, "Its panels as bytes, to be kept and to be filled.")
        .def_prop_ro("nbytes", &Matrix::bytes)
        .def_prop_ro("out", [](const Matrix& one) { return one.view().out; });
    m.def("blank", &make_matrix<Shape>, nb::arg("shapes"), nb::arg("bias").none(), "A matrix whose memory is to be filled.");
    nb::class_<Team>(m, "Team").def(nb::init<int>()).def_prop_ro("threads", &Team::size);
    nb::class_<Program>(m, "Program")
        .def("__init__", [](Program* self, const std::string& variant,
                            std::shared_ptr<Team> team) { new (self) Program(find(variant), std::move(team)); })
        .def("embed", &embed, array, nb::arg(), array, array)
        .def("embed", &look_up, nb::arg(), array, array)
        .def("rope_angles", &rope_angles, array, nb::arg(), array, array)
        .def("norm_project", &norm_project, array, array, nb::arg(), nb::arg(), array)
        .def("rope_write", &rope_write, array, array, maybe, maybe, nb::arg(), array, nb::arg(), array, array)
        .def("attention", &attention, array, array, nb::arg(), array, array, nb::arg(), nb::arg(), array)
        .def("project_add", &project_add, array, nb::arg(), array)
        .def("gated_mlp", &gated_mlp, array, array, nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("logits", &logits, array, array, array, nb::arg(), nb::arg(), array)
        .def("run", [](Program& self, Index tokens, Index rows, Index wanted) { self.run({tokens, rows, wanted}); },
             nb::call_guard<nb::gil_scoped_release>());
    bind_sampler(m, find);
}
