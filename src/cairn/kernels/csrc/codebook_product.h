// Products with weights that name rows of a codebook. Blocks of 16 outputs become codes of 8 bits when they are met, once for
// some tiles, which go on from there as with int8: sums in a group, or in each half of it, are exact integers.
#pragma once

#include "codebook.h"
#include "superblock_product.h"

namespace cairn::CAIRN_VARIANT {

// Rows that share a decoded block: sums of them wait in memory for the next.
constexpr Index ROWS_AT_ONCE = 128;

// The same as a group of int8.
struct RowGroup {
    static constexpr int BITS = 8;
    static constexpr bool MINIMUM = false, STARTS = !SIGNED_BYTES;
    Codes<8> codes;
    Vec scale, minimum;
};

// acc[FIRST to FIRST + LEFT] += a group's products with these rows of the tile, each half with its own scale.
template <int LEFT, int FIRST = 0, int R>
inline void add_two_halves(Vec (&acc)[R], const std::byte* in, const Codes<8>& codes, const Vec (&half)[2]) {
    constexpr int U = LEFT < HALVES ? LEFT : HALVES;
    const auto* scale = reinterpret_cast<const float*>(in + R * GROUP) + FIRST;
    const auto* start = reinterpret_cast<const std::int32_t*>(scale) + 4 * R;
    const auto* x = reinterpret_cast<const std::int8_t*>(in) + FIRST * BESIDE;
    IntVec first[U], second[U];
#pragma GCC unroll 4
    for (int u = 0; u < U; u++)
        for (int i = 0; i < PARTS; i++) {
            // What stands there takes 32 from each code.
            first[u].part[i] = IntPart{} + (SIGNED_BYTES ? 0 : 4 * start[u]);
            second[u].part[i] = IntPart{} + (SIGNED_BYTES ? 0 : 4 * start[R + u]);
        }
    codes.template add<U, R, 0, 4>(x, first);
    codes.template add<U, R, 4, 8>(x, second);
#pragma GCC unroll 4
    for (int u = 0; u < U; u++) {
        const Vec share = set(scale[u]);
        acc[FIRST + u] = fma(to_float(first[u]), half[0] * share, acc[FIRST + u]);
        acc[FIRST + u] = fma(to_float(second[u]), half[1] * share, acc[FIRST + u]);
    }
    if constexpr (LEFT > U) add_two_halves<LEFT - U, FIRST + U>(acc, in, codes, half);
}

// sums[R][16] += a block's products with the rows of a tile.
template <class Form, int R>
void add_row_block(const RowBlock& block, const std::byte* in, float (*sums)[LANES]) {
    const Vec scale = load_half(block.scale) * set(Form::STEP);
    Vec acc[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r] = load(sums[r]);
    for (Index group = 0; group < SUPER / GROUP; group++, in += R * ROW_GROUP_BYTES) {
        const Codes<8> codes(block.codes + group * GROUP * LANES);
        const std::uint8_t* whole = block.whole + group * 2 * LANES;
        const Vec first = scale * to_float(load_bytes(whole));
        if constexpr (Form::HALVES) {
            add_two_halves<R>(acc, in, codes, {first, scale * to_float(load_bytes(whole + LANES))});
        } else {
            add_group<RowGroup, R>(acc, in, RowGroup{codes, first, Vec{}});
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store(sums[r], acc[r]);
}

using AddRowBlock = void (*)(const RowBlock&, const std::byte*, float (*)[LANES]);

template <class Form, int R = GROUP_ROWS>
AddRowBlock row_block_of(Index rows) {
    if constexpr (R > 1)
        if (rows < R) return row_block_of<Form, R - 1>(rows);
    return add_row_block<Form, R>;
}

// Tiles `from` to `to` of the rows with one panel.
template <class Form>
void row_panel(const Product& job, const Segment& part, const Tiles& tiles, Index from, Index to, Index panel) {
    constexpr Index BYTES = Form::BYTES * LANES;
    const Index row = tiles.first(from), rows = (to < tiles.count ? tiles.first(to) : job.in.rows) - row;
    float sums[ROWS_AT_ONCE][LANES];
    for (Index i = 0; i < rows; i++) store(sums[i], Vec{});
    RowBlock found;
    const std::byte* blocks = part.panels + panel * part.panel_bytes();
    for (Index k = 0; k < part.inner; k += SUPER, blocks += BYTES) {
        for (Index line = 0; line < BYTES; line += 64) __builtin_prefetch(blocks + AHEAD + line);
        Form::decode(blocks, *part.codebook, found);
        for (Index tile = from; tile < to; tile++) {
            const Index first = tiles.first(tile), height = tiles.height(tile);
            const std::byte* in = job.in.groups + first * Activations::group_bytes(part.inner);
            row_block_of<Form>(height)(found, in + k / GROUP * height * ROW_GROUP_BYTES, sums + first - row);
        }
    }
    for (Index i = 0; i < rows; i++) put(job, part, row + i, panel, load(sums[i]));
}

// The activations of some tiles stay in the second cache for all panels.
template <class Form>
void row_product(const Product& job, const Segment& part, Index first_panel, Index last_panel) {
    const Tiles tiles(job.in.rows, GROUP_ROWS);
    constexpr Index MOST = ROWS_AT_ONCE / GROUP_ROWS;
    for (Index from = 0; from < tiles.count; from += MOST) {
        const Index to = from + MOST < tiles.count ? from + MOST : tiles.count;
        for (Index panel = first_panel; panel < last_panel; panel++) row_panel<Form>(job, part, tiles, from, to, panel);
    }
}

}  // namespace cairn::CAIRN_VARIANT
