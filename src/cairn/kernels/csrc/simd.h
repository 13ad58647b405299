// Sixteen floats at a time, in the registers that the instruction set has. Compiled once for each variant; everything
// lives in the variant's own namespace, so that no function of one can be linked into another.
#pragma once

#include <type_traits>

#include "kernel.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace cairn::CAIRN_VARIANT {

#if defined(__AVX512F__)
constexpr int WIDTH = 16, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int WIDTH = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int WIDTH = 4, REGISTERS = 32;
#else
constexpr int WIDTH = 4, REGISTERS = 16;
#endif
constexpr int PARTS = LANES / WIDTH;

typedef float Part __attribute__((vector_size(WIDTH * 4)));
typedef std::int32_t IntPart __attribute__((vector_size(WIDTH * 4)));

struct Vec {
    Part part[PARTS];
};
struct IntVec {
    IntPart part[PARTS];
};

template <class F>
inline Vec each(F&& f) {
    Vec out;
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) out.part[i] = f(i);
    return out;
}

// A vector of `x` is a load that repeats it: a sum with zero, of which -0 would come out as 0, is not.
inline Part repeat(float x) {
#if defined(__AVX512F__)
    return _mm512_set1_ps(x);
#elif defined(__AVX2__)
    return _mm256_set1_ps(x);
#elif defined(__aarch64__)
    return vdupq_n_f32(x);
#else
    return Part{x, x, x, x};
#endif
}
inline Vec set(float x) {
    return each([&](int) { return repeat(x); });
}
// Register by register: compilers copy a whole Vec through memory.
inline Vec load(const float* p) {
    Vec out;
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) __builtin_memcpy(&out.part[i], p + i * WIDTH, sizeof out.part[i]);
    return out;
}
inline void store(float* p, const Vec& x) {
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) __builtin_memcpy(p + i * WIDTH, &x.part[i], sizeof x.part[i]);
}
inline IntVec load_int(const void* p) {
    IntVec out;
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++)
        __builtin_memcpy(&out.part[i], static_cast<const float*>(p) + i * WIDTH, sizeof out.part[i]);
    return out;
}
// The first `count` of 16 numbers; the others are zero.
inline Vec load_first(const float* p, Index count) {
    float buffer[LANES] = {};
    for (Index i = 0; i < count; i++) buffer[i] = p[i];
    return load(buffer);
}
inline void store_first(float* p, const Vec& x, Index count) {
    float buffer[LANES];
    store(buffer, x);
    for (Index i = 0; i < count; i++) p[i] = buffer[i];
}

inline Vec operator+(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.part[i] + b.part[i]; });
}
inline Vec operator-(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.part[i] - b.part[i]; });
}
inline Vec operator*(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.part[i] * b.part[i]; });
}
inline Vec operator/(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.part[i] / b.part[i]; });
}

inline Part fma_part(Part a, Part b, Part c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}
// a * b + c, rounded once where the instruction set can.
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) {
    return each([&](int i) { return fma_part(a.part[i], b.part[i], c.part[i]); });
}

// b where it is larger, else a: a NaN in b is dropped, one in a stays.
inline Vec larger(const Vec& a, const Vec& b) {
    return each([&](int i) { return b.part[i] > a.part[i] ? b.part[i] : a.part[i]; });
}
// b where it is smaller, else a: a NaN in a stays.
inline Vec smaller(const Vec& a, const Vec& b) {
    return each([&](int i) { return b.part[i] < a.part[i] ? b.part[i] : a.part[i]; });
}
// a where low <= x <= high, else b.
inline Vec choose_between(const Vec& x, float low, float high, const Vec& a, const Vec& b) {
    const Part l = Part{} + low, h = Part{} + high;
    return each([&](int i) { return ((x.part[i] >= l) & (x.part[i] <= h)) ? a.part[i] : b.part[i]; });
}

inline Vec as_float(const IntVec& x) {
    Vec out;
    __builtin_memcpy(&out, &x, sizeof out);
    return out;
}
inline Vec to_float(const IntVec& x) {
    return each([&](int i) { return __builtin_convertvector(x.part[i], Part); });
}
// The even (low) and odd (high) bfloat16 of sixteen pairs.
inline Vec low_bf16(const IntVec& pairs) {
    IntVec out;
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) out.part[i] = pairs.part[i] << 16;
    return as_float(out);
}
inline Vec high_bf16(const IntVec& pairs) {
    IntVec out;
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) out.part[i] = pairs.part[i] & static_cast<std::int32_t>(0xffff0000);
    return as_float(out);
}

