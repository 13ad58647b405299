// One row of activations, rounded once for all the outputs that it is multiplied into: see RowLayout.
#pragma once

#include "simd.h"

namespace cairn::CAIRN_VARIANT {

constexpr float LEAST_MAGNITUDE = 0x1p-100f;  // below it a group counts as zero: 127 / it could overflow
constexpr std::int32_t INFINITE = 0x7f800000;

typedef std::int8_t BytePart __attribute__((vector_size(WIDTH)));

inline IntVec magnitude(const Vec& x) {
    IntVec out;
    for (int i = 0; i < PARTS; i++) out.part[i] = (IntPart)x.part[i] & 0x7fffffff;
    return out;
}
// Magnitudes are ordered as their bits are, and a NaN is the largest.
inline std::int32_t largest(const IntVec& a, const IntVec& b) {
    IntPart most{};
    for (int i = 0; i < PARTS; i++) {
        most = a.part[i] > most ? a.part[i] : most;
        most = b.part[i] > most ? b.part[i] : most;
    }
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)most);
#else
    std::int32_t out = 0;
    for (int i = 0; i < WIDTH; i++) out = most[i] > out ? most[i] : out;
    return out;
#endif
}
inline std::int32_t sum(const IntPart& x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    std::int32_t out = 0;
    for (int i = 0; i < WIDTH; i++) out += x[i];
    return out;
#endif
}

// The 16 products x * factor, to the nearest integer with ties to even, as bytes; returns their sums by lane.
inline IntPart put_codes(const Vec& x, float factor, std::int8_t* out) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    IntPart total{};
    for (int i = 0; i < PARTS; i++) {
        const Part shifted = x.part[i] * factor + ROUND;
        const IntPart code = (IntPart)shifted - 0x4b400000;
        const BytePart bytes = __builtin_convertvector(code, BytePart);
        __builtin_memcpy(out + i * WIDTH, &bytes, sizeof bytes);
        total += code;
    }
    return total;
}

inline void put_groups(const float* x, Index size, const RowLayout& layout, std::byte* row) {
    auto* codes = reinterpret_cast<std::int8_t*>(row + layout.codes);
    auto* scale = reinterpret_cast<float*>(row + layout.scale);
    auto* start4 = reinterpret_cast<std::int32_t*>(row + layout.start4);
    auto* start8 = reinterpret_cast<std::int32_t*>(row + layout.start8);
    auto* total = reinterpret_cast<float*>(row + layout.total);
    for (Index group = 0; group < size / GROUP; group++, x += GROUP, codes += GROUP) {
        Vec low = load(x), high = load(x + LANES);
        const std::int32_t bits = largest(magnitude(low), magnitude(high));
        float most, factor = 0.0f;
        __builtin_memcpy(&most, &bits, 4);
        if (most >= LEAST_MAGNITUDE && bits < INFINITE) {
            factor = 127.0f / most;
            scale[group] = most / 127.0f;
        } else {
            low = high = Vec{};
            scale[group] = bits >= INFINITE ? __builtin_nanf("") : 0.0f;
        }
        const std::int32_t all = sum(put_codes(low, factor, codes) + put_codes(high, factor, codes + LANES));
        start4[group] = -8 * all;
        start8[group] = -128 * all;
        total[group] = scale[group] * static_cast<float>(all);
    }
}

// To the nearest bfloat16, ties to even; a NaN stays one.
inline std::uint16_t nearest_bf16(float x) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void put_pairs(const float* x, Index size, std::uint16_t* out) {
    for (Index k = 0; k < size; k++) out[k] = nearest_bf16(x[k]);
    if (size % 2) out[size] = 0;
}

inline void prepare(const float* x, Index size, const RowLayout& layout, std::byte* row) {
    if (layout.pairs) put_pairs(x, size, reinterpret_cast<std::uint16_t*>(row));
    if (layout.groups) put_groups(x, size, layout, row);
}

}  // namespace cairn::CAIRN_VARIANT
