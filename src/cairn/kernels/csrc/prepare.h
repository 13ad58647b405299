// Rows of activations, rounded once for all the outputs that they are multiplied into: see Activations.
#pragma once

#include "int8_product.h"
#include "rounding.h"

namespace cairn::CAIRN_VARIANT {

// One group into lane `lane` of a tile of `height` rows.
inline void put_group(const float* x, std::byte* to, Index lane, Index height) {
    Vec low = load(x), high = load(x + LANES);
    const auto [factor, scale] = rounding_to(127.0f, largest(larger(magnitude(low), magnitude(high))));
    if (factor == 0.0f) low = high = Vec{};
    std::int8_t codes[GROUP];
    const std::int32_t first = sum(round_codes(low, factor, codes));
    const std::int32_t second = sum(round_codes(high, factor, codes + LANES)), all = first + second;
    std::byte* at = to + BESIDE * lane;
    for (Index k = 0; k < GROUP; k += BESIDE, at += BESIDE * height) __builtin_memcpy(at, codes + k, BESIDE);
    at -= (BESIDE - 4) * lane;
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
