// What the ARM CPU that this runs on can do, as its system says.
#pragma once

#include <cstddef>

#if defined(__aarch64__)

#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

namespace cairn {

enum class ArmFeature { dot_products, byte_matrices };  // FEAT_DotProd, FEAT_I8MM

inline bool arm_has(ArmFeature feature) {
    const bool dots = feature == ArmFeature::dot_products;
#if defined(__APPLE__)
    int has = 0;
    std::size_t size = sizeof has;
    const char* name = dots ? "hw.optional.arm.FEAT_DotProd" : "hw.optional.arm.FEAT_I8MM";
    return sysctlbyname(name, &has, &size, nullptr, 0) == 0 && has;
#elif defined(__linux__)
    // HWCAP_ASIMDDP and HWCAP2_I8MM, which older headers lack.
    return dots ? getauxval(AT_HWCAP) >> 20 & 1 : getauxval(AT_HWCAP2) >> 13 & 1;
#else
    return dots && false;
#endif
}

}  // namespace cairn

#endif
