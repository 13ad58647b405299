// Blocks that name rows of a codebook, decoded with tables that stand in registers: 32 rows are looked up at once, as the
// places of their magnitudes in 16 bits (see Codebook). The codes are those that InRows makes elsewhere, bit for bit.
#pragma once

#include "simd.h"

namespace cairn::CAIRN_VARIANT {

#if defined(__AVX512BW__)

template <Form FORM>
struct WideRows {
    // `at` is a block of 16 outputs; see RowBlock for the codes.
    static void decode(const std::uint8_t* at, const Codebook& book, std::byte* codes) {
        const __m512i low = repeat(book.low), high = repeat(book.high);
        for (Index group = 0; group < SUPER / GROUP; group++, codes += GROUP * LANES) {
            __m512i places[PAIRS], signs;
            name(at, group, places, signs);
#pragma GCC unroll 4
            for (int pair = 0; pair < PAIRS; pair++) places[pair] = look_up<0, COUNT / 64>(book, places[pair]);
#pragma GCC unroll 8
            for (int row = 0; row < 2 * PAIRS; row++) {
                const __m512i half = half_bytes(words_of(places[row / 2], row % 2));
                if constexpr (in_eights(FORM)) {
                    put(codes, 2 * row, pick(low, half), signs);
                    put(codes, 2 * row + 1, pick(high, half), signs);
                } else {
                    put(codes, row, pick(low, half), signs);
                }
            }
        }
    }

  private:
    static constexpr Index COUNT = row_count(FORM);
    static constexpr int PAIRS = in_eights(FORM) ? 2 : 4;  // of rows of a group
    // Of iq2_xs the second and the third row's signs have changed places.
    static constexpr bool CROSSED = FORM == Form::iq2_xs;

    static __m512i repeat(const std::uint8_t* table) {
        return _mm512_maskz_broadcast_i32x4(0xffff, _mm_load_si128(reinterpret_cast<const __m128i*>(table)));
    }
    static __m512i pick(__m512i table, __m512i places) { return _mm512_shuffle_epi8(table, places); }
    static __m512i either(__m512i a, __m512i b, __m512i mask) { return _mm512_ternarylogic_epi32(a, b, mask, 0xf8); }

