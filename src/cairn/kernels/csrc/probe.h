// What this machine can do at most: bytes read and multiply-adds in a second. Nothing of a model is computed here.
#pragma once

#include "dot.h"

namespace cairn::CAIRN_VARIANT {

// The sum of `count` floats, a multiple of 8 vectors, in eight chains.
inline float read_all(const float* from, Index count) {
    Vec sums[8] = {};
    for (Index i = 0; i < count; i += 8 * LANES) {
#pragma GCC unroll 8
        for (int chain = 0; chain < 8; chain++) sums[chain] = sums[chain] + load(from + i + chain * LANES);
    }
    for (int chain = 1; chain < 8; chain++) sums[0] = sums[0] + sums[chain];
    return sum(sums[0]);
}

constexpr int CHAINS = (REGISTERS == 32 ? 24 : 12) / PARTS;

// `turns` multiply-adds in each of CHAINS chains of 16 floats, held in registers.
inline float multiply_add(Index turns, float factor) {
    Vec sums[CHAINS] = {};
    const Vec a = set(factor), b = set(1.0f - factor);
    for (Index i = 0; i < turns; i++) {
#pragma GCC unroll 24
        for (int chain = 0; chain < CHAINS; chain++) sums[chain] = fma(sums[chain], a, b);
    }
    for (int chain = 1; chain < CHAINS; chain++) sums[0] = sums[0] + sums[chain];
    return sum(sums[0]);
}

constexpr int PROBE_ROWS = REGISTERS == 32 ? 8 : 4;

// `turns` times the products of a group's bytes with those of PROBE_ROWS rows, as matrices of 4 to 8 bits are multiplied.
// All of them stay in the first cache.
inline float multiply_bytes(Index turns, int fill) {
    alignas(64) std::byte codes[GROUP * LANES];
    alignas(64) std::int8_t rows[GROUP * PROBE_ROWS];
    for (auto& one : codes) one = static_cast<std::byte>(fill);
    for (auto& one : rows) one = static_cast<std::int8_t>(fill);
    IntVec sums[PROBE_ROWS] = {};
    const Codes<8> group(codes);
    for (Index i = 0; i < turns; i++) group.template add<PROBE_ROWS, PROBE_ROWS>(rows, sums);
    std::int32_t all = 0;
    for (const auto& one : sums) all ^= one.part[0][0] ^ one.part[PARTS - 1][WIDTH - 1];
    return static_cast<float>(all);
}

constexpr Index BYTE_PRODUCTS = Index{GROUP} * LANES * PROBE_ROWS;

// The same of pairs of bfloat16, where an instruction multiplies two at once; else there are no such products.
#if defined(__AVX512BF16__)
inline float multiply_pairs(Index turns, int fill) {
    __m512 sums[PROBE_ROWS] = {};
    const auto weight = (__m512bh)_mm512_set1_epi32(fill), two = (__m512bh)_mm512_set1_epi32(fill + 1);
    for (Index i = 0; i < turns; i++) {
#pragma GCC unroll 16
        for (int r = 0; r < PROBE_ROWS; r++) sums[r] = _mm512_dpbf16_ps(sums[r], weight, two);
    }
    for (int r = 1; r < PROBE_ROWS; r++) sums[0] += sums[r];
    return sums[0][0];
}
constexpr Index PAIR_PRODUCTS = Index{2} * LANES * PROBE_ROWS;
#else
inline float multiply_pairs(Index, int) { return 0; }
constexpr Index PAIR_PRODUCTS = 0;
#endif

}  // namespace cairn::CAIRN_VARIANT
