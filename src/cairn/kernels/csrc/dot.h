// Dot products of one group: 16 outputs' 32 codes with 32 codes of a row of activations. Sums are exact integers, so
// their order is free; what an instruction set has decides how they are made.
#pragma once

#include "simd.h"

namespace cairn::CAIRN_VARIANT {

// `add<R, H>(x, sum)` adds to sum[R] the products with R of a tile's H rows, x in the order of Activations: of 4 to 6 bits
// as they are stored, from 0 on, and of bytes as they are stored, code + 128, or where SIGNED_BYTES of the codes
// themselves; bytes with a TABLE are stored as places in it. `add<R, H, FROM, TO>` does so for k = 4 FROM to 4 TO alone.
#if (defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool SIGNED_BYTES = true;
#else
constexpr bool SIGNED_BYTES = false;
#endif

// Codes of a row that stand beside each other in a tile: as many as an instruction multiplies with those of one output.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr Index BESIDE = 8;
#else
constexpr Index BESIDE = 4;
#endif

#if defined(__AVX512VNNI__)

template <int BITS, Form TABLE = Form::int8>
struct Codes {
    __m512i weight[8];  // [q][16 outputs][4]: k = 4 q + j

    explicit Codes(const std::byte* at) {
        if constexpr (BITS == 6) {
            six_bits(at);
            return;
        }
        const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 8
        for (int q = 0; q < 8; q++) {
            if constexpr (values_of(TABLE) != nullptr) {
                const __m512i values = _mm512_maskz_broadcast_i32x4(
                    0xffff, _mm_load_si128(reinterpret_cast<const __m128i*>(values_of(TABLE))));
                const __m512i both = _mm512_load_si512(at + q / 2 * 64);
                weight[q] = _mm512_maskz_shuffle_epi8(
                    ~0ull, values, _mm512_and_si512(q % 2 ? _mm512_srli_epi16(both, 4) : both, low));
            } else if constexpr (BITS == 8) {
                weight[q] = _mm512_load_si512(at + q * 64);
            } else if (q % 2 == 0) {
                const __m512i both = _mm512_load_si512(at + q * 32);
                weight[q] = _mm512_and_si512(both, low);
                weight[q + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            }
        }
        if constexpr (BITS == 5) {
            const __m512i above = _mm512_load_si512(at + 256), mask = _mm512_set1_epi8(16);
#pragma GCC unroll 8
            for (int q = 0; q < 8; q++) {
                const __m512i bit = q < 4 ? _mm512_slli_epi16(above, 4 - q) : _mm512_srli_epi16(above, q - 4);
                weight[q] = either(weight[q], bit, mask);
            }
        }
    }

  private:
    // a | b & mask
    static __m512i either(__m512i a, __m512i b, __m512i mask) { return _mm512_ternarylogic_epi32(a, b, mask, 0xf8); }

    void six_bits(const std::byte* at) {
        const __m512i low = _mm512_set1_epi8(63);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m512i line[3];
#pragma GCC unroll 3
            for (int i = 0; i < 3; i++) {
                line[i] = _mm512_load_si512(at + half * 192 + i * 64);
                weight[half * 4 + i] = _mm512_and_si512(line[i], low);
            }
            __m512i rest = _mm512_and_si512(_mm512_srli_epi16(line[0], 6), _mm512_set1_epi8(3));
            rest = either(rest, _mm512_srli_epi16(line[1], 4), _mm512_set1_epi8(12));
            weight[half * 4 + 3] = either(rest, _mm512_srli_epi16(line[2], 2), _mm512_set1_epi8(48));
        }
    }

  public:
    template <int R, int H, int FROM = 0, int TO = 8>
    void add(const std::int8_t* x, IntVec (&sum)[R]) const {
#pragma GCC unroll 8
        for (int q = FROM; q < TO; q++) {
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const auto* four = reinterpret_cast<const std::int32_t*>(x + (q * H + r) * 4);
                // The intrinsic makes GCC 12 move sums between registers and spill them.
                asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum[r].part[0]) : "v"(weight[q]), "m"(*four));
            }
        }
    }
};

#elif defined(__AVX2__)

