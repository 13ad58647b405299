// Passes over a line of logits. Their results are exact: comparisons, integers, and floats by stated steps.
#pragma once

#include "sampler.h"
#include "simd.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace cairn::CAIRN_VARIANT {

typedef double WidePart __attribute__((vector_size(WIDTH * 4)));
typedef std::int64_t WideInt __attribute__((vector_size(WIDTH * 4)));
struct Wide {
    WidePart part[2 * PARTS];
};

// A loop's body is used for the lanes that are whole and for the rest: without this, compilers call it.
#define CAIRN_INLINE __attribute__((always_inline))

constexpr unsigned EVERY = 0xffff;
constexpr float NOTHING = -__builtin_inff();

// One bit a lane: its sign in a mask of -1 and 0.
inline unsigned bits_of(const IntPart& mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
    return static_cast<unsigned>(_mm256_movemask_ps((__m256)mask));
#elif defined(__aarch64__)
    const IntPart places = {1, 2, 4, 8};
    return static_cast<unsigned>(vaddvq_s32((int32x4_t)(mask & places)));
#elif defined(__SSE2__)
    return static_cast<unsigned>(_mm_movemask_ps((__m128)mask));
#else
    unsigned bits = 0;
    for (int i = 0; i < WIDTH; i++) bits |= static_cast<unsigned>(mask[i] & 1) << i;
    return bits;
#endif
}
template <class Test>
CAIRN_INLINE inline unsigned lanes(const Vec& x, Test&& test) {
    unsigned bits = 0;
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) bits |= bits_of((IntPart)test(x.part[i])) << (i * WIDTH);
    return bits;
}
inline unsigned at_least(const Vec& x, float least) {
    return lanes(x, [&](const Part& p) { return p >= (Part{} + least); });
}

// The lanes in `bits`; the others are `fill`.
CAIRN_INLINE inline Vec keep(const Vec& x, unsigned bits, float fill) {
    if (bits == EVERY) return x;
#if defined(__AVX512F__)
    return Vec{{(Part)_mm512_mask_mov_ps(_mm512_set1_ps(fill), static_cast<__mmask16>(bits), (__m512)x.part[0])}};
#else
    std::int32_t place[LANES];
    for (int i = 0; i < LANES; i++) place[i] = 1 << i;
    const IntVec places = load_int(place);
    const IntPart all = IntPart{} + static_cast<std::int32_t>(bits);
    return each([&](int i) { return (all & places.part[i]) != 0 ? x.part[i] : Part{} + fill; });
#endif
}

// f(lanes, their place, which of them are there); those beyond the end are `fill`.
template <class F>
CAIRN_INLINE inline void over(const float* x, Index n, float fill, F&& f) {
    Index at = 0;
    for (; at + LANES <= n; at += LANES) f(load(x + at), at, EVERY);
    if (at == n) return;
    float rest[LANES];
    for (Index i = 0; i < LANES; i++) rest[i] = at + i < n ? x[at + i] : fill;
    f(load(rest), at, (1u << (n - at)) - 1);
}

inline WidePart widened(const Part& x, int side) {
#if defined(__AVX512F__)
    // The full masks are for GCC 12, which warns about its own header without them.
    return (WidePart)_mm512_maskz_cvtps_pd(0xff, side ? __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15)
                                                         : __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7));
#elif defined(__AVX2__)
    return (WidePart)_mm256_cvtps_pd(side ? _mm256_extractf128_ps((__m256)x, 1) : _mm256_castps256_ps128((__m256)x));
#elif defined(__SSE2__)
    return (WidePart)_mm_cvtps_pd(side ? _mm_movehl_ps((__m128)x, (__m128)x) : (__m128)x);
#elif defined(__aarch64__)
    return (WidePart)vcvt_f64_f32(side ? vget_high_f32((float32x4_t)x) : vget_low_f32((float32x4_t)x));
#else
    return WidePart{x[2 * side], x[2 * side + 1]};
#endif
}

constexpr double SHIFT = 4096.0;  // its last bit is worth 1 / ONE

