// Rows of activations, rounded once for all the outputs that they are multiplied into: see Activations.
#pragma once

#include "quant_gemm.h"

namespace cairn::CAIRN_VARIANT {

constexpr float LEAST_MAGNITUDE = 0x1p-100f;  // below it a group counts as zero: 127 / it could overflow
constexpr std::int32_t INFINITE = 0x7f800000;

typedef std::int8_t BytePart __attribute__((vector_size(WIDTH)));

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
inline std::int32_t largest(const IntVec& a, const IntVec& b) {
    IntPart most{};
    for (int i = 0; i < PARTS; i++) {
        most = a.part[i] > most ? a.part[i] : most;
        most = b.part[i] > most ? b.part[i] : most;
    }
    return fold(most, [](auto one, auto other) { return one > other ? one : other; });
}
inline std::int32_t sum(const IntPart& x) {
    return fold(x, [](auto one, auto other) { return one + other; });
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
    const std::int32_t first = sum(round_codes(low, factor, codes));
    const std::int32_t second = sum(round_codes(high, factor, codes + LANES)), all = first + second;
    std::byte* at = to + 4 * lane;
    for (Index q = 0; q < GROUP / 4; q++, at += 4 * height) __builtin_memcpy(at, codes + 4 * q, 4);
    const std::int32_t start4 = -8 * all, start8 = -128 * all, start6[2] = {-32 * first, -32 * second};
    const float total = scale * static_cast<float>(all);
    __builtin_memcpy(at, &scale, 4);
    __builtin_memcpy(at + 4 * height, &start4, 4);
    __builtin_memcpy(at + 8 * height, &start8, 4);
    __builtin_memcpy(at + 12 * height, &total, 4);
    __builtin_memcpy(at + 16 * height, &start6[0], 4);
    __builtin_memcpy(at + 20 * height, &start6[1], 4);
}

inline void put_pairs(const Activations& in, Index row, Index from, Index to) {
    const Tiles tiles(in.rows, pair_rows(in.rows));
    const Index tile = tiles.of(row), first = tiles.first(tile), height = tiles.height(tile);
    const float* x = in.x + row * in.stride;
    std::byte* at = in.pairs + first * Activations::pair_bytes(in.inner) + from / 2 * 4 * height + 4 * (row - first);
    for (Index k = from; k < to; k += LANES) {
        const Index left = to - k;
        std::uint16_t pairs[LANES];
        store_bf16(pairs, left < LANES ? load_first(x + k, left) : load(x + k));
        for (Index i = 0; i < LANES && i < left; i += 2, at += 4 * height) __builtin_memcpy(at, pairs + i, 4);
    }
}

inline void put_groups(const Activations& in, Index row, Index from, Index to) {
    const Tiles tiles(in.rows, GROUP_ROWS);
    const Index tile = tiles.of(row), first = tiles.first(tile), height = tiles.height(tile);
    const float* x = in.x + row * in.stride;
    std::byte* at = in.groups + first * Activations::group_bytes(in.inner) + from / GROUP * height * ROW_GROUP_BYTES;
    for (Index k = from; k < to; k += GROUP, at += height * ROW_GROUP_BYTES) put_group(x + k, at, row - first, height);
}

// Rows of a tile lie in the same cache lines: a few groups of all of them are written before the next.
inline void prepare(const Activations& in, const Patch& patch) {
    constexpr Index STEP = 4 * GROUP;
    for (Index from = patch.from; from < patch.to; from += STEP) {
        const Index to = from + STEP < patch.to ? from + STEP : patch.to;
        for (Index row = patch.row; row < patch.row + patch.rows; row++) {
            if (in.pairs) put_pairs(in, row, from, to);
            if (in.groups) put_groups(in, row, from, to);
        }
    }
}

}  // namespace cairn::CAIRN_VARIANT
