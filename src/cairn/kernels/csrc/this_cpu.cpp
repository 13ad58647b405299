// Prints which variants of the kernels run on this CPU, the fastest first, as module.cpp orders them; CMake runs it.
#include <cstdio>

#include "amx_cpu.h"
#include "arm_cpu.h"

int main() {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool vnni = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
    const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
    const bool intel = __builtin_cpu_is("intel");
    if (vnni && cairn::cpu_has_tiles()) std::printf("amx;");
    if (vnni && intel) std::printf("avx512vnni;");
    if (bf16) std::printf("avx512;");
    if (vnni && !intel) std::printf("avx512vnni;");
#if defined(__GNUC__) && (__GNUC__ >= 12 || defined(__clang__))
    if (avx2 && __builtin_cpu_supports("avxvnni")) std::printf("avxvnni;");
#endif
    if (avx2) std::printf("avx2;");
#elif defined(__aarch64__)
    using cairn::ArmFeature;
    const bool dots = cairn::arm_has(ArmFeature::dot_products);
    if (dots && cairn::arm_has(ArmFeature::byte_matrices)) std::printf("neoni8mm;");
    if (dots) std::printf("neon;");
#endif
    std::printf("portable");
}
