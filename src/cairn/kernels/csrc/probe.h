// What this machine can do at most: bytes read and multiply-adds in a second. Nothing of a model is computed here.
#pragma once

#include "simd.h"

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

}  // namespace cairn::CAIRN_VARIANT