// Steps are written as instructions: left to itself GCC 12 brings all of x up first, and spills it and the sums.
template <int BITS, Form TABLE = Form::int8>
struct Codes {
    const std::byte* at;

    explicit Codes(const std::byte* from) : at(from) {}

    template <int R, int H, int FROM = 0, int TO = 8>
    void add(const std::int8_t* x, IntVec (&sum)[R]) const {
#if defined(__AVXVNNI__)
        add_fours<R, H, FROM, TO>(x, sum);
#else
        if constexpr (BITS == 8)
            add_bytes<R, H, FROM, TO>(x, sum);
        else if constexpr (BITS == 6)  // two halves' sums would not fit into registers
            add_narrow<R, H, FROM, TO, 1>(0, x, sum), add_narrow<R, H, FROM, TO, 1>(1, x, sum);
        else
            add_narrow<R, H, FROM, TO, 2>(0, x, sum);
#endif
    }

  private:
    __m256i line(Index offset, int half) const {
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(at + offset + half * 32));
    }

    // Codes of k = 4 q + j, of 8 outputs.
    __m256i codes(int q, int half) const {
        constexpr bool PLACES = values_of(TABLE) != nullptr;
        if constexpr (BITS == 8 && !PLACES) return line(q * 64, half);
        if constexpr (BITS < 6 || PLACES) {
            const __m256i nibbles =
                _mm256_and_si256(_mm256_srli_epi16(line(q / 2 * 64, half), q % 2 * 4), _mm256_set1_epi8(15));
            if constexpr (BITS == 4) return nibbles;
            if constexpr (PLACES) {
                const auto* values = reinterpret_cast<const __m128i*>(values_of(TABLE));
                return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(values)), nibbles);
            }
            const __m256i bit = _mm256_and_si256(_mm256_srli_epi16(line(256, half), q), _mm256_set1_epi8(1));
            return _mm256_or_si256(nibbles, _mm256_slli_epi16(bit, 4));
        }
        const Index from = q / 4 * 192;
        if (q % 4 < 3) return _mm256_and_si256(line(from + q % 4 * 64, half), _mm256_set1_epi8(63));
        __m256i rest = _mm256_and_si256(_mm256_srli_epi16(line(from, half), 6), _mm256_set1_epi8(3));
        for (int i = 1; i < 3; i++) {
            const __m256i two = _mm256_srli_epi16(line(from + i * 64, half), 6 - 2 * i);
            rest = _mm256_or_si256(rest, _mm256_and_si256(two, _mm256_set1_epi8(static_cast<char>(3 << (2 * i)))));
        }
        return rest;
    }

#if defined(__AVXVNNI__)
    template <int R, int H, int FROM, int TO>
    void add_fours(const std::int8_t* x, IntVec (&sum)[R]) const {
#pragma GCC unroll 8
        for (int q = FROM; q < TO; q++) {
            const __m256i low = codes(q, 0), high = codes(q, 1);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const auto* four = reinterpret_cast<const std::int32_t*>(x + (q * H + r) * 4);
                __m256i all;
                asm("vpbroadcastd %5, %2\n\t%{vex%} vpdpbusd %2, %3, %0\n\t%{vex%} vpdpbusd %2, %4, %1"
                    : "+x"(sum[r].part[0]), "+x"(sum[r].part[1]), "=&x"(all)
                    : "x"(low), "x"(high), "m"(*four));
            }
        }
    }
