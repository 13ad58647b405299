// x @ matrix of bfloat16 with the tile unit: blocks of two tiles of rows by two panels. Each output is one chain along the
// tiles of its inner indices, whatever rows and panels are beside it: the block decides speed, never bits.
#pragma once

#include "amx_tile.h"
#include "product.h"

namespace cairn::CAIRN_VARIANT {

constexpr Index BLOCK_ROWS = 2 * TILE_ROWS, BLOCK_PANELS = 2;
constexpr Index block_rows(Index) { return BLOCK_ROWS; }

// Activations in bfloat16 for tiles, of each tile of rows (see Activations) [inner / 32, rounded up][rows][32]; of the
// last 32 inner indices only as many as there are, in whole pairs.
inline void put_tile_rows(const Activations& in, Index row, Index from, Index to) {
    const Tiles tiles(in.rows, BLOCK_ROWS);
    const Index tile = tiles.of(row), first = tiles.first(tile), height = tiles.height(tile);
    const float* x = in.x + row * in.stride;
    std::byte* at = in.pairs + first * Activations::pair_bytes(in.inner);
    for (Index k = from; k < to; k += TILE_INNER) {
        const Index left = in.inner - k < TILE_INNER ? in.inner - k : TILE_INNER;
        std::uint16_t numbers[TILE_INNER] = {};
        for (Index i = 0; i < left; i += LANES)
            store_bf16(numbers + i, left - i < LANES ? load_first(x + k + i, left - i) : load(x + k + i));
        const Index bytes = Activations::pair_bytes(left);
        std::memcpy(at + Activations::pair_bytes(k) * height + (row - first) * bytes, numbers,
                    static_cast<std::size_t>(bytes));
    }
}

// The last inner indices, where they fill no tile: rows and panels with zeros behind them.
struct Rest {
    alignas(64) std::byte x[BLOCK_ROWS][TILE_ROW_BYTES] = {}, weights[BLOCK_PANELS][TILE_BYTES] = {};

