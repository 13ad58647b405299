// KV as 8-bit integers: the numbers of a position and head share a scale, a 127th of the largest magnitude among them.
//
// Codes are multiplied as they are stored, with queries and weights that are rounded to 15 bits: a score and a value are
// exact sums of integers, times the scales. Of queries a head shares a scale; the weights of a span share one, after each
// was multiplied with the scale of its position's values.
#pragma once

#include "kv.h"
#include "rounding.h"

namespace cairn::CAIRN_VARIANT {

// Sums over a head of 1,024 numbers stay within 32 bits: 1,024 * 127 * 16,383 < 2^31.
constexpr float MOST_CODE = 127.0f, MOST_FACTOR = 16383.0f;

// Four codes, each 128 higher than it is, stand in a 32-bit lane so that the low bytes of its two halves are the first two
// of them, and the high bytes the others: both are pairs of 16 bits after one instruction.
constexpr Index BYTE_OF[4] = {0, 2, 1, 3};

// What a row's integer products are multiplied with, and begin with: what takes 128 from each code.
struct CodeRow {
    float scale;
    std::int32_t start;
};

// acc += pairs of unsigned 16-bit numbers times a pair of signed ones.
inline void add_pairs(IntPart& acc, IntPart pairs, const std::int16_t* x) {
    [[maybe_unused]] std::int32_t both;
    __builtin_memcpy(&both, x, 4);
#if defined(__AVX512VNNI__)
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(pairs), "m"(*reinterpret_cast<const char(*)[4]>(x)));
#elif defined(__AVXVNNI__)
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(pairs), "x"(_mm256_set1_epi32(both)));
#elif defined(__AVX2__)
    acc = (IntPart)_mm256_add_epi32((__m256i)acc, _mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(both)));
#elif defined(__SSE2__)
    acc = (IntPart)_mm_add_epi32((__m128i)acc, _mm_madd_epi16((__m128i)pairs, _mm_set1_epi32(both)));
#elif defined(__aarch64__)
    acc = (IntPart)vmlaq_n_s32((int32x4_t)acc, vandq_s32((int32x4_t)pairs, vdupq_n_s32(0xffff)), x[0]);
    acc = (IntPart)vmlaq_n_s32((int32x4_t)acc, vshrq_n_s32((int32x4_t)pairs, 16), x[1]);
#else
    // Sums may pass 32 bits on the way to one that does not.
    typedef std::uint32_t Wrapping __attribute__((vector_size(WIDTH * 4)));
    const Wrapping first = (Wrapping)(pairs & 0xffff) * static_cast<std::uint32_t>(x[0]);
    acc = (IntPart)((Wrapping)acc + first + ((Wrapping)pairs >> 16) * static_cast<std::uint32_t>(x[1]));
#endif
}

struct KvQ8 {
    using Number = std::int16_t;
    using Raw = IntVec;
    using Sum = IntVec;
    static constexpr bool CODES = true;
    // In front of a block's keys, and of its values: 16 scales.
    static constexpr Index STEP = 4, ELEMENT = 1, FRONT = LANES * 4;
    static constexpr float LOG = NearExp::LOG;
    static Vec exp(const Vec& x) { return NearExp::exp(x); }

    static Raw read(const std::byte* at) { return load_int(at); }
    static Raw read_first(const std::byte* at, Index count) {
        std::int32_t buffer[LANES] = {};
        __builtin_memcpy(buffer, at, count * 4);
        return load_int(buffer);
    }
    template <int R, int P>
    static void add(IntVec (&acc)[R][P], const Number* x, Index stride, const Raw (&raw)[P]) {
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
#pragma GCC unroll 4
            for (int i = 0; i < PARTS; i++) {
                const IntPart low = raw[p].part[i] & 0x00ff00ff, high = (IntPart)((WordPart)raw[p].part[i] >> 8);
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    add_pairs(acc[r][p].part[i], low, x + r * stride);
                    add_pairs(acc[r][p].part[i], high, x + r * stride + 2);
                }
            }
        }
    }
    // x[size] as 15-bit codes.
    static CodeRow put_query(const float* x, Index size, Number* out) {
        const Rounded found = round_row<Number>(x, size, MOST_FACTOR, [&](Index at, const Number* codes, Index count) {
            __builtin_memcpy(out + at, codes, count * sizeof(Number));
        });
        return {found.scale, -128 * found.sum};
    }
    // Weights of some blocks of 16 positions, as 15-bit codes in their own place. `most`: largest magnitudes among them.
    static CodeRow put_weights(float* weights, Range blocks, const IntVec& most) {
        const auto [factor, scale] = rounding_to(MOST_FACTOR, largest(most));
        IntPart total{};
#pragma GCC unroll 4
        for (Index block = blocks.low; block < blocks.high; block++) {
            const Vec here = factor == 0.0f ? Vec{} : load(weights + block * LANES);
            total += round_codes(here, factor, reinterpret_cast<Number*>(weights) + block * LANES);
        }
        return {scale, -128 * sum(total)};
    }

    static void write_keys(std::byte* keys, Index place, const float* x, Index size) {
        auto* out = reinterpret_cast<std::uint8_t*>(keys) + FRONT + place * STEP;
        reinterpret_cast<float*>(keys)[place] = write(x, size, [&](Index i, std::uint8_t code) {
            out[i / STEP * LANES * STEP + BYTE_OF[i % STEP]] = code;
        });
    }
    // Other bytes of a lane are left alone: another thread may be writing them.
    static void write_values(std::byte* values, Index place, const float* x, Index size) {
        auto* out = reinterpret_cast<std::uint8_t*>(values) + FRONT + place / STEP * STEP * size + BYTE_OF[place % STEP];
        reinterpret_cast<float*>(values)[place] = write(x, size, [&](Index i, std::uint8_t code) { out[i * STEP] = code; });
    }
    // A weight of zero silences any code.
    static constexpr bool finite(const std::byte*, Index, Index) { return true; }

  private:
    // put(index, code as it is stored) for each number; returns their scale.
    template <class F>
    static float write(const float* x, Index size, F&& put) {
        return round_row<std::int8_t>(x, size, MOST_CODE, [&](Index at, const std::int8_t* codes, Index count) {
                   for (Index i = 0; i < count; i++) put(at + i, static_cast<std::uint8_t>(codes[i] ^ 0x80));
               }).scale;
    }
};

// f(form) for the form of an element type.
template <class F>
inline void with_form(Dtype dtype, F&& f) {
    switch (dtype) {
        case Dtype::f32: return f(KvF32{});
        case Dtype::f16: return f(KvF16{});
        case Dtype::bf16: return f(KvBf16{});
        case Dtype::q8: return f(KvQ8{});
    }
}

}  // namespace cairn::CAIRN_VARIANT
