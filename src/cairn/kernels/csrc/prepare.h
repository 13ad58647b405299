// One row of activations, rounded once for all the outputs that it is multiplied into: see Activations.
#pragma once

#include "groups.h"

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
inline IntPart round_codes(const Vec& x, float factor, std::int8_t* out) {
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

// One group into lane `lane` of a tile of `height` rows.
inline void put_group(const float* x, std::byte* to, Index lane, Index height) {
    Vec low = load(x), high = load(x + LANES);
    const std::int32_t bits = largest(magnitude(low), magnitude(high));
    float most, factor = 0.0f, scale = 0.0f;
    __builtin_memcpy(&most, &bits, 4);
    if (most >= LEAST_MAGNITUDE && bits < INFINITE) {
        factor = 127.0f / most;
        scale = most / 127.0f;
    } else {
        low = high = Vec{};
        if (bits >= INFINITE) scale = __builtin_nanf("");
    }
    std::int8_t codes[GROUP];
    const std::int32_t all = sum(round_codes(low, factor, codes) + round_codes(high, factor, codes + LANES));
    std::byte* at = to + 4 * lane;
    for (Index q = 0; q < GROUP / 4; q++, at += 4 * height) __builtin_memcpy(at, codes + 4 * q, 4);
    const std::int32_t start4 = -8 * all, start8 = -128 * all;
    const float total = scale * static_cast<float>(all);
    __builtin_memcpy(at, &scale, 4);
    __builtin_memcpy(at + 4 * height, &start4, 4);
    __builtin_memcpy(at + 8 * height, &start8, 4);
    __builtin_memcpy(at + 12 * height, &total, 4);
}

inline void prepare(const Activations& in, Index row) {
    const float* x = in.x + row * in.stride;
    if (in.pairs) {
        const Tiles tiles(in.rows, PAIR_ROWS);
        const Index tile = tiles.of(row), first = tiles.first(tile), height = tiles.height(tile);
        std::byte* to = in.pairs + first * Activations::pair_bytes(in.inner) + 4 * (row - first);
        for (Index k = 0; k < in.inner; k += LANES) {
            const Index left = in.inner - k;
            std::uint16_t pairs[LANES];
            store_bf16(pairs, left < LANES ? load_first(x + k, left) : load(x + k));
            for (Index i = 0; i < LANES && i < left; i += 2, to += 4 * height) __builtin_memcpy(to, pairs + i, 4);
        }
    }
    if (in.groups) {
        const Tiles tiles(in.rows, GROUP_ROWS);
        const Index tile = tiles.of(row), first = tiles.first(tile), height = tiles.height(tile);
        std::byte* to = in.groups + first * Activations::group_bytes(in.inner);
        for (Index k = 0; k < in.inner; k += GROUP, to += height * ROW_GROUP_BYTES)
            put_group(x + k, to, row - first, height);
    }
}

}  // namespace cairn::CAIRN_VARIANT
