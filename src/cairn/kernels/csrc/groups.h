// Products with weights in groups of 32: activations in codes of 8 bits, exact integer sums within a group, and one chain
// of float32 over the groups in order. The tile decides speed, never bits.
#pragma once

#include "dot.h"
#include "product.h"

namespace cairn::CAIRN_VARIANT {

// Rows of a tile: they share one reading of a panel. Integer sums of at most 8 of them are held at once.
constexpr int GROUP_ROWS = WIDTH == 16 ? 16 : WIDTH == 8 || REGISTERS == 32 ? 4 : 2;
constexpr int at_once(int rows) { return rows <= 8 ? rows : rows <= 12 ? (rows + 1) / 2 : (rows + 2) / 3; }
// Weights that stay in the second cache while rows pass, and activations.
constexpr Index HOT_BYTES = Index{256} << 10;

inline Vec to_float(const IntVec& x) {
    return each([&](int i) { return __builtin_convertvector(x.part[i], Part); });
}

template <int BITS_, bool HALF, bool MINIMUM_>
struct Quantised {
    static constexpr int BITS = BITS_;
    static constexpr bool MINIMUM = MINIMUM_;
    static constexpr Index CODES = BITS * 64, SCALES = LANES * (HALF ? 2 : 4);
    static constexpr Index UNIT = 2 * (CODES + SCALES * (MINIMUM ? 2 : 1));

    static Vec numbers(const std::byte* at) {
        if constexpr (HALF)
            return load_half(reinterpret_cast<const std::uint16_t*>(at));
        else
            return load(reinterpret_cast<const float*>(at));
    }
};

// A tile's rows of activations, moved on by group.
struct GroupRows {
    const std::int8_t* codes;
    const float* scale;
    const std::int32_t* start;
    const float* total;
    Index stride;

    GroupRows(const Activations& in, Index row, bool nibbles)
        : codes(in.at<std::int8_t>(row, in.layout.codes)), scale(in.at<float>(row, in.layout.scale)),
          start(in.at<std::int32_t>(row, nibbles ? in.layout.start4 : in.layout.start8)),
          total(in.at<float>(row, in.layout.total)), stride(in.layout.bytes) {}

    template <class T>
    T of(const T* numbers, Index row, Index group) const {
        return *reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(numbers + group) + row * stride);
    }
};

// One group of 16 outputs.
template <class Form>
struct Group {
    Index number;
    Codes<Form::BITS> codes;
    Vec scale, minimum;

    Group(Index group, const std::byte* from, const std::byte* scales)
        : number(group), codes(from), scale(Form::numbers(scales)),
          minimum(Form::MINIMUM ? Form::numbers(scales + 2 * Form::SCALES) : Vec{}) {}
};

// acc[FIRST to FIRST + LEFT] += a group's products with these rows.
template <class Form, int LEFT, int FIRST = 0, int R>
inline void add_group(Vec (&acc)[R], const GroupRows& in, const Group<Form>& group) {
    constexpr int U = at_once(LEFT);
    constexpr bool STARTS = Form::BITS == 8 ? !SIGNED_BYTES : !Form::MINIMUM;
    IntVec sum[U];
#pragma GCC unroll 8
    for (int u = 0; u < U; u++)
        for (int i = 0; i < PARTS; i++)
            sum[u].part[i] = IntPart{} + (STARTS ? in.of(in.start, FIRST + u, group.number) : 0);
    group.codes.template add<U>(in.codes + FIRST * in.stride + group.number * GROUP, in.stride, sum);
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) {
        Vec& to = acc[FIRST + u];
        to = fma(to_float(sum[u]), group.scale * set(in.of(in.scale, FIRST + u, group.number)), to);
        if constexpr (Form::MINIMUM) to = fma(group.minimum, set(in.of(in.total, FIRST + u, group.number)), to);
    }
    if constexpr (LEFT > U) add_group<Form, LEFT - U, FIRST + U>(acc, in, group);
}

template <class Form, int R>
void group_tile(const Product& job, const Segment& part, Index row, Index panel) {
    const GroupRows in(job.in, row, Form::BITS == 4);
    const std::byte* unit = part.panels + panel * part.panel_bytes();
    const Index groups = part.inner / GROUP;
    Vec acc[R] = {};
    for (Index group = 0; group < groups; group += 2, unit += Form::UNIT) {
        const std::byte* scales = unit + 2 * Form::CODES;
        for (Index line = 0; line < Form::UNIT; line += 64) __builtin_prefetch(unit + AHEAD + line);
        add_group<Form, R>(acc, in, Group<Form>(group, unit, scales));
        if (group + 1 < groups)
            add_group<Form, R>(acc, in, Group<Form>(group + 1, unit + Form::CODES, scales + Form::SCALES));
    }
    for (int r = 0; r < R; r++) finish(job, part, row + r, panel, acc[r]);
}

template <class Form, int R = GROUP_ROWS>
Tile group_tile_of(Index rows) {
    if constexpr (R > 1)
        if (rows < R) return group_tile_of<Form, R - 1>(rows);
    return group_tile<Form, R>;
}

// Rows are cut into tiles of nearly equal height; the weights of some panels stay hot for all of them.
template <class Form>
void group_product(const Product& job, const Segment& part, Index first_panel, Index last_panel) {
    const Index tiles = (job.rows + GROUP_ROWS - 1) / GROUP_ROWS;
    const Index low = job.rows / tiles, higher = job.rows % tiles;
    const Index most = HOT_BYTES / part.panel_bytes() + 1;
    for (Index first = first_panel; first < last_panel; first += most) {
        const Index last = first + most < last_panel ? first + most : last_panel;
        Index row = 0;
        for (Index i = 0; i < tiles; i++) {
            const Index rows = low + (i < higher);
            const Tile run = group_tile_of<Form>(rows);
            for (Index panel = first; panel < last; panel++) run(job, part, row, panel);
            row += rows;
        }
    }
}

template <int BITS>
void group_product(const Product& job, const Segment& part, Index first, Index last) {
    if (part.half && part.minimum) return group_product<Quantised<BITS, true, true>>(job, part, first, last);
    if (part.half) return group_product<Quantised<BITS, true, false>>(job, part, first, last);
    if (part.minimum) return group_product<Quantised<BITS, false, true>>(job, part, first, last);
    return group_product<Quantised<BITS, false, false>>(job, part, first, last);
}

}  // namespace cairn::CAIRN_VARIANT
