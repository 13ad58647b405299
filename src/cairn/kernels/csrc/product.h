// x @ matrix in tiles of R rows and P panels. Each output is one chain along k, whatever the tile: the tile decides
// speed, never bits.
#pragma once

#include "simd.h"

namespace cairn::CAIRN_VARIANT {

constexpr int ACCUMULATORS = REGISTERS == 32 ? 24 : 12;
constexpr int MAX_ROWS = ACCUMULATORS / PARTS < 6 ? ACCUMULATORS / PARTS : 6;
constexpr int MAX_PANELS = 4;

constexpr int panels_for(int rows) {
    const int fit = ACCUMULATORS / (rows * PARTS);
    return fit < 1 ? 1 : fit > MAX_PANELS ? MAX_PANELS : fit;
}

// How a panel is read: STEP inner indices at once, `get<s>` gives index k + s.
struct F32 {
    static constexpr int STEP = 1;
    static constexpr Index BYTES = LANES * 4;
    using Raw = Vec;
    static Raw read(const std::byte* at) { return load(reinterpret_cast<const float*>(at)); }
    template <int S>
    static Vec get(const Raw& raw) {
        return raw;
    }
};
struct F16 {
    static constexpr int STEP = 1;
    static constexpr Index BYTES = LANES * 2;
    using Raw = Vec;
    static Raw read(const std::byte* at) { return load_half(reinterpret_cast<const std::uint16_t*>(at)); }
    template <int S>
    static Vec get(const Raw& raw) {
        return raw;
    }
};
struct Bf16 {
    static constexpr int STEP = 2;
    static constexpr Index BYTES = LANES * 4;
    using Raw = IntVec;
    static Raw read(const std::byte* at) { return load_int(at); }
    template <int S>
    static Vec get(const Raw& raw) {
        return S ? high_bf16(raw) : low_bf16(raw);
    }
};

// acc[R][P] += x[R] at k times the panels' k.
template <int R, int P>
inline void add_outer(Vec (&acc)[R][P], const float* x, Index x_stride, const Vec (&weight)[P]) {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        const Vec factor = set(x[r * x_stride]);
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) acc[r][p] = fma(factor, weight[p], acc[r][p]);
    }
}

template <class Format, int R, int P, int S>
inline void add_step(Vec (&acc)[R][P], const float* x, Index x_stride, const typename Format::Raw (&raw)[P]) {
    Vec weight[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) weight[p] = Format::template get<S>(raw[p]);
    add_outer<R, P>(acc, x, x_stride, weight);
}

// acc[R][P] += x[R, inner] @ panels, k ascending. Panels lie `panel_stride` bytes apart.
template <class Format, int R, int P>
inline void chain(Vec (&acc)[R][P], const float* x, Index x_stride, const std::byte* panels, Index panel_stride,
                  Index inner) {
    typename Format::Raw raw[P];
    Index k = 0;
    for (; k + Format::STEP <= inner; k += Format::STEP, panels += Format::BYTES) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) raw[p] = Format::read(panels + p * panel_stride);
        add_step<Format, R, P, 0>(acc, x + k, x_stride, raw);
        if constexpr (Format::STEP == 2) add_step<Format, R, P, 1>(acc, x + k + 1, x_stride, raw);
    }
    if (k < inner) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) raw[p] = Format::read(panels + p * panel_stride);
        add_step<Format, R, P, 0>(acc, x + k, x_stride, raw);
    }
}

template <class Format, int R, int P>
void tile(const Product& job, Index row, Index panel) {
    const MatrixView& m = job.matrix;
    Vec acc[R][P] = {};
    chain<Format, R, P>(acc, job.x + row * job.x_stride, job.x_stride, m.panels + panel * m.panel_bytes(),
                        m.panel_bytes(), m.inner);
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) {
            const Index column = (panel + p) * LANES;
            float* out = job.out + (row + r) * job.out_stride + column;
            Vec value = acc[r][p];
            if (m.bias) value = value + load(m.bias + column);
            if (column + LANES <= m.out) {
                store(out, job.add ? load(out) + value : value);
            } else {
                const Index rest = m.out - column;
                store_first(out, job.add ? load_first(out, rest) + value : value, rest);
            }
        }
}

using Tile = void (*)(const Product&, Index row, Index panel);

template <class Format, int R>
Tile tile_of(int panels) {
    constexpr int MOST = panels_for(R);
    if constexpr (MOST >= 4)
        if (panels == 4) return tile<Format, R, 4>;
    if constexpr (MOST >= 3)
        if (panels == 3) return tile<Format, R, 3>;
    if constexpr (MOST >= 2)
        if (panels == 2) return tile<Format, R, 2>;
    return tile<Format, R, 1>;
}

template <class Format>
Tile tile_of(Index rows, int panels) {
    if constexpr (MAX_ROWS >= 6) {
        if (rows == 6) return tile_of<Format, 6>(panels);
        if (rows == 5) return tile_of<Format, 5>(panels);
        if (rows == 4) return tile_of<Format, 4>(panels);
    }
    if (rows == 3) return tile_of<Format, 3>(panels);
    if (rows == 2) return tile_of<Format, 2>(panels);
    return tile_of<Format, 1>(panels);
}

// Rows are cut into tiles of nearly equal height; weights of one group of panels stay hot for all of them.
template <class Format>
void product(const Product& job, Index first_panel, Index last_panel) {
    const Index tiles = (job.rows + MAX_ROWS - 1) / MAX_ROWS;
    const Index low = job.rows / tiles, higher = job.rows % tiles;
    const int group = panels_for(static_cast<int>(low + (higher > 0)));
    for (Index panel = first_panel; panel < last_panel;) {
        const int width = static_cast<int>(last_panel - panel < group ? last_panel - panel : group);
        Index row = 0;
        for (Index i = 0; i < tiles; i++) {
            const Index rows = low + (i < higher);
            tile_of<Format>(rows, width)(job, row, panel);
            row += rows;
        }
        panel += width;
    }
}

}  // namespace cairn::CAIRN_VARIANT