#else
    // Sums of products stay within 16 bits for a while: 8 times two of at most 15 * 127, four times two of 31 * 127 for
    // 5 bits, two times two of 63 * 127 for 6. HALVES of the 16 outputs share what is read of x.
    template <int R, int H, int FROM, int TO, int HALVES>
    void add_narrow(int half, const std::int8_t* x, IntVec (&sum)[R]) const {
        constexpr int NEXT = FROM + (BITS == 4 ? 8 : BITS == 5 ? 4 : 2);
        static_assert(NEXT <= TO);
        __m256i narrow[HALVES][R];
#pragma GCC unroll 8
        for (int q = FROM; q < NEXT; q++) {
            __m256i code[HALVES];
            for (int i = 0; i < HALVES; i++) code[i] = codes(q, half + i);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const auto* four = reinterpret_cast<const std::int32_t*>(x + (q * H + r) * 4);
                __m256i all, two;
                asm("vpbroadcastd %1, %0" : "=x"(all) : "m"(*four));
#pragma GCC unroll 2
                for (int i = 0; i < HALVES; i++) {
                    if (q == FROM)
                        asm("vpmaddubsw %1, %2, %0" : "=x"(narrow[i][r]) : "x"(all), "x"(code[i]));
                    else
                        asm("vpmaddubsw %2, %3, %1\n\tvpaddw %1, %0, %0"
                            : "+x"(narrow[i][r]), "=&x"(two)
                            : "x"(all), "x"(code[i]));
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
            for (int i = 0; i < HALVES; i++)
                sum[r].part[half + i] += (IntPart)_mm256_madd_epi16(narrow[i][r], _mm256_set1_epi16(1));
        if constexpr (NEXT < TO) add_narrow<R, H, NEXT, TO, HALVES>(half, x, sum);
    }

    // |code| <= 128 and |x| <= 127, so two products stay within 16 bits; the sign goes to x.
    template <int R, int H, int FROM, int TO>
    void add_bytes(const std::int8_t* x, IntVec (&sum)[R]) const {
        const __m256i flip = _mm256_set1_epi8(-128), one = _mm256_set1_epi16(1);
#pragma GCC unroll 8
        for (int q = FROM; q < TO; q++) {
            __m256i code[2], size[2];
            for (int half = 0; half < 2; half++) {
                code[half] = _mm256_xor_si256(codes(q, half), flip);
                size[half] = _mm256_abs_epi8(code[half]);
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const auto* four = reinterpret_cast<const std::int32_t*>(x + (q * H + r) * 4);
                __m256i all, two;
                asm("vpbroadcastd %1, %0" : "=x"(all) : "m"(*four));
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++)
                    asm("vpsignb %2, %5, %1\n\tvpmaddubsw %1, %3, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
                        : "+x"(sum[r].part[half]), "=&x"(two)
                        : "x"(code[half]), "x"(size[half]), "x"(one), "x"(all));
            }
        }
    }
#endif
};

#elif defined(__ARM_FEATURE_DOTPROD)

// Weights are at most 8 bits with their sign, as the codes of a row are: `sdot` takes both.
template <int BITS, Form TABLE = Form::int8>
struct Codes {
    const std::uint8_t* at;

    explicit Codes(const std::byte* from) : at(reinterpret_cast<const std::uint8_t*>(from)) {}

#if defined(__ARM_FEATURE_MATMUL_INT8)
    // Matrices of 2 by 8: two rows with two outputs. Eight outputs are finished before the next, so that registers hold
    // the sums of eight rows.
    template <int R, int H, int FROM = 0, int TO = 8>
    void add(const std::int8_t* x, IntVec (&sum)[R]) const {
        static_assert(FROM % 2 == 0 && TO % 2 == 0);
#pragma GCC unroll 2
        for (int half = 0; half < PARTS; half += 2) {
            int32x4_t squares[R / 2 + 1][4] = {};
#pragma GCC unroll 4
            for (int q = FROM; q < TO; q += 2) {
                int8x16_t two[4];
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    const int32x4_t first = vreinterpretq_s32_s8(codes(q, half + i)),
                                    second = vreinterpretq_s32_s8(codes(q + 1, half + i));
                    two[2 * i] = vreinterpretq_s8_s32(vzip1q_s32(first, second));
                    two[2 * i + 1] = vreinterpretq_s8_s32(vzip2q_s32(first, second));
                }
                const std::int8_t* eights = x + q * 4 * H;
#pragma GCC unroll 4
                for (int pair = 0; pair < R / 2; pair++) {
                    const int8x16_t rows = vld1q_s8(eights + pair * 16);
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) squares[pair][i] = vmmlaq_s32(squares[pair][i], rows, two[i]);
                }
                if constexpr (R % 2) {
                    const int8x8_t one = vld1_s8(eights + (R - 1) * 8);
                    const int8x16_t rows = vcombine_s8(one, one);
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) squares[R / 2][i] = vmmlaq_s32(squares[R / 2][i], rows, two[i]);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    const int64x2_t low = vreinterpretq_s64_s32(squares[r / 2][2 * i]),
                                    high = vreinterpretq_s64_s32(squares[r / 2][2 * i + 1]);
                    sum[r].part[half + i] +=
                        (IntPart)vreinterpretq_s32_s64(r % 2 ? vzip2q_s64(low, high) : vzip1q_s64(low, high));
                }
        }
    }
