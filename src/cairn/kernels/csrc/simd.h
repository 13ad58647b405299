// Sixteen floats at a time, in the registers that the instruction set has. Compiled once for each variant; everything
// lives in the variant's own namespace, so that no function of one can be linked into another.
#pragma once

#include "kernel.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
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

inline Vec set(float x) {
    return each([&](int) { return Part{} + x; });
}
inline Vec load(const float* p) {
    Vec out;
    __builtin_memcpy(&out, p, sizeof out);
    return out;
}
inline void store(float* p, const Vec& x) { __builtin_memcpy(p, &x, sizeof x); }
inline IntVec load_int(const void* p) {
    IntVec out;
    __builtin_memcpy(&out, p, sizeof out);
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
#else
    float buffer[LANES];
    for (Index i = 0; i < LANES; i++) buffer[i] = half_to_float(p[i]);
    return load(buffer);
#endif
}

// Lanes are folded in halves: a fixed tree.
inline float sum(const Vec& x) {
    float lane[LANES];
    store(lane, x);
    for (Index width = LANES / 2; width; width /= 2)
        for (Index i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}
inline float largest(const Vec& x) {
    float lane[LANES];
    store(lane, x);
    for (Index width = LANES / 2; width; width /= 2)
        for (Index i = 0; i < width; i++) lane[i] = lane[i + width] > lane[i] ? lane[i + width] : lane[i];
    return lane[0];
}

// e^x within 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN for NaN.
inline Vec exp(const Vec& x) {
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
    constexpr float TERMS[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                               5.0000001201e-1f};
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
}

}  // namespace cairn::CAIRN_VARIANT
