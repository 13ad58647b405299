// Whether this CPU has the tile unit of AMX, and whether the system lets this process use it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace cairn {

// Products of bfloat16 in eight tiles of 16 rows of 64 bytes, which the system saves when it switches threads.
inline bool cpu_has_tiles() {
#if defined(__x86_64__)
    constexpr unsigned OSXSAVE = 1u << 27, BF16 = 1u << 22, TILE = 1u << 24;
    constexpr std::uint32_t STATES = 3u << 17;  // of XCR0: the configuration, and the tiles
    unsigned a, b, c, d;
    if (!__get_cpuid_count(1, 0, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (BF16 | TILE)) != (BF16 | TILE)) return false;
    std::uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & STATES) != STATES) return false;
    // Palette 1: bytes of a row in the low half of ebx, the number of tiles in its high half, rows in ecx.
    if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d)) return false;
    if ((b & 0xffff) < 64 || b >> 16 < 8 || (c & 0xffff) < 16) return false;
    // What one product takes at most: pairs of a row in the low byte of ebx, bytes of a row above it.
    return __get_cpuid_count(0x1e, 0, &a, &b, &c, &d) && (b & 0xff) >= 16 && (b >> 8 & 0xffff) >= 64;
#else
    return false;
#endif
}

// The name, and the number that says family, model and stepping; "" where the CPU does not say.
inline std::string cpu_signature() {
#if defined(__x86_64__)
    unsigned words[12], number, b, c, d;
    for (unsigned i = 0; i < 3; i++) {
        unsigned* at = words + 4 * i;
        if (!__get_cpuid(0x80000002 + i, at, at + 1, at + 2, at + 3)) return "";
    }
    if (!__get_cpuid(1, &number, &b, &c, &d)) return "";
    char text[sizeof words + 1] = {}, all[sizeof text + 16];
    std::memcpy(text, words, sizeof words);
    std::snprintf(all, sizeof all, "%s, %x", text, number);
    return all;
#else
    return "";
#endif
}

// Linux gives a process the tiles' state only where it asks, for all of its threads. Asking again changes nothing.
inline bool allow_tiles() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return false;
#endif
}

}  // namespace cairn