// exp(x) + SHIFT for x <= 0, so in multiples of 1 / ONE: `weigh` in kernels/sampling.py.
CAIRN_INLINE inline Wide weigh16(const Vec& x) {
    constexpr float LOG2E = 1.442695f, ROUND = 12582912.0f;
    constexpr float TERMS[] = {0.0013264727f, 0.009671513f, 0.055507336f, 0.24022242f, 0.693147f, 1.0f};
    Wide out;
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) {
        const Part low = Part{} + LOWEST;
        const Part whole = (x.part[i] < low ? low : x.part[i]) * LOG2E;
        const Part turned = whole + ROUND;
        const Part power = whole - (turned - ROUND);
        Part value = power * TERMS[0];
#pragma GCC unroll 5
        for (int term = 1; term < 5; term++) value = (value + TERMS[term]) * power;
        value = value + TERMS[5];
        value = (Part)((IntPart)value + ((IntPart)turned << 23));
        out.part[2 * i] = widened(value, 0) + SHIFT;
        out.part[2 * i + 1] = widened(value, 1) + SHIFT;
    }
    return out;
}
// As whole numbers of 1 / ONE.
inline void counted(const Wide& x, std::int64_t* out) {
    std::int64_t shift;
    __builtin_memcpy(&shift, &SHIFT, sizeof shift);
#pragma GCC unroll 8
    for (int i = 0; i < 2 * PARTS; i++) {
        const WideInt whole = (WideInt)x.part[i] - shift;
        __builtin_memcpy(out + i * WIDTH / 2, &whole, sizeof whole);
    }
}

inline Peak peak(const float* x, Index n) {
    constexpr Index BLOCK = 4096;
    Peak found = {NOTHING, 0, true, false};
    Index block = 0;
    IntPart odd = {}, nan = {};
    for (Index from = 0; from < n; from += BLOCK) {
        Vec best = set(NOTHING);
        over(x + from, n - from < BLOCK ? n - from : BLOCK, x[from], [&](const Vec& v, Index, unsigned) CAIRN_INLINE {
            best = larger(best, v);
#pragma GCC unroll 4
            for (int i = 0; i < PARTS; i++) {
                odd |= ((IntPart)v.part[i] & 0x7f800000) == 0x7f800000;
                nan |= (IntPart)(v.part[i] != v.part[i]);
            }
        });
        if (const float here = largest(best); here > found.value) found.value = here, block = from;
    }
    found.finite = !bits_of(odd), found.nan = bits_of(nan);
    for (found.at = block; found.at < n && x[found.at] != found.value;) found.at++;
    return found;
}

// What a mask says of the tokens from here on, a multiple of 16.
inline unsigned allowed(const unsigned char* mask, Index at) {
    std::uint16_t bits;
    __builtin_memcpy(&bits, mask + at / 8, 2);
    return bits;
}

inline Peak allowed_peak(const float* x, Index n, const unsigned char* mask) {
    constexpr Index BLOCK = 4096;
    Peak found = {NOTHING, 0, true, false};
    Index block = 0;
    IntPart odd = {};
    for (Index from = 0; from < n; from += BLOCK) {
        Vec best = set(NOTHING);
        const Index count = n - from < BLOCK ? n - from : BLOCK;
        over(x + from, count, x[from], [&](const Vec& v, Index at, unsigned there) CAIRN_INLINE {
#pragma GCC unroll 4
            for (int i = 0; i < PARTS; i++) odd |= ((IntPart)v.part[i] & 0x7f800000) == 0x7f800000;
            const unsigned bits = allowed(mask, from + at) & there;
            if (bits) best = larger(best, keep(v, bits, NOTHING));
        });
        if (const float here = largest(best); here > found.value) found.value = here, block = from;
    }
    found.finite = !bits_of(odd);
    const auto is_it = [&](Index at) { return x[at] == found.value && allowed(mask, at & ~Index{15}) >> (at & 15) & 1; };
    for (found.at = block; found.at < n && !is_it(found.at);) found.at++;
    return found;
}

// Puts the lanes in `bits` side by side, and perhaps anything behind them, up to LANES in all.
CAIRN_INLINE inline float* put(float* out, const Vec& x, unsigned bits) {
    if (bits == EVERY) {
        store(out, x);
        return out + LANES;
    }
#if defined(__AVX512F__)
    const __m512 packed = _mm512_maskz_compress_ps(static_cast<__mmask16>(bits), (__m512)x.part[0]);
    _mm512_storeu_ps(out, packed);
    return out + __builtin_popcount(bits);
#else
    float lane[LANES];
    store(lane, x);
    for (; bits; bits &= bits - 1) *out++ = lane[__builtin_ctz(bits)];
    return out;
#endif
}

inline Index pack(const float* x, Index n, const unsigned char* mask, float peak, float divisor, float* out) {
    float* end = out;
    const Vec high = set(peak), by = set(divisor);
    over(x, n, 0.0f, [&](const Vec& v, Index at, unsigned there) CAIRN_INLINE {
        if (const unsigned bits = allowed(mask, at) & there; bits) end = put(end, (v - high) / by, bits);
    });
    return end - out;
}

inline Index place(const unsigned char* mask, Index packed) {
    for (Index at = 0;; at += 32) {
        std::uint32_t bits;
        __builtin_memcpy(&bits, mask + at / 8, 4);
        const Index count = __builtin_popcount(bits);
        if (packed >= count) {
            packed -= count;
            continue;
        }
        for (; packed; packed--) bits &= bits - 1;
        return at + __builtin_ctz(bits);
    }
}

