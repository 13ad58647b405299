// x @ matrix in tiles of R rows and P panels. Each output is one chain along k, whatever the tile: the tile decides
// speed, never bits.
#pragma once

#include "outer.h"

namespace cairn::CAIRN_VARIANT {

constexpr int ACCUMULATORS = REGISTERS == 32 ? 24 : 12;
// With sixteen registers of eight floats, a sixth row would leave too few for a pair of bfloat16, its numbers and a mask.
constexpr int MAX_ROWS = WIDTH == 8 ? 5 : ACCUMULATORS / PARTS < 6 ? ACCUMULATORS / PARTS : 6;
constexpr int MAX_PANELS = 4;
// Rows of a tile of pairs: up to sixteen read the weights once, of more twelve share what is read best.
constexpr int MOST_PAIR_ROWS = 16, PAIR_ROWS = 12;
constexpr Index pair_rows(Index rows) { return rows <= MOST_PAIR_ROWS ? MOST_PAIR_ROWS : PAIR_ROWS; }

// With few rows memory sets the pace: lines are asked for so many bytes ahead.
constexpr Index AHEAD = 4096;
// Weights that stay in the second cache while rows pass.
constexpr Index HOT_BYTES = Index{256} << 10;

constexpr int panels_for(int rows) {
    const int fit = ACCUMULATORS / (rows * PARTS);
    return fit < 1 ? 1 : fit > MAX_PANELS ? MAX_PANELS : fit;
}

// How a panel is read, and how many rows and panels make a tile: STEP inner indices at once, `add` multiplies them with
// rows of X, which `next` moves on; what is left of an odd number of inner indices is `add_last`.
struct F32 {
    static constexpr bool PREPARED = false;
    static constexpr int ROWS = MAX_ROWS;
    static constexpr Index most(Index) { return ROWS; }
    static constexpr int panels(int rows) { return panels_for(rows); }
    static constexpr int STEP = 1;
    static constexpr Index BYTES = LANES * 4;
    using Raw = Vec;
    using X = float;
    static constexpr Index next(int) { return STEP; }
    static Raw read(const std::byte* at) { return load(reinterpret_cast<const float*>(at)); }
    template <int R, int P>
    static void add(Vec (&acc)[R][P], const X* x, Index stride, const Raw (&raw)[P]) {
        add_outer<R, P>(acc, x, stride, raw);
    }
};
struct F16 : F32 {
    static constexpr Index BYTES = LANES * 2;
    static Raw read(const std::byte* at) { return load_half(reinterpret_cast<const std::uint16_t*>(at)); }
};
struct Bf16 {
    static constexpr bool PREPARED = false;
    static constexpr int ROWS = MAX_ROWS;
    static constexpr Index most(Index) { return ROWS; }
    static constexpr int panels(int rows) { return panels_for(rows); }
    static constexpr int STEP = 2;
    static constexpr Index BYTES = LANES * 4;
    using Raw = IntVec;
    using X = float;
    static constexpr Index next(int) { return STEP; }
    static Raw read(const std::byte* at) { return load_int(at); }
    template <int R, int P>
    static void add_last(Vec (&acc)[R][P], const X* x, Index stride, const Raw (&raw)[P]) {
        Vec weight[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) weight[p] = low_bf16(raw[p]);
        add_outer<R, P>(acc, x, stride, weight);
    }
    template <int R, int P>
    static void add(Vec (&acc)[R][P], const X* x, Index stride, const Raw (&raw)[P]) {
        add_last<R, P>(acc, x, stride, raw);
        Vec weight[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) weight[p] = high_bf16(raw[p]);
        add_outer<R, P>(acc, x + 1, stride, weight);
    }
};

#if defined(__AVX512BF16__)
// Both factors in bfloat16, two products at once; subnormal ones count as zero.
struct Pairs {
    static constexpr bool PREPARED = true;
    static constexpr int ROWS = MOST_PAIR_ROWS;
    static constexpr Index most(Index rows) { return pair_rows(rows); }
    // One stream of weights is read faster than several; more rows are bound by arithmetic and share loads.
    static constexpr int panels(int rows) { return rows <= 2 || rows > PAIR_ROWS ? 1 : 2; }
    static constexpr int STEP = 1;
    static constexpr Index BYTES = LANES * 4;
    using Raw = IntVec;
    using X = std::byte;
    static constexpr Index next(int rows) { return 4 * rows; }
    static Raw read(const std::byte* at) { return load_int(at); }
    template <int R, int P>
    static void add(Vec (&acc)[R][P], const X* x, Index, const Raw (&raw)[P]) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const auto two = (__m512bh)_mm512_set1_epi32(reinterpret_cast<const std::int32_t*>(x)[r]);
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                const auto weight = (__m512bh)raw[p].part[0];
                acc[r][p].part[0] = (Part)_mm512_dpbf16_ps((__m512)acc[r][p].part[0], weight, two);
            }
        }
    }
};
#endif