#else
    template <int R, int H, int FROM = 0, int TO = 8>
    void add(const std::int8_t* x, IntVec (&sum)[R]) const {
#pragma GCC unroll 8
        for (int q = FROM; q < TO; q++) {
            int8x16_t weight[PARTS];
#pragma GCC unroll 4
            for (int i = 0; i < PARTS; i++) weight[i] = codes(q, i);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const auto* four = reinterpret_cast<const std::int32_t*>(x + (q * H + r) * 4);
                const int8x16_t all = vreinterpretq_s8_s32(vld1q_dup_s32(four));
#pragma GCC unroll 4
                for (int i = 0; i < PARTS; i++)
                    sum[r].part[i] = (IntPart)vdotq_s32((int32x4_t)sum[r].part[i], weight[i], all);
            }
        }
    }
#endif

  private:
    uint8x16_t line(Index offset, int part) const { return vld1q_u8(at + offset + part * 16); }

    // Codes of k = 4 q + j, of outputs 4 part to 4 part + 3.
    int8x16_t codes(int q, int part) const {
        constexpr bool PLACES = values_of(TABLE) != nullptr;
        uint8x16_t found;
        if constexpr (BITS == 8 && !PLACES) {
            found = line(q * 64, part);
        } else if constexpr (BITS == 6) {
            found = six_bits(q / 4 * 192, q % 4, part);
        } else {
            const uint8x16_t both = line(q / 2 * 64, part);
            found = q % 2 ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
            if constexpr (PLACES) found = vqtbl1q_u8(vld1q_u8(values_of(TABLE)), found);
            if constexpr (BITS == 5) {
                const uint8x16_t bit = vshlq_u8(line(256, part), vdupq_n_s8(static_cast<std::int8_t>(4 - q)));
                found = vorrq_u8(found, vandq_u8(bit, vdupq_n_u8(16)));
            }
        }
        if constexpr (BITS == 8) found = veorq_u8(found, vdupq_n_u8(128));
        return vreinterpretq_s8_u8(found);
    }
    uint8x16_t six_bits(Index from, int q, int part) const {
        if (q < 3) return vandq_u8(line(from + q * 64, part), vdupq_n_u8(63));
        const uint8x16_t low = vshrq_n_u8(line(from, part), 6), middle = vshrq_n_u8(line(from + 64, part), 6),
                         high = vshrq_n_u8(line(from + 128, part), 6);
        return vorrq_u8(low, vorrq_u8(vshlq_n_u8(middle, 2), vshlq_n_u8(high, 4)));
    }
};

#else

// In floats, which hold these integers exactly: sums stay below 32 * 255 * 127.
template <int BITS, Form TABLE = Form::int8>
struct Codes {
    float weight[GROUP][LANES];

    explicit Codes(const std::byte* from) {
        const auto* at = reinterpret_cast<const std::uint8_t*>(from);
        constexpr const std::uint8_t* VALUES = values_of(TABLE);
        for (Index k = 0; k < GROUP; k++)
            for (Index n = 0; n < LANES; n++)
                weight[k][n] = VALUES ? VALUES[block_code(from, 4, n, k)] : BITS == 8 ? at[k / 4 * 64 + n * 4 + k % 4] : block_code(from, BITS, n, k);
    }
    template <int R, int H, int FROM = 0, int TO = 8>
    void add(const std::int8_t* x, IntVec (&sum)[R]) const {
        Vec exact[R] = {};
        for (Index k = 4 * FROM; k < 4 * TO; k++) {
            const Vec column = load(weight[k]);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) exact[r] = fma(set(x[(k / 4 * H + r) * 4 + k % 4]), column, exact[r]);
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < PARTS; i++) sum[r].part[i] += __builtin_convertvector(exact[r].part[i], IntPart);
    }
};

#endif

}  // namespace cairn::CAIRN_VARIANT