inline void relate(const float* x, Index n, float peak, float divisor, float* out) {
    for (Index i = 0; i < n; i++) out[i] = (x[i] - peak) / divisor;
}

// A group is what stands in one lane of 64 vectors; lanes beyond the end are groups of nothing.
inline void maxima(const float* x, Index n, float* out) {
    for (Index from = 0; from < n; from += STRIPE * LANES, out += LANES) {
        Vec best = set(NOTHING);
        over(x + from, n - from < STRIPE * LANES ? n - from : STRIPE * LANES, NOTHING,
             [&](const Vec& v, Index, unsigned) CAIRN_INLINE { best = larger(best, v); });
        store(out, best);
    }
}

inline Index gather(const float* x, Index n, float least, std::uint64_t* keys) {
    Index count = 0;
    over(x, n, NOTHING, [&](const Vec& v, Index at, unsigned there) CAIRN_INLINE {
        for (unsigned bits = at_least(v, least) & there; bits; bits &= bits - 1) {
            const Index id = at + __builtin_ctz(bits);
            keys[count++] = key_of(x[id], static_cast<std::uint32_t>(id));
        }
    });
    return count;
}

inline std::int64_t weigh(const float* x, Index n, float shift, float least, std::int64_t* sums) {
    std::int64_t whole = 0;
    for (Index from = 0; from < n; from += CHUNK, sums++) {
        Wide sum = {};
        over(x + from, n - from < CHUNK ? n - from : CHUNK, NOTHING, [&](const Vec& v, Index, unsigned) CAIRN_INLINE {
            const Vec one = v - set(shift);
            const unsigned bits = at_least(one, least);
            if (!bits) return;
            const Wide more = weigh16(keep(one, bits, NOTHING));
#pragma GCC unroll 8
            for (int i = 0; i < 2 * PARTS; i++) sum.part[i] += more.part[i] - SHIFT;
        });
        // At most CHUNK * ONE = 2^50 in each: exact.
        double each[LANES], all = 0;
        __builtin_memcpy(each, &sum, sizeof sum);
        for (const double one : each) all += one;
        *sums = static_cast<std::int64_t>(all * static_cast<double>(ONE));
        whole += *sums;
    }
    return whole;
}

inline void weights(const float* x, Index n, float least, std::int64_t* out) {
    over(x, n, NOTHING, [&](const Vec& v, Index at, unsigned) CAIRN_INLINE {
        std::int64_t each[LANES];
        counted(weigh16(keep(v, at_least(v, least), NOTHING)), each);
        for (Index i = 0; i < LANES && at + i < n; i++) out[at + i] = each[i];
    });
}

// Which bucket each lane is in.
inline IntPart placed(const Part& x, float factor) { return __builtin_convertvector(x * -factor, IntPart); }

inline void tally(const float* x, Index n, float least, float factor, std::int64_t* sums) {
    for (Index i = 0; i < 2 * BUCKETS; i++) sums[i] = 0;
    over(x, n, NOTHING, [&](const Vec& v, Index, unsigned there) CAIRN_INLINE {
        const unsigned kept = at_least(v, least) & there;
        if (!kept) return;
        std::int64_t each[LANES];
        std::int32_t bucket[LANES];
        const Vec one = keep(v, kept, least);
        counted(weigh16(keep(v, kept, NOTHING)), each);
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; i++) {
            const IntPart here = placed(one.part[i], factor);
            __builtin_memcpy(bucket + i * WIDTH, &here, sizeof here);
        }
        // Two tables, because the next addition to a bucket waits for the last.
        for (Index i = 0; i < LANES; i += 2) {
            sums[bucket[i]] += each[i];
            sums[BUCKETS + bucket[i + 1]] += each[i + 1];
        }
    });
    for (Index i = 0; i < BUCKETS; i++) sums[i] += sums[BUCKETS + i];
}

inline Index bucket(const float* x, Index n, float least, float factor, Index which, std::uint64_t* keys) {
    Index count = 0;
    over(x, n, NOTHING, [&](const Vec& v, Index at, unsigned there) CAIRN_INLINE {
        unsigned kept = at_least(v, least) & there;
        if (!kept) return;
        kept &= lanes(v, [&](const Part& p) { return placed(p, factor) == static_cast<std::int32_t>(which); });
        for (; kept; kept &= kept - 1) {
            const Index id = at + __builtin_ctz(kept);
            keys[count++] = key_of(x[id], static_cast<std::uint32_t>(id));
        }
    });
    return count;
}

constexpr Passes PASSES = {peak, relate, allowed_peak, pack, place, maxima, gather, weigh, weights, tally, bucket};

}  // namespace cairn::CAIRN_VARIANT