inline float half_to_float(std::uint16_t half) {
    const std::uint32_t rest = (half & 0x7fffu) << 13;
    float value;
    __builtin_memcpy(&value, &rest, 4);
    value *= 0x1p112f;  // exact, subnormal halves included
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    if (rest >= 0x0f800000u) bits = rest | 0x7f800000u;  // infinity, NaN
    bits |= (half & 0x8000u) << 16;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
inline Vec load_half(const std::uint16_t* p) {
#if defined(__AVX512F__)
    return Vec{{(Part)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}};
#elif defined(__AVX2__)
    const auto at = reinterpret_cast<const __m128i*>(p);
    return Vec{{(Part)_mm256_cvtph_ps(_mm_loadu_si128(at)), (Part)_mm256_cvtph_ps(_mm_loadu_si128(at + 1))}};
#elif defined(__aarch64__)
    return each([&](int i) { return (Part)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + i * WIDTH))); });
#else
    float buffer[LANES];
    for (Index i = 0; i < LANES; i++) buffer[i] = half_to_float(p[i]);
    return load(buffer);
#endif
}

// Sixteen numbers as bfloat16, rounded to nearest even. Subnormals may become zero.
inline void store_bf16(std::uint16_t* p, const Vec& x) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh(x.part[0]);
    __builtin_memcpy(p, &rounded, sizeof rounded);
#else
    std::uint32_t bits[LANES];
    __builtin_memcpy(bits, &x, sizeof bits);
    for (Index i = 0; i < LANES; i++) {
        const bool nan = (bits[i] & 0x7fffffffu) > 0x7f800000u;
        const std::uint32_t rounded = nan ? bits[i] | 0x400000u : bits[i] + 0x7fffu + (bits[i] >> 16 & 1u);
        p[i] = static_cast<std::uint16_t>(rounded >> 16);
    }
#endif
}

inline std::uint16_t float_to_half(float x) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    const std::uint32_t sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);  // NaN
    if (rest >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to 65536: infinity
    if (rest < 0x38800000u) {
        // Subnormal: adding 1/2 leaves the number, counted in the halves' smallest steps of 2^-24, in the low bits.
        float shifted;
        __builtin_memcpy(&shifted, &rest, 4);
        shifted += 0.5f;
        __builtin_memcpy(&bits, &shifted, 4);
        return static_cast<std::uint16_t>(sign | (bits - 0x3f000000u));
    }
    return static_cast<std::uint16_t>(sign | ((rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13));
}
inline void store_half(std::uint16_t* p, const Vec& x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xffff, x.part[0], 0));
#elif defined(__AVX2__)
    const auto at = reinterpret_cast<__m128i*>(p);
    _mm_storeu_si128(at, _mm256_cvtps_ph(x.part[0], _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(at + 1, _mm256_cvtps_ph(x.part[1], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++)
        vst1_u16(p + i * WIDTH, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x.part[i])));
#else
    float lane[LANES];
    store(lane, x);
    for (Index i = 0; i < LANES; i++) p[i] = float_to_half(lane[i]);
#endif
}

// Lanes are folded in halves: a fixed tree, so every variant gives the same bits.
template <class F>
inline float fold(const Vec& x, F&& pair) {
    float lane[LANES];
    store(lane, x);
    for (Index width = LANES / 2; width; width /= 2)
        for (Index i = 0; i < width; i++) lane[i] = pair(lane[i], lane[i + width]);
    return lane[0];
}
#if defined(__AVX2__)
inline __m256 low_half(const Vec& x) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(x.part[0], x.part[0], 0, 1, 2, 3, 4, 5, 6, 7);
#else
    return x.part[0];
#endif
}
inline __m256 high_half(const Vec& x) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(x.part[0], x.part[0], 8, 9, 10, 11, 12, 13, 14, 15);
#else
    return x.part[1];
#endif
}
inline float sum(const Vec& x) {
    const __m256 eight = _mm256_add_ps(low_half(x), high_half(x));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// As `larger`: max(b, a) is b where it is larger, else a.
inline float largest(const Vec& x) {
    const __m256 eight = _mm256_max_ps(high_half(x), low_half(x));
    const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_max_ps(_mm_movehl_ps(four, four), four);
    return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(two), two));
}
#elif defined(__aarch64__)
// The halves of four lanes are the lower two and the upper two.
template <class F>
inline float fold_parts(const Vec& x, F&& pair) {
    const Part four = pair(pair(x.part[0], x.part[2]), pair(x.part[1], x.part[3]));
    const Part two = pair(four, (Part)vextq_f32((float32x4_t)four, (float32x4_t)four, 2));
    return pair(two, (Part)vdupq_laneq_f32((float32x4_t)two, 1))[0];
}
inline float sum(const Vec& x) {
    return fold_parts(x, [](const Part& a, const Part& b) { return a + b; });
}
inline float largest(const Vec& x) {
    return fold_parts(x, [](const Part& a, const Part& b) { return b > a ? b : a; });
}
#else
inline float sum(const Vec& x) {
    return fold(x, [](float a, float b) { return a + b; });
}
inline float largest(const Vec& x) {
    return fold(x, [](float a, float b) { return b > a ? b : a; });
}
#endif

