// The Python module: which variants run here, and what the machine can do at most. Arrays are checked here and in the
// parts of the module, once.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "amx_cpu.h"
#include "amx_variant.h"
#include "arm_cpu.h"
#include "arrays.h"
#include "elementary.h"
#include "matrix_module.h"
#include "program_module.h"
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
namespace avxvnni {
extern const Variant variant;
}
namespace amx {
extern const Variant variant;
}
namespace amxmodel {
extern const Variant variant;
}
namespace avx512vnni {
extern const Variant variant;
}
namespace avx512 {
extern const Variant variant;
}
namespace neon {
extern const Variant variant;
}
namespace neoni8mm {
extern const Variant variant;
}

namespace {

// Of all that is compiled here: what `native.VERSION` says.
constexpr const char* VERSION = "native-7";

// Of what Python calls: what `native.INTERFACE` says.
constexpr int INTERFACE = 12;

bool runs(const std::string& name);

// Why the kernels with AMX's tiles do not run here; "" where they do. Asked before there are threads: what the system
// allows holds for those that begin later, too.
const std::string& tile_trouble() {
    static const std::string found = [] {
        if (!cpu_has_tiles() || !runs("avx512vnni")) return "this CPU has no AMX tiles of bfloat16";
#if defined(CAIRN_HAS_AMX)
        if (!allow_tiles()) return "the system does not let this process use AMX tiles (Linux 5.16 or newer does)";
        if (!amx::unit_runs()) return "this CPU says that it has AMX tiles, but their instructions are illegal";
        if (!amx::unit_is_exact()) return "the AMX tiles of this CPU compute other bits than Intel's manual says";
        return "";
#else
        return "they were not compiled when Cairn was installed";
#endif
    }();
    return found;
}

bool runs(const std::string& name) {
#if defined(__x86_64__)
    if (name == "amx") return tile_trouble().empty();
    if (name == "amxmodel") return runs("avx512vnni");
    if (name == "avx2")
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#if defined(CAIRN_HAS_AVXVNNI)
    if (name == "avxvnni") return runs("avx2") && __builtin_cpu_supports("avxvnni");
#endif
    if (name == "avx512vnni")
        return runs("avx2") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
    if (name == "avx512") return runs("avx512vnni") && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__)
    if (name == "neon") return arm_has(ArmFeature::dot_products);
    if (name == "neoni8mm") return runs("neon") && arm_has(ArmFeature::byte_matrices);
#endif
    return name == "portable";
}

// Variants that were compiled, the fastest first.
const std::vector<const Variant*>& compiled() {
    static const std::vector<const Variant*> all = [] {
        std::vector<const Variant*> found;
#if defined(CAIRN_HAS_AVX512)
        found.push_back(&avx512::variant);
#endif
#if defined(CAIRN_HAS_AVX512VNNI)
        // Intel's products of two pairs of bfloat16 take four times as long as a multiply-add of floats (a Xeon of
        // 2023): to widen the pairs is twice as fast.
        found.insert(__builtin_cpu_is("intel") ? found.begin() : found.end(), &avx512vnni::variant);
#endif
#if defined(CAIRN_HAS_AMX)
        found.insert(found.begin(), &amx::variant);
#endif
#if defined(CAIRN_HAS_AVXVNNI)
        found.push_back(&avxvnni::variant);
#endif
#if defined(CAIRN_HAS_AVX2)
        found.push_back(&avx2::variant);
#endif
#if defined(CAIRN_HAS_NEONI8MM)
        found.push_back(&neoni8mm::variant);
#endif
#if defined(CAIRN_HAS_NEON)
        found.push_back(&neon::variant);
#endif
        found.push_back(&portable::variant);
        return found;
    }();
    return all;
}

// Variants for tests, which `--kernels` does not offer.
const std::vector<const Variant*>& models() {
    static const std::vector<const Variant*> all = {
#if defined(CAIRN_HAS_AMXMODEL)
        &amxmodel::variant,
#endif
    };
    return all;
}

