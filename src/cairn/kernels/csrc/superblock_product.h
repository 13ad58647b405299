// Products with weights in super-blocks of 256, whose groups have whole numbers for scales: the float that a whole number
// stands for is made once a tile, and is exact. Codes of 4 and 5 bits, and places in a table, are then groups like any other. Those of 6 bits have
// a scale every 16: both halves' integer sums times their scales stay below 2^24, so their sum is an exact float too.
#pragma once

#include "int8_product.h"

namespace cairn::CAIRN_VARIANT {

// Rows of a tile whose integer sums of both halves are held at once.
constexpr int HALVES = BESIDE == 8 ? 4 : 3;

template <int BITS_>
struct InBlocks {
    static constexpr int BITS = BITS_;
    // SCALED: sums of a super-block are multiplied with its scale at the end.
    static constexpr bool MINIMUM = BITS != 6, STARTS = false, SCALED = BITS == 6;
    static constexpr Index WHOLE = BITS == 6 ? 256 : 192, CODES = BITS * GROUP * LANES / 8;
    static constexpr Index FRONT = LANES * 2 * (MINIMUM ? 2 : 1);
};

// One group of 16 outputs whose scale and minimum are made.
template <class Form>
struct BlockGroup {
    Codes<Form::BITS> codes;
    Vec scale, minimum;
};

// A super-block of 16 outputs with a scale and a minimum a group.
template <class Form>
struct Block {
    const std::byte* codes;
    Vec scale, minimum;
    alignas(64) std::uint8_t whole[256];

    Block(const std::byte* front, const std::byte* unit)
        : codes(unit + Form::WHOLE), scale(load_half(reinterpret_cast<const std::uint16_t*>(front))),
          minimum(load_half(reinterpret_cast<const std::uint16_t*>(front) + LANES)) {
        whole_numbers(unit, whole);
    }
    template <int R>
    void add(Vec (&acc)[R], const std::byte* in, Index group) const {
        const BlockGroup<Form> one = {Codes<Form::BITS>(codes + group * Form::CODES),
                                      scale * to_float(load_bytes(whole + group * LANES)),
                                      minimum * to_float(load_bytes(whole + (8 + group) * LANES))};
        add_group<Form, R>(acc, in, one);
    }
};

// acc[FIRST to FIRST + LEFT] += a group's products with these rows of the tile, each half with its own whole number; but
// for the super-block's scale.
template <int LEFT, int FIRST = 0, int R>
inline void add_halves(Vec (&acc)[R], const std::byte* in, const Codes<6>& codes, const IntVec (&whole)[2]) {
    constexpr int U = LEFT < HALVES ? LEFT : HALVES;
    const auto* scale = reinterpret_cast<const float*>(in + R * GROUP) + FIRST;
    const auto* start = reinterpret_cast<const std::int32_t*>(scale) + 4 * R;
    const auto* x = reinterpret_cast<const std::int8_t*>(in) + FIRST * BESIDE;
    IntVec first[U], second[U];
#pragma GCC unroll 4
    for (int u = 0; u < U; u++)
        for (int i = 0; i < PARTS; i++) {
            first[u].part[i] = IntPart{} + start[u];
            second[u].part[i] = IntPart{} + start[R + u];
        }
    codes.template add<U, R, 0, 4>(x, first);
    codes.template add<U, R, 4, 8>(x, second);
#pragma GCC unroll 4
    for (int u = 0; u < U; u++) {
        for (int i = 0; i < PARTS; i++)
            first[u].part[i] = first[u].part[i] * whole[0].part[i] + second[u].part[i] * whole[1].part[i];
        acc[FIRST + u] = fma(to_float(first[u]), set(scale[u]), acc[FIRST + u]);
    }
    if constexpr (LEFT > U) add_halves<LEFT - U, FIRST + U>(acc, in, codes, whole);
}

template <>
struct Block<InBlocks<6>> {
    using Form = InBlocks<6>;
    const std::byte *unit;
    Vec scale;

