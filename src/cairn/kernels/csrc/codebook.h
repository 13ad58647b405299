// Weights that name rows of a codebook, in blocks of 256, as codes of 8 bits with a scale a group, or one a half of it. Blocks
// of 16 outputs stand together, byte by byte: see Segment, and `kernels/codebooks.py` for what the bytes of a block are.
#pragma once

#include <cstring>

#include "codebook_wide.h"

namespace cairn::CAIRN_VARIANT {

template <Form FORM>
struct InRows {
    static constexpr Index BYTES = row_block_bytes(FORM);
    static constexpr float STEP = row_step(FORM);
    // Whether halves of groups have scales of their own.
    static constexpr bool HALVES = in_halves(FORM);

    static void decode(const std::byte* block, const Codebook& book, RowBlock& to) {
        const auto* at = reinterpret_cast<const std::uint8_t*>(block);
        for (Index lane = 0; lane < LANES; lane++)
            to.scale[lane] = static_cast<std::uint16_t>(at[lane] | at[LANES + lane] << 8);
        for (Index group = 0; group < SUPER / GROUP; group++) whole_numbers(at, group, to.whole + group * 2 * LANES);
#if defined(__AVX512BW__)
        WideRows<FORM>::decode(at, book, to.codes);
#else
        // Rows are looked up for all of the block before the first is read again: the processor has then written them.
        Words signs[SUPER / GROUP];
        for (Index group = 0; group < SUPER / GROUP; group++) {
            Names names;
            name(at, group, names, signs[group]);
            look_up(book.rows, names, reinterpret_cast<std::uint32_t*>(to.codes + group * GROUP * LANES));
        }
        for (Index group = 0; group < SUPER / GROUP; group++)
            turn(signs[group], reinterpret_cast<std::uint32_t*>(to.codes + group * GROUP * LANES));
#endif
    }

  private:
    static constexpr Index COUNT = in_eights(FORM) ? 4 : 8;  // rows of a group
    using Words = std::uint32_t[LANES];
    using Names = std::uint16_t[COUNT][LANES];

