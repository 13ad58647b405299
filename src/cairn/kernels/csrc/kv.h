// How numbers of KV are stored, read and multiplied: one form an element type. `Pages` says how blocks are laid out.
//
// A step is what one vector load reads: 16 lanes at STEP neighbouring indices of the sum that is being built (along the
// head for keys, along positions for values). `add` multiplies them with STEP numbers of each of R rows. A block's keys, and
// its values, begin with FRONT bytes of something else. Of a form with CODES both factors are integers: see kv_q8.h.
#pragma once

#include "outer.h"

namespace cairn::CAIRN_VARIANT {

// The `size` numbers x in 16 bits: take(first index, bits, count) for sixteen at a time.
template <class F>
inline void rounded(const float* x, Index size, void (*store)(std::uint16_t*, const Vec&), F&& take) {
    std::uint16_t bits[LANES];
    for (Index at = 0; at < size; at += LANES) {
        const Index count = size - at < LANES ? size - at : LANES;
        store(bits, count == LANES ? load(x + at) : load_first(x + at, count));
        take(at, bits, count);
    }
}

struct Range {
    Index low, high;  // low <= i < high

    bool empty() const { return low >= high; }
};

// Whether none of `count` numbers, `step` apart, is infinite or NaN: those have all of their exponent's bits.
template <class Bits>
inline bool all_finite(const std::byte* at, Index count, Index step, Bits exponent) {
    Bits full = 0;
    for (Index i = 0; i < count; i++) {
        Bits one;
        __builtin_memcpy(&one, at + i * step * static_cast<Index>(sizeof one), sizeof one);
        full |= (one & exponent) == exponent;
    }
    return !full;
}

// What makes weights of scores: these are multiplied by LOG, and weights are `exp` of that.
struct PlainExp {
    static constexpr float LOG = 1.0f;
    static Vec exp(const Vec& x) { return CAIRN_VARIANT::exp(x); }
};
#if defined(__AVX512F__)
// For weights that are rounded.
struct NearExp {
    static constexpr float LOG = 1.44269504089f;
    // 2^x for x <= 0, to a relative 3e-6: a 500th of what rounding a weight to bfloat16 moves it. 1 for 0.
    static Vec exp(const Vec& x) {
        const __m512 turns = _mm512_maskz_roundscale_ps(0xffff, x.part[0], 0), rest = x.part[0] - turns;
        constexpr float TERMS[] = {5.5906434597e-2f, 2.4024098874e-1f, 6.9312419164e-1f, 1.0f};
        __m512 poly = _mm512_set1_ps(9.5828437987e-3f);
        for (const float term : TERMS) poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(term));
        return Vec{{(Part)_mm512_maskz_scalef_ps(0xffff, poly, turns)}};
    }
};
#else
using NearExp = PlainExp;
#endif

struct KvF32 : PlainExp {
    using Number = float;  // of a query or weight
    using Raw = Vec;
    using Sum = Vec;
    static constexpr bool CODES = false;
    static constexpr Index STEP = 1, ELEMENT = 4, FRONT = 0;

    static Raw read(const std::byte* at) { return load(reinterpret_cast<const float*>(at)); }
    static Raw read_first(const std::byte* at, Index count) {
        return load_first(reinterpret_cast<const float*>(at), count);
    }
    template <int R, int P>
    static void add(Vec (&acc)[R][P], const Number* x, Index stride, const Raw (&raw)[P]) {
        add_outer<R, P>(acc, x, stride, raw);
    }
    // Stores sixteen numbers; returns them as they were stored.
    static Vec put(Number* out, const Vec& x) {
        store(out, x);
        return x;
    }
    static void write_keys(std::byte* keys, Index place, const float* x, Index size) {
        float* out = reinterpret_cast<float*>(keys) + place;
        for (Index i = 0; i < size; i++) out[i * BLOCK_TOKENS] = x[i];
    }
    static void write_values(std::byte* values, Index place, const float* x, Index size) {
        __builtin_memcpy(values + place * size * 4, x, size * 4);
    }
    // Of the values of one position: the `place`th of those that begin at `step`.
    static bool finite(const std::byte* step, Index, Index size) {
        return all_finite<std::uint32_t>(step, size, 1, 0x7f800000);
    }
};

struct KvF16 : KvF32 {
    static constexpr Index ELEMENT = 2;