    void take_rows(const std::byte* from, Index height, Index bytes) {
        for (Index row = 0; row < height; row++)
            std::memcpy(x[row], from + row * bytes, static_cast<std::size_t>(bytes));
    }
    void take_panel(Index panel, const std::byte* from, Index pairs) {
        std::memcpy(weights[panel], from, static_cast<std::size_t>(pairs * TILE_ROW_BYTES));
    }
};

// Tiles 0 to 3 are sums, of R tiles of rows by P panels; 4 and 5 rows; 6 and 7 weights.
template <class Unit, int R, int P>
inline void multiply_tiles(const std::byte* x, const std::byte* other_x, const std::byte* weights,
                           const std::byte* other_weights) {
    Unit::template load<4>(x, TILE_ROW_BYTES);
    Unit::template load<6>(weights, TILE_ROW_BYTES);
    Unit::template multiply<0, 4, 6>();
    if constexpr (P == 2) {
        Unit::template load<7>(other_weights, TILE_ROW_BYTES);
        Unit::template multiply<1, 4, 7>();
    }
    if constexpr (R == 2) {
        Unit::template load<5>(other_x, TILE_ROW_BYTES);
        Unit::template multiply<2, 5, 6>();
        if constexpr (P == 2) Unit::template multiply<3, 5, 7>();
    }
}

// A block of `height` rows from `row` on, of which the first tile has `upper`. COLD: its weights come from memory, and are
// asked for ahead.
template <class Unit, int R, int P, bool COLD>
void tile_block(const Product& job, const Segment& part, Index row, Index height, Index upper, Index panel, Rest& rest) {
    const Index inner = part.inner, whole = inner / TILE_INNER, stride = part.panel_bytes();
    const std::byte* x = job.in.pairs + row * Activations::pair_bytes(inner);
    const std::byte* weights = part.panels + panel * stride;
    const Index pairs = (inner - whole * TILE_INNER + 1) / 2;
    for (int p = 0; p < P && pairs; p++) rest.take_panel(p, weights + p * stride + whole * TILE_BYTES, pairs);
    Unit::template zero<0>();
    if constexpr (P == 2) Unit::template zero<1>();
    if constexpr (R == 2) Unit::template zero<2>();
    if constexpr (R == 2 && P == 2) Unit::template zero<3>();
    for (Index k = 0; k < whole; k++, x += height * TILE_ROW_BYTES, weights += TILE_BYTES) {
        if constexpr (COLD)
            for (Index line = 0; line < TILE_BYTES; line += 64)
                for (int p = 0; p < P; p++) __builtin_prefetch(weights + p * stride + AHEAD + line);
        multiply_tiles<Unit, R, P>(x, x + upper * TILE_ROW_BYTES, weights, weights + stride);
    }
    if (pairs) multiply_tiles<Unit, R, P>(rest.x[0], rest.x[upper], rest.weights[0], rest.weights[1]);
    alignas(64) float sums[R][P][TILE_ROWS][LANES];
    Unit::template store<0>(sums[0][0][0], TILE_ROW_BYTES);
    if constexpr (P == 2) Unit::template store<1>(sums[0][1][0], TILE_ROW_BYTES);
    if constexpr (R == 2) Unit::template store<2>(sums[1][0][0], TILE_ROW_BYTES);
    if constexpr (R == 2 && P == 2) Unit::template store<3>(sums[1][1][0], TILE_ROW_BYTES);
    for (Index r = 0; r < height; r++)
        for (int p = 0; p < P; p++) put(job, part, row + r, panel + p, load(sums[r >= upper][p][r >= upper ? r - upper : r]));
}

// Tiles of a block of `height` rows: one of them where they fit, else two of equal height.
inline TileConfig block_config(Index height, Index upper) {
    TileConfig config;
    for (const int tile : {0, 1, 4}) config.set(tile, upper);
    for (const int tile : {2, 3, 5}) config.set(tile, height - upper);
    for (const int tile : {6, 7}) config.set(tile, TILE_ROWS);
    return config;
}

// Weights of some panels stay hot for all tiles of rows, and a tile's rows for these panels.
template <class Unit>
void tile_product(const Product& job, const Segment& part, Index first_panel, Index last_panel) {
    using Block = void (*)(const Product&, const Segment&, Index, Index, Index, Index, Rest&);
    constexpr Block BLOCKS[2][2][2] = {
        {{tile_block<Unit, 1, 1, false>, tile_block<Unit, 1, 2, false>},
         {tile_block<Unit, 2, 1, false>, tile_block<Unit, 2, 2, false>}},
        {{tile_block<Unit, 1, 1, true>, tile_block<Unit, 1, 2, true>},
         {tile_block<Unit, 2, 1, true>, tile_block<Unit, 2, 2, true>}}};
    const Tiles tiles(job.in.rows, BLOCK_ROWS);
    const Index most = (HOT_BYTES / part.panel_bytes() / BLOCK_PANELS + 1) * BLOCK_PANELS;
    const Index inner = part.inner, whole = inner / TILE_INNER * TILE_INNER;
    Rest rest;
    Index configured = 0;
    for (Index first = first_panel; first < last_panel; first += most) {
        const Index last = first + most < last_panel ? first + most : last_panel;
        for (Index i = 0; i < tiles.count; i++) {
            const Index height = tiles.height(i), row = tiles.first(i);
            const Index upper = height <= TILE_ROWS ? height : (height + 1) / 2;
            if (height != configured) Unit::configure(block_config(height, upper)), configured = height;
            if (whole < inner)
                rest.take_rows(job.in.pairs + row * Activations::pair_bytes(inner) + height * Activations::pair_bytes(whole),
                               height, Activations::pair_bytes(inner - whole));
            for (Index panel = first; panel < last; panel += BLOCK_PANELS)
                BLOCKS[i == 0][upper < height][last - panel >= BLOCK_PANELS](job, part, row, height, upper, panel, rest);
        }
    }
    if (configured) Unit::release();
}

}  // namespace cairn::CAIRN_VARIANT
