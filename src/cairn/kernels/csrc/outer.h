// What products with matrices and with KV share: one step of sums in registers.
#pragma once

#include "simd.h"

namespace cairn::CAIRN_VARIANT {

// acc[R][P] += x[R] times weight[P]: one number of each row, P vectors.
template <int R, int P>
inline void add_outer(Vec (&acc)[R][P], const float* x, Index x_stride, const Vec (&weight)[P]) {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        const Vec factor = set(x[r * x_stride]);
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) acc[r][p] = fma(factor, weight[p], acc[r][p]);
    }
}

}  // namespace cairn::CAIRN_VARIANT