    // Bytes of two rows, [2][16], as words.
    static __m512i two_rows(const std::uint8_t* at) {
        return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    }
    // The same, of which the second stands 32 bytes behind the first.
    static __m512i two_apart(const std::uint8_t* at) {
        const auto one = [&](Index from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + from)); };
        return _mm512_cvtepu8_epi16(_mm256_set_m128i(one(2 * LANES), one(0)));
    }
    // One of two rows' words as 16 numbers.
    static __m512i words_of(__m512i pair, int row) {
        const __m256i words = row ? __builtin_shufflevector(pair, pair, 4, 5, 6, 7) : __builtin_shufflevector(pair, pair, 0, 1, 2, 3);
        return _mm512_maskz_cvtepu16_epi32(0xffff, words);
    }
    // Four bytes of each of 16 outputs, [4][16], as one number each.
    static __m512i four_bytes(const std::uint8_t* at) {
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m512i turned = _mm512_maskz_permutexvar_epi32(0xffff, order, _mm512_loadu_si512(at));
        const __m128i inside = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        return _mm512_shuffle_epi8(turned, _mm512_maskz_broadcast_i32x4(0xffff, inside));
    }

    // The rows that a group names, [2][16] words, and its signs: a byte a row of eight, of 16 outputs.
    static void name(const std::uint8_t* at, Index group, __m512i (&rows)[PAIRS], __m512i& signs) {
        const auto low = [&](Index from, Index i) { return at + (from + i) * LANES; };
        if constexpr (FORM == Form::iq2_xxs || FORM == Form::iq3_xxs) {
            for (int pair = 0; pair < PAIRS; pair++) rows[pair] = two_rows(low(2 + 8 * group, 2 * pair));
            signs = even(sevens(four_bytes(low(FORM == Form::iq2_xxs ? 6 + 8 * group : 66 + 4 * group, 0))));
        } else if constexpr (FORM == Form::iq2_xs) {
            __m512i seven[PAIRS];
            for (int pair = 0; pair < PAIRS; pair++) {
                const std::uint8_t* from = low(2 + 8 * group, 4 * pair);
                const __m512i both =
                    _mm512_or_si512(two_apart(from), _mm512_slli_epi16(two_apart(from + LANES), 8));
                rows[pair] = _mm512_and_si512(both, _mm512_set1_epi16(511));
                seven[pair] = _mm512_srli_epi16(both, 9);
            }
            const __m512i all = _mm512_or_si512(seven[0], _mm512_slli_epi16(seven[1], 8));
            signs = even(_mm512_or_si512(words_of(all, 0), _mm512_maskz_slli_epi32(0xffff, words_of(all, 1), 16)));
        } else {
            constexpr Index SIGNS = FORM == Form::iq2_s ? 34 : 74;
            constexpr int BITS = FORM == Form::iq2_s ? 2 : 1;
            const auto* high = reinterpret_cast<const __m128i*>(low(66, group));
            const __m512i above = _mm512_slli_epi16(
                _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(_mm_loadu_si128(high))), 8);
            for (int pair = 0; pair < PAIRS; pair++) {
                const __m256i first = _mm256_set1_epi16(static_cast<short>(2 * pair * BITS)),
                              second = _mm256_set1_epi16(static_cast<short>((2 * pair + 1) * BITS));
                const __m512i by = __builtin_shufflevector(first, second, 0, 1, 2, 3, 4, 5, 6, 7);
                rows[pair] = either(two_rows(low(2, 2 * PAIRS * group + 2 * pair)), _mm512_srlv_epi16(above, by),
                                    _mm512_set1_epi16(((1 << BITS) - 1) << 8));
            }
            signs = four_bytes(low(SIGNS + 4 * group, 0));
        }
    }
    // Four times seven bits in bytes of their own.
    static __m512i sevens(__m512i x) {
        const auto part = [&](int i) {
            const __m512i moved = _mm512_maskz_slli_epi32(0xffff, x, static_cast<unsigned>(i));
            return _mm512_and_si512(moved, _mm512_set1_epi32(127 << 8 * i));
        };
        return _mm512_or_si512(_mm512_or_si512(part(0), part(1)), _mm512_or_si512(part(2), part(3)));
    }
    // Bytes of seven signs, each with an eighth that makes the count of minus signs even.
    static __m512i even(__m512i x) {
        const __m128i odd = _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0);
        const __m512i table = _mm512_maskz_broadcast_i32x4(0xffff, odd), four = _mm512_set1_epi8(15);
        const __m512i low = pick(table, _mm512_and_si512(x, four));
        const __m512i high = pick(table, _mm512_and_si512(_mm512_srli_epi16(x, 4), four));
        return _mm512_ternarylogic_epi32(x, low, high, 0x96);
    }

    // The places of rows among the N tables of 64 that begin with table FROM.
    template <Index FROM, Index N>
    static __m512i look_up(const Codebook& book, __m512i rows) {
        if constexpr (N == 1) {
            const std::uint16_t* table = book.places + FROM * 64;
            return _mm512_permutex2var_epi16(_mm512_load_si512(table), rows, _mm512_load_si512(table + 32));
        } else {
            const __mmask32 upper = _mm512_test_epi16_mask(rows, _mm512_set1_epi16(32 * N));
            const __m512i first = look_up<FROM, N / 2>(book, rows), second = look_up<FROM + N / 2, N / 2>(book, rows);
            return _mm512_mask_blend_epi16(upper, first, second);
        }
    }
    // Four half bytes in bytes of their own.
    static __m512i half_bytes(__m512i x) {
        // (x | x << 12) & 15 in each byte
        return _mm512_ternarylogic_epi32(x, _mm512_maskz_slli_epi32(0xffff, x, 12), _mm512_set1_epi8(15), 0xa8);
    }
    // Codes of k = 4 q + j, turned where their signs say so: 256 - (128 + x) is 128 - x.
    static void put(std::byte* codes, int q, __m512i code, __m512i signs) {
        const int byte = CROSSED ? (q / 2 & 1) * 2 + q / 4 : q / 2;
        const __m128i first = _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
        const __m128i four = _mm_add_epi8(first, _mm_set1_epi8(static_cast<char>(byte)));
        const __m512i own = pick(signs, _mm512_maskz_broadcast_i32x4(0xffff, four));
        const __m512i bit = _mm512_set1_epi32(q % 2 ? static_cast<int>(0x80402010u) : 0x08040201);
        const __mmask64 minus = _mm512_test_epi8_mask(own, bit);
        _mm512_store_si512(codes + q * 64, _mm512_mask_sub_epi8(code, minus, _mm512_setzero_si512(), code));
    }
};

#endif

}  // namespace cairn::CAIRN_VARIANT