const Variant& find(const std::string& name) {
    for (const auto* list : {&compiled(), &models()})
        for (const Variant* one : *list)
            if (one->name == name && runs(name)) return *one;
    throw std::invalid_argument("the kernels " + name + " do not run here");
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

Index probe_multiply_bytes(const std::string& variant, Team& team, Index turns) {
    const Variant& kernels = find(variant);
    const Index pieces = 8 * team.size();
    team.run(pieces, [&](Index, int) {
        seen.store(kernels.multiply_bytes(turns, 1), std::memory_order_relaxed);
    });
    return pieces * turns * kernels.byte_products * 2;
}

Index probe_multiply_pairs(const std::string& variant, Team& team, Index turns) {
    const Variant& kernels = find(variant);
    if (kernels.pair_products == 0) return 0;
    const Index pieces = 8 * team.size();
    team.run(pieces, [&](Index, int) {
        seen.store(kernels.multiply_pairs(turns, 1), std::memory_order_relaxed);
    });
    return pieces * turns * kernels.pair_products * 2;
}

void elementary_of(const std::string& name, const ConstFloats& x, const Floats& out) {
    using Function = float (*)(float);
    static const std::pair<const char*, Function> all[] = {
        {"exp", exp_of},
        {"expm1", expm1_of},
        {"log", log_of},
        {"log1p", log1p_of},
        {"floor", floor_of},
        {"cos", [](float one) { return static_cast<float>(cos_sin_of(one).cos); }},
        {"sin", [](float one) { return static_cast<float>(cos_sin_of(one).sin); }},
    };
    check(x.size() == out.size(), "there is a place for each result");
    for (const auto& [known, function] : all) {
        if (name != known) continue;
        for (std::size_t i = 0; i < x.size(); i++) out.data()[i] = function(x.data()[i]);
        return;
    }
    throw std::invalid_argument("no elementary function is called " + name);
}

nb::list listed(const std::vector<const Variant*>& variants) {
    nb::list all;
    for (const Variant* one : variants) all.append(nb::make_tuple(one->name, runs(one->name)));
    return all;
}

}  // namespace
}  // namespace cairn

NB_MODULE(_native, m) {
    using namespace cairn;
    m.attr("VERSION") = VERSION;
    m.attr("INTERFACE") = INTERFACE;
    m.def("probe_read", &probe_read, nb::arg(), nb::arg(), nb::arg().noconvert(), nb::call_guard<nb::gil_scoped_release>(),
          "Read whole MiB of the floats on the team's threads; returns the bytes read.");
    m.def("probe_multiply", &probe_multiply, nb::call_guard<nb::gil_scoped_release>(),
          "So many turns of multiply-adds in registers on the team's threads; returns the operations done.");
    m.def("probe_multiply_bytes", &probe_multiply_bytes, nb::call_guard<nb::gil_scoped_release>(),
          "The same of products of bytes, with integer instructions; returns the operations done.");
    m.def("probe_multiply_pairs", &probe_multiply_pairs, nb::call_guard<nb::gil_scoped_release>(),
          "The same of pairs of bfloat16; returns the operations done, 0 where no instruction multiplies pairs.");
    m.def("variants", [] { return listed(compiled()); },
          "(name, whether it runs here) of each compiled variant, the fastest first.");
    m.def("models", [] { return listed(models()); }, "The same of variants for tests.");
    m.def("has_tiles", &cpu_has_tiles, "Whether this CPU has AMX tiles of bfloat16, which the system saves.");
    m.def("cpu", &cpu_signature, "The name of this CPU, its family, model and stepping; \"\" if it does not say.");
    m.def("tile_trouble", &tile_trouble, "Why the kernels with AMX's tiles do not run here; \"\" where they do.");
    m.def("elementary", &elementary_of, nb::arg(), nb::arg().noconvert(), nb::arg().noconvert(),
          "Write exp, expm1, log, log1p, floor, cos or sin of each float of x to out, as the kernels compute it.");
    nb::class_<Team>(m, "Team").def(nb::init<int>()).def_prop_ro("threads", &Team::size);
    bind_matrix(m);
    bind_program(m, find);
    bind_sampler(m, find);
}