    Block(const std::byte* front, const std::byte* from)
        : unit(from), scale(load_half(reinterpret_cast<const std::uint16_t*>(front))) {}

    template <int R>
    void add(Vec (&acc)[R], const std::byte* in, Index group) const {
        const auto* whole = reinterpret_cast<const std::int8_t*>(unit) + group * 2 * LANES;
        const IntVec both[2] = {load_bytes(whole), load_bytes(whole + LANES)};
        add_halves<R>(acc, in, Codes<6>(unit + Form::WHOLE + group * Form::CODES), both);
    }
};

// Codes of 4 bits that name values of a table, with whole numbers from -32 to 31.
struct InTableBlocks {
    static constexpr int BITS = 8;
    static constexpr bool MINIMUM = false, STARTS = !SIGNED_BYTES, SCALED = false;
    static constexpr Index WHOLE = 0, CODES = GROUP * LANES / 2, FRONT = 128;
};

template <>
struct Block<InTableBlocks> {
    struct Group {
        Codes<8, Form::iq4> codes;
        Vec scale;
    };
    const std::byte* codes;
    Vec scale;
    alignas(64) std::uint8_t whole[SUPER / GROUP * LANES];

    Block(const std::byte* front, const std::byte* unit)
        : codes(unit), scale(load_half(reinterpret_cast<const std::uint16_t*>(front))) {
        whole_numbers<SUPER / GROUP * LANES>(front + 2 * LANES, whole);
    }
    template <int R>
    void add(Vec (&acc)[R], const std::byte* in, Index group) const {
        const Group one = {Codes<8, Form::iq4>(codes + group * InTableBlocks::CODES),
                           scale * (to_float(load_bytes(whole + group * LANES)) - set(32.0f))};
        add_group<InTableBlocks, R>(acc, in, one);
    }
};

template <Index BYTES>
inline void ask_for(const std::byte* from) {
#pragma GCC unroll 8
    for (Index line = 0; line < BYTES; line += 64) __builtin_prefetch(from + AHEAD + line);
}

template <class Form, int R>
void block_tile(const Product& job, const Segment& part, Index row, Index panel) {
    const std::byte* in = job.in.groups + row * Activations::group_bytes(part.inner);
    const std::byte* front = part.panels + panel * part.panel_bytes();
    const std::byte* unit = front + part.front_bytes();
    Vec acc[R] = {};
    for (Index left = part.inner; left > 0; left -= SUPER) {
        Vec sums[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sums[r] = Form::SCALED ? Vec{} : acc[r];
        const Block<Form> block(front, unit);
        ask_for<Form::FRONT>(front);
        if constexpr (Form::WHOLE) ask_for<Form::WHOLE>(unit);
        for (Index group = 0; group < SUPER / GROUP; group++, in += R * ROW_GROUP_BYTES) {
            ask_for<Form::CODES>(unit + Form::WHOLE + group * Form::CODES);
            block.template add<R>(sums, in, group);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) acc[r] = Form::SCALED ? fma(block.scale, sums[r], acc[r]) : sums[r];
        front += Form::FRONT, unit += Form::WHOLE + SUPER / GROUP * Form::CODES;
    }
    finish<R, 1>(job, part, row, panel, [&](int r, int) { return acc[r]; });
}

template <class Form, int R = GROUP_ROWS>
Tile block_tile_of(Index rows) {
    if constexpr (R > 1)
        if (rows < R) return block_tile_of<Form, R - 1>(rows);
    return block_tile<Form, R>;
}

template <int BITS>
void block_product(const Product& job, const Segment& part, Index first, Index last) {
    hot_panels(job, part, first, last, block_tile_of<InBlocks<BITS>>);
}

inline void table_block_product(const Product& job, const Segment& part, Index first, Index last) {
    hot_panels(job, part, first, last, block_tile_of<InTableBlocks>);
}

}  // namespace cairn::CAIRN_VARIANT