    static Raw read(const std::byte* at) { return load_half(reinterpret_cast<const std::uint16_t*>(at)); }
    static Raw read_first(const std::byte* at, Index count) {
        std::uint16_t buffer[LANES] = {};
        __builtin_memcpy(buffer, at, count * 2);
        return load_half(buffer);
    }
    static void write_keys(std::byte* keys, Index place, const float* x, Index size) {
        std::uint16_t* out = reinterpret_cast<std::uint16_t*>(keys) + place;
        rounded(x, size, store_half, [&](Index at, const std::uint16_t* bits, Index count) {
            for (Index i = 0; i < count; i++) out[(at + i) * BLOCK_TOKENS] = bits[i];
        });
    }
    static void write_values(std::byte* values, Index place, const float* x, Index size) {
        std::uint16_t* out = reinterpret_cast<std::uint16_t*>(values) + place * size;
        rounded(x, size, store_half, [&](Index at, const std::uint16_t* bits, Index count) {
            for (Index i = 0; i < count; i++) out[at + i] = bits[i];
        });
    }
    static bool finite(const std::byte* step, Index, Index size) {
        return all_finite<std::uint16_t>(step, size, 1, 0x7c00);
    }
};

// Pairs of bfloat16 in one 32-bit lane. Where the instruction set multiplies such pairs, queries and weights are
// rounded to bfloat16 too; elsewhere pairs are widened and everything is float32.
#if defined(__AVX512BF16__)
struct KvBf16 : NearExp {
    using Number = std::uint16_t;
#else
struct KvBf16 : PlainExp {
    using Number = float;
#endif
    using Raw = IntVec;
    using Sum = Vec;
    static constexpr bool CODES = false;
    static constexpr Index STEP = 2, ELEMENT = 2, FRONT = 0;

    static Raw read(const std::byte* at) { return load_int(at); }
    static Raw read_first(const std::byte* at, Index count) {
        std::int32_t buffer[LANES] = {};
        __builtin_memcpy(buffer, at, count * 4);
        return load_int(buffer);
    }
    template <int R, int P>
    static void add(Vec (&acc)[R][P], const Number* x, Index stride, const Raw (&raw)[P]) {
#if defined(__AVX512BF16__)
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            std::int32_t pair;
            __builtin_memcpy(&pair, x + r * stride, 4);
            const auto factor = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int p = 0; p < P; p++)
                acc[r][p].part[0] = (Part)_mm512_dpbf16_ps(acc[r][p].part[0], (__m512bh)raw[p].part[0], factor);
        }
#else
        Vec weight[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) weight[p] = low_bf16(raw[p]);
        add_outer<R, P>(acc, x, stride, weight);
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) weight[p] = high_bf16(raw[p]);
        add_outer<R, P>(acc, x + 1, stride, weight);
#endif
    }
    static Vec put(Number* out, const Vec& x) {
#if defined(__AVX512BF16__)
        const __m256bh rounded = _mm512_cvtneps_pbh(x.part[0]);
        __builtin_memcpy(out, &rounded, sizeof rounded);
        typedef std::uint16_t Halves __attribute__((vector_size(2 * LANES)));
        return Vec{{(Part)(__builtin_convertvector((Halves)rounded, IntPart) << 16)}};
#else
        store(out, x);
        return x;
#endif
    }
    static void write_keys(std::byte* keys, Index place, const float* x, Index size) {
        std::uint32_t* out = reinterpret_cast<std::uint32_t*>(keys) + place;
        rounded(x, size, store_bf16, [&](Index at, const std::uint16_t* bits, Index count) {
            for (Index i = 0; i < count; i += 2)
                out[(at + i) / 2 * BLOCK_TOKENS] = bits[i] | static_cast<std::uint32_t>(bits[i + 1]) << 16;
        });
    }
    // The other position of the pair is left alone: another thread may be writing it.
    static void write_values(std::byte* values, Index place, const float* x, Index size) {
        std::uint16_t* out = reinterpret_cast<std::uint16_t*>(values) + place / 2 * 2 * size + place % 2;
        rounded(x, size, store_bf16, [&](Index at, const std::uint16_t* bits, Index count) {
            for (Index i = 0; i < count; i++) out[2 * (at + i)] = bits[i];
        });
    }
    static bool finite(const std::byte* step, Index place, Index size) {
        return all_finite<std::uint16_t>(step + 2 * place, size, 2, 0x7f80);
    }
};

}  // namespace cairn::CAIRN_VARIANT