// acc[R][P] += x[R, steps] @ panels, k ascending. Panels lie `panel_stride` bytes apart.
template <class Format, int R, int P>
inline void chain(Vec (&acc)[R][P], const typename Format::X* x, Index x_stride, const std::byte* panels,
                  Index panel_stride, Index inner) {
    typename Format::Raw raw[P];
    Index k = 0;
    for (; k + Format::STEP <= inner; k += Format::STEP, panels += Format::BYTES, x += Format::next(R)) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            __builtin_prefetch(panels + p * panel_stride + AHEAD);
            raw[p] = Format::read(panels + p * panel_stride);
        }
        Format::template add<R, P>(acc, x, x_stride, raw);
    }
    if constexpr (Format::STEP == 2) {
        if (k < inner) {
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) raw[p] = Format::read(panels + p * panel_stride);
            Format::template add_last<R, P>(acc, x, x_stride, raw);
        }
    }
}

// Sixteen outputs of one row.
inline void put(const Product& job, const Segment& part, Index row, Index panel, Vec value) {
    const Index at = panel * LANES;
    float* out = job.out + row * job.out_stride + part.column + at;
    if (part.bias) value = value + load(part.bias + at);
    if (at + LANES <= part.out) {
        store(out, job.add ? load(out) + value : value);
    } else {
        const Index rest = part.out - at;
        store_first(out, job.add ? load_first(out, rest) + value : value, rest);
    }
}

// A tile is done: value(r, p) are its sums. They are copied first, so that a loop may number them: an array that is
// indexed by a variable would not be held in registers while it is summed up.
template <int R, int P, class F>
inline void finish(const Product& job, const Segment& part, Index row, Index panel, F&& value) {
    float sums[R][P][LANES];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) store(sums[r][p], value(r, p));
    }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) put(job, part, row + r, panel + p, load(sums[r][p]));
}

template <class Format, int R, int P>
void tile(const Product& job, const Segment& part, Index row, Index panel) {
    const std::byte* panels = part.panels + panel * part.panel_bytes();
    Vec acc[R][P] = {};
    const Index inner = part.inner;
    if constexpr (Format::PREPARED)
        chain<Format, R, P>(acc, job.in.pairs + row * Activations::pair_bytes(inner), 0, panels, part.panel_bytes(),
                            (inner + 1) / 2);
    else
        chain<Format, R, P>(acc, job.in.x + row * job.in.stride, job.in.stride, panels, part.panel_bytes(), inner);
    finish<R, P>(job, part, row, panel, [&](int r, int p) { return acc[r][p]; });
}

using Tile = void (*)(const Product&, const Segment&, Index row, Index panel);

template <class Format, int R>
Tile tile_of(int panels) {
    constexpr int MOST = Format::panels(R);
    if constexpr (MOST >= 4)
        if (panels == 4) return tile<Format, R, 4>;
    if constexpr (MOST >= 3)
        if (panels == 3) return tile<Format, R, 3>;
    if constexpr (MOST >= 2)
        if (panels == 2) return tile<Format, R, 2>;
    return tile<Format, R, 1>;
}

template <class Format, int R = Format::ROWS>
Tile tile_of(Index rows, int panels) {
    if constexpr (R > 1)
        if (rows < R) return tile_of<Format, R - 1>(rows, panels);
    return tile_of<Format, R>(panels);
}

// Weights of some panels stay hot for all tiles, and a tile's rows for these panels.
template <class Format>
void product(const Product& job, const Segment& part, Index first_panel, Index last_panel) {
    const Tiles tiles(job.in.rows, Format::most(job.in.rows));
    const int group = Format::panels(static_cast<int>(tiles.height(0)));
    const Index most = (HOT_BYTES / part.panel_bytes() / group + 1) * group;
    for (Index first = first_panel; first < last_panel; first += most) {
        const Index last = first + most < last_panel ? first + most : last_panel;
        for (Index i = 0; i < tiles.count; i++)
            for (Index panel = first; panel < last; panel += group) {
                const int width = static_cast<int>(last - panel < group ? last - panel : group);
                tile_of<Format>(tiles.height(i), width)(job, part, tiles.first(i), panel);
            }
    }
}

}  // namespace cairn::CAIRN_VARIANT