// e^x within 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN for NaN.
inline Vec exp(const Vec& x) {
    constexpr float TERMS[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                               5.0000001201e-1f};
#if defined(__AVX512F__)
    // Below -87.3 anything may come out before the last mask; above 88.8 scalef overflows by itself. (The full masks
    // are for GCC 12, which warns about its own header without them.)
    const __m512 inside = _mm512_maskz_min_ps(0xffff, _mm512_set1_ps(89.0f), x.part[0]);
    const __m512 turns = _mm512_maskz_roundscale_ps(0xffff, inside * 1.44269504089f, 0);
    __m512 rest = _mm512_fmadd_ps(turns, _mm512_set1_ps(-0.693145751953125f), inside);
    rest = _mm512_fmadd_ps(turns, _mm512_set1_ps(-1.42860682030941723e-6f), rest);
    __m512 poly = _mm512_set1_ps(1.9875691500e-4f);
    for (const float term : TERMS) poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(term));
    poly = _mm512_fmadd_ps(poly, _mm512_mul_ps(rest, rest), _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
    const __mmask16 some = _mm512_cmp_ps_mask(inside, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
    return Vec{{(Part)_mm512_maskz_scalef_ps(some, poly, turns)}};
#else
    constexpr float LOW = -87.3f, HIGH = 88.7f, ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Vec inside = each([&](int i) {
        const Part low = Part{} + LOW, high = Part{} + HIGH;
        const Part raised = x.part[i] < low ? low : x.part[i];
        return raised > high ? high : raised;
    });
    const Vec shifted = fma(inside, set(1.44269504089f), set(ROUND));
    const Vec turns = shifted - set(ROUND);
    Vec rest = fma(turns, set(-0.693145751953125f), inside);
    rest = fma(turns, set(-1.42860682030941723e-6f), rest);
    Vec poly = set(1.9875691500e-4f);
    for (const float term : TERMS) poly = fma(poly, rest, set(term));
    poly = fma(poly, rest * rest, rest + set(1.0f));
    return each([&](int i) {
        // 2^n in two factors, because 2^128 is no float while e^88.7 is one.
        const IntPart n = (IntPart)shifted.part[i] - 0x4b400000;
        const IntPart half = n >> 1;
        const Part first = (Part)((half + 127) << 23), second = (Part)((n - half + 127) << 23);
        const Part value = poly.part[i] * first * second;
        const Part bounded = x.part[i] > (Part{} + HIGH) ? Part{} + __builtin_inff() : value;
        return x.part[i] < (Part{} + LOW) ? Part{} : bounded;
    });
#endif
}

// 16 bytes as whole numbers, signed or not as their type is.
template <class Byte>
inline IntVec load_bytes(const Byte* p) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    if constexpr (std::is_signed_v<Byte>)
        return IntVec{{(IntPart)_mm512_maskz_cvtepi8_epi32(0xffff, bytes)}};
    else
        return IntVec{{(IntPart)_mm512_maskz_cvtepu8_epi32(0xffff, bytes)}};
#elif defined(__AVX2__)
    const auto eight = [&](int i) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + i * WIDTH)); };
    if constexpr (std::is_signed_v<Byte>)
        return IntVec{{(IntPart)_mm256_cvtepi8_epi32(eight(0)), (IntPart)_mm256_cvtepi8_epi32(eight(1))}};
    else
        return IntVec{{(IntPart)_mm256_cvtepu8_epi32(eight(0)), (IntPart)_mm256_cvtepu8_epi32(eight(1))}};
#elif defined(__aarch64__)
    if constexpr (std::is_signed_v<Byte>) {
        const int8x16_t bytes = vld1q_s8(reinterpret_cast<const std::int8_t*>(p));
        const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
        return IntVec{{(IntPart)vmovl_s16(vget_low_s16(low)), (IntPart)vmovl_high_s16(low),
                       (IntPart)vmovl_s16(vget_low_s16(high)), (IntPart)vmovl_high_s16(high)}};
    } else {
        const uint8x16_t bytes = vld1q_u8(reinterpret_cast<const std::uint8_t*>(p));
        const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
        return IntVec{{(IntPart)vmovl_u16(vget_low_u16(low)), (IntPart)vmovl_high_u16(low),
                       (IntPart)vmovl_u16(vget_low_u16(high)), (IntPart)vmovl_high_u16(high)}};
    }
#else
    IntVec out = {};
    for (int i = 0; i < PARTS; i++)
        for (int lane = 0; lane < WIDTH; lane++) out.part[i][lane] = p[i * WIDTH + lane];
    return out;
#endif
}

inline Vec tanh(const Vec& x) { return set(1.0f) - set(2.0f) / (exp(x + x) + set(1.0f)); }

}  // namespace cairn::CAIRN_VARIANT
