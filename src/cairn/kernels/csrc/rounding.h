// Numbers that are rounded to whole codes with one scale: activations in front of packed matrices, and KV of 8 bits.
#pragma once

#include "simd.h"

namespace cairn::CAIRN_VARIANT {

constexpr float LEAST_MAGNITUDE = 0x1p-100f;  // below it a group counts as zero: 127 / it could overflow
constexpr std::int32_t INFINITE = 0x7f800000;

typedef std::int8_t BytePart __attribute__((vector_size(WIDTH)));
typedef std::int16_t ShortPart __attribute__((vector_size(WIDTH * 2)));
typedef std::uint16_t WordPart __attribute__((vector_size(WIDTH * 4)));

inline IntVec magnitude(const Vec& x) {
    IntVec out;
    for (int i = 0; i < PARTS; i++) out.part[i] = (IntPart)x.part[i] & 0x7fffffff;
    return out;
}
// Lanes are folded in halves.
template <class F>
inline std::int32_t fold(const IntPart& x, F&& pair) {
#if defined(__AVX2__)
    typedef std::int32_t Eight __attribute__((vector_size(32)));
    typedef std::int32_t Four __attribute__((vector_size(16)));
#if defined(__AVX512F__)
    const Eight eight = pair(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7),
                             __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
#else
    const Eight eight = x;
#endif
    const Four four = pair(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
                           __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
    const Four two = pair(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
    return pair(two, __builtin_shufflevector(two, two, 1, 0, 3, 2))[0];
#else
    std::int32_t out = x[0];
    for (int i = 1; i < WIDTH; i++) out = pair(out, x[i]);
    return out;
#endif
}
// Magnitudes are ordered as their bits are, and a NaN is the largest.
inline IntVec larger(const IntVec& a, const IntVec& b) {
    IntVec out;
    for (int i = 0; i < PARTS; i++) out.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
    return out;
}
inline std::int32_t largest(const IntVec& x) {
    IntPart most = x.part[0];
    for (int i = 1; i < PARTS; i++) most = x.part[i] > most ? x.part[i] : most;
    return fold(most, [](auto one, auto other) { return one > other ? one : other; });
}
// The largest magnitude of `size` numbers, as bits.
inline std::int32_t largest(const float* x, Index size) {
    IntVec most = {};
    for (Index at = 0; at < size; at += LANES)
        most = larger(most, magnitude(size - at < LANES ? load_first(x + at, size - at) : load(x + at)));
    return largest(most);
}
inline std::int32_t sum(const IntPart& x) {
    return fold(x, [](auto one, auto other) { return one + other; });
}

// The 16 products x * factor, to the nearest integer with ties to even, as bytes or in 16 bits; returns their sums by lane.
template <class Code>
inline IntPart round_codes(const Vec& x, float factor, Code* out) {
    using Narrow = std::conditional_t<sizeof(Code) == 1, BytePart, ShortPart>;
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    IntPart total{};
    for (int i = 0; i < PARTS; i++) {
        const Part shifted = x.part[i] * factor + ROUND;
        const IntPart code = (IntPart)shifted - 0x4b400000;
        const Narrow narrow = __builtin_convertvector(code, Narrow);
        __builtin_memcpy(out + i * WIDTH, &narrow, sizeof narrow);
        total += code;
    }
    return total;
}

// What numbers are multiplied with to become codes of at most `most`, and what a code is multiplied with to become a
// number again.
struct Rounding {
    float factor, scale;
};
// `bits`: of the largest magnitude among them. Where that is not finite the scale is NaN; where numbers count as zero it is
// zero. In both cases the factor is zero, and numbers have to be taken for zero: a NaN would not become a code.
inline Rounding rounding_to(float most, std::int32_t bits) {
    float largest;
    __builtin_memcpy(&largest, &bits, 4);
    if (bits >= INFINITE) return {0.0f, __builtin_nanf("")};
    if (largest < LEAST_MAGNITUDE) return {0.0f, 0.0f};
    return {most / largest, largest / most};
}

// x[size] as codes of at most `most`, those of sixteen numbers after each other: take(first index, codes, count). Returns
// their scale and sum.
struct Rounded {
    float scale;
    std::int32_t sum;
};
template <class Code, class F>
inline Rounded round_row(const float* x, Index size, float most, F&& take) {
    const auto [factor, scale] = rounding_to(most, largest(x, size));
    IntPart total{};
    for (Index at = 0; at < size; at += LANES) {
        const Index count = size - at < LANES ? size - at : LANES;
        Code codes[LANES];
        const Vec here = factor == 0.0f ? Vec{} : count == LANES ? load(x + at) : load_first(x + at, count);
        total += round_codes(here, factor, codes);
        take(at, codes, count);
    }
    return {scale, sum(total)};
}

}  // namespace cairn::CAIRN_VARIANT
