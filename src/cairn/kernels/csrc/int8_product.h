// Products with weights in groups of 32: activations in codes of 8 bits, exact integer sums within a group, and one chain
// of float32 over the groups in order. The tile decides speed, never bits.
#pragma once

#include "dot.h"
#include "product.h"

namespace cairn::CAIRN_VARIANT {

// Rows of a tile: they share one reading of a panel. Integer sums of at most 8 of them are held at once.
constexpr int GROUP_ROWS = WIDTH == 16 ? 16 : BESIDE == 8 ? 8 : WIDTH == 8 || REGISTERS == 32 ? 4 : 2;
constexpr int at_once(int rows) { return rows <= 8 ? rows : rows <= 12 ? (rows + 1) / 2 : (rows + 2) / 3; }

// With a TABLE, codes of 8 bits are stored as places in it.
template <int BITS_, bool HALF, bool MINIMUM_, Form TABLE_ = Form::int8>
struct Quantised {
    static constexpr int BITS = BITS_;
    static constexpr Form TABLE = TABLE_;
    static constexpr bool MINIMUM = MINIMUM_;
    static constexpr bool STARTS = BITS == 8 ? !SIGNED_BYTES : !MINIMUM;
    static constexpr Index CODES = (values_of(TABLE) ? 4 : BITS) * 64, SCALES = LANES * (HALF ? 2 : 4);
    static constexpr Index UNIT = 2 * (CODES + SCALES * (MINIMUM ? 2 : 1));

    static Vec numbers(const std::byte* at) {
        if constexpr (HALF)
            return load_half(reinterpret_cast<const std::uint16_t*>(at));
        else
            return load(reinterpret_cast<const float*>(at));
    }
};

// One group of 16 outputs.
template <class Form>
struct Group {
    Codes<Form::BITS, Form::TABLE> codes;
    Vec scale, minimum;

    Group(const std::byte* from, const std::byte* scales)
        : codes(from), scale(Form::numbers(scales)),
          minimum(Form::MINIMUM ? Form::numbers(scales + 2 * Form::SCALES) : Vec{}) {}
};

// acc[FIRST to FIRST + LEFT] += a group's products with these rows of the tile.
template <class Form, int LEFT, int FIRST = 0, int R, class Weights>
inline void add_group(Vec (&acc)[R], const std::byte* in, const Weights& group) {
    constexpr int U = at_once(LEFT);
    const auto* scale = reinterpret_cast<const float*>(in + R * GROUP) + FIRST;
    const auto* start = reinterpret_cast<const std::int32_t*>(scale) + R * (Form::BITS == 4 ? 1 : 2);
    const float* total = scale + 3 * R;
    IntVec sum[U];
#pragma GCC unroll 8
    for (int u = 0; u < U; u++)
        for (int i = 0; i < PARTS; i++) sum[u].part[i] = IntPart{} + (Form::STARTS ? start[u] : 0);
    group.codes.template add<U, R>(reinterpret_cast<const std::int8_t*>(in) + FIRST * BESIDE, sum);
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) {
        Vec& to = acc[FIRST + u];
        to = fma(to_float(sum[u]), group.scale * set(scale[u]), to);
        if constexpr (Form::MINIMUM) to = fma(group.minimum, set(total[u]), to);
    }
    if constexpr (LEFT > U) add_group<Form, LEFT - U, FIRST + U>(acc, in, group);
}

template <class Form, int R>
void group_tile(const Product& job, const Segment& part, Index row, Index panel) {
    const std::byte* in = job.in.groups + row * Activations::group_bytes(part.inner);
    const std::byte* unit = part.panels + panel * part.panel_bytes();
    const Index groups = part.inner / GROUP;
    Vec acc[R] = {};
    for (Index group = 0; group < groups; group++, in += R * ROW_GROUP_BYTES) {
        const Index half = group % 2;
        const std::byte *codes = unit + half * Form::CODES, *scales = unit + 2 * Form::CODES + half * Form::SCALES;
#pragma GCC unroll 16
        for (Index line = 0; line < Form::UNIT / 2; line += 64)
            __builtin_prefetch(unit + half * (Form::UNIT / 2) + AHEAD + line);
        add_group<Form, R>(acc, in, Group<Form>(codes, scales));
        unit += half * Form::UNIT;
    }
    finish<R, 1>(job, part, row, panel, [&](int r, int) { return acc[r]; });
}

template <class Form, int R = GROUP_ROWS>
Tile group_tile_of(Index rows) {
    if constexpr (R > 1)
        if (rows < R) return group_tile_of<Form, R - 1>(rows);
    return group_tile<Form, R>;
}

// The weights of some panels stay hot for all tiles, whose functions `tile_of` knows by their heights.
inline void hot_panels(const Product& job, const Segment& part, Index first_panel, Index last_panel,
                       Tile (*tile_of)(Index rows)) {
    const Tiles tiles(job.in.rows, GROUP_ROWS);
    const Index most = HOT_BYTES / part.panel_bytes() + 1;
    for (Index first = first_panel; first < last_panel; first += most) {
        const Index last = first + most < last_panel ? first + most : last_panel;
        for (Index tile = 0; tile < tiles.count; tile++) {
            const Tile run = tile_of(tiles.height(tile));
            for (Index panel = first; panel < last; panel++) run(job, part, tiles.first(tile), panel);
        }
    }
}

template <int BITS, Form TABLE = Form::int8>
void group_product(const Product& job, const Segment& part, Index first, Index last) {
    Tile (*tile)(Index) = group_tile_of<Quantised<BITS, false, false, TABLE>>;
    if constexpr (TABLE != Form::int8)
        tile = part.half ? group_tile_of<Quantised<BITS, true, false, TABLE>> : tile;
    else if (part.half && part.minimum)
        tile = group_tile_of<Quantised<BITS, true, true>>;
    else if (part.half)
        tile = group_tile_of<Quantised<BITS, true, false>>;
    else if (part.minimum)
        tile = group_tile_of<Quantised<BITS, false, true>>;
    hot_panels(job, part, first, last, tile);
}

}  // namespace cairn::CAIRN_VARIANT