    // Byte `from` and those behind it of each block, as one number.
    static void word(const std::uint8_t* at, Index from, Words& to) {
        const std::uint8_t* byte = at + from * LANES;
        for (Index lane = 0; lane < LANES; lane++)
            to[lane] = static_cast<std::uint32_t>(byte[lane]) | static_cast<std::uint32_t>(byte[LANES + lane]) << 8 |
                       static_cast<std::uint32_t>(byte[2 * LANES + lane]) << 16 |
                       static_cast<std::uint32_t>(byte[3 * LANES + lane]) << 24;
    }
    // Four times seven signs, each with an eighth that makes the count of minus signs even.
    static std::uint32_t even(std::uint32_t x) {
        const std::uint32_t signs = (x & 127) | (x & (127 << 7)) << 1 | (x & (127 << 14)) << 2 | (x & (127 << 21)) << 3;
        std::uint32_t odd = signs ^ signs >> 4;
        odd ^= odd >> 2;
        odd ^= odd >> 1;
        return signs | (odd & 0x01010101) << 7;
    }
    // The rows and the signs of a group.
    static void name(const std::uint8_t* at, Index group, Names& names, Words& signs) {
        const auto low = [&](Index from, Index i) { return at + (from + i) * LANES; };
        if constexpr (FORM == Form::iq2_xxs || FORM == Form::iq3_xxs) {
            word(at, FORM == Form::iq2_xxs ? 6 + 8 * group : 66 + 4 * group, signs);
            for (Index lane = 0; lane < LANES; lane++) signs[lane] = even(signs[lane]);
            for (Index i = 0; i < COUNT; i++)
                for (Index lane = 0; lane < LANES; lane++)
                    names[i][lane] = low(2 + 8 * group, i)[lane];
            return;
        }
        if constexpr (FORM == Form::iq2_xs) {
            Words seven = {};
            for (Index i = 0; i < COUNT; i++) {
                const std::uint8_t *first = low(2 + 8 * group, 2 * i), *second = first + LANES;
                for (Index lane = 0; lane < LANES; lane++) {
                    names[i][lane] = static_cast<std::uint16_t>(first[lane] | (second[lane] & 1) << 8);
                    seven[lane] |= static_cast<std::uint32_t>(second[lane] >> 1) << (7 * i);
                }
            }
            for (Index lane = 0; lane < LANES; lane++) signs[lane] = even(seven[lane]);
        } else {
            constexpr Index SIGNS = FORM == Form::iq2_s ? 34 : 74, BITS = FORM == Form::iq2_s ? 2 : 1;
            word(at, SIGNS + 4 * group, signs);
            const std::uint8_t* high = low(66, group);
            for (Index i = 0; i < COUNT; i++) {
                const std::uint8_t* first = low(2, COUNT * group + i);
                for (Index lane = 0; lane < LANES; lane++)
                    names[i][lane] = static_cast<std::uint16_t>(
                        first[lane] | (high[lane] >> (BITS * i) & ((1 << BITS) - 1)) << 8);
            }
        }
    }
    // The whole numbers of a group's scales.
    static void whole_numbers(const std::uint8_t* at, Index group, std::uint8_t* whole) {
        if constexpr (FORM == Form::iq2_xxs || FORM == Form::iq3_xxs) {
            const std::uint8_t* highest = at + (FORM == Form::iq2_xxs ? 9 + 8 * group : 69 + 4 * group) * LANES;
            for (Index lane = 0; lane < LANES; lane++) whole[lane] = static_cast<std::uint8_t>((highest[lane] >> 4) * 2 + 1);
            return;
        }
        const std::uint8_t* scales = at + (BYTES - (HALVES ? 8 : 4) + (HALVES ? group : group / 2)) * LANES;
        for (Index lane = 0; lane < LANES; lane++) {
            const int both = scales[lane], first = HALVES ? both & 15 : both >> (4 * (group % 2)) & 15;
            whole[lane] = static_cast<std::uint8_t>(2 * first + 1);
            if (HALVES) whole[LANES + lane] = static_cast<std::uint8_t>(2 * (both >> 4) + 1);
        }
    }
    // Magnitudes [8][16][4].
    static void look_up(const std::uint8_t* rows, const Names& names, std::uint32_t* to) {
        for (Index i = 0; i < COUNT; i++)
#pragma GCC unroll 16
            for (Index lane = 0; lane < LANES; lane++) {
                if constexpr (in_eights(FORM)) {
                    const std::uint8_t* from = rows + names[i][lane] * 8;
                    std::memcpy(to + 2 * i * LANES + lane, from, 4);
                    std::memcpy(to + (2 * i + 1) * LANES + lane, from + 4, 4);
                } else {
                    std::memcpy(to + i * LANES + lane, rows + names[i][lane] * 4, 4);
                }
            }
    }
    // Magnitudes as codes, 128 higher than their values.
    static void turn(const Words& signs, std::uint32_t* codes) {
        for (Index q = 0; q < GROUP / 4; q++)
            for (Index lane = 0; lane < LANES; lane++) {
                // A bit a byte. A magnitude x with a minus becomes (x ^ 127) + 1 = 128 - x, others x ^ 128.
                const std::uint32_t minus = (signs[lane] >> (4 * q) & 15) * 0x00204081u & 0x01010101u;
                std::uint32_t& code = codes[q * LANES + lane];
                code = (code ^ (0x80808080u - minus)) + minus;
            }
    }
};

// f(form) for a form whose weights name rows of a codebook.
template <class F>
inline void with_rows(Form form, F&& f) {
    switch (form) {
        case Form::iq2_xxs: return f(InRows<Form::iq2_xxs>{});
        case Form::iq2_xs: return f(InRows<Form::iq2_xs>{});
        case Form::iq2_s: return f(InRows<Form::iq2_s>{});
        case Form::iq3_xxs: return f(InRows<Form::iq3_xxs>{});
        default: return f(InRows<Form::iq3_s>{});
    }
}

inline void decode_block(Form form, const std::byte* block, const Codebook& book, RowBlock& to) {
    with_rows(form, [&](auto found) { found.decode(block, book, to); });
}

}  // namespace cairn::CAIRN_VARIANT
