// One output of a packed matrix as a row of float32: an embedding that is also the head is held once.
#pragma once

#include "kernel.h"

namespace cairn {

// Floats of scratch that `look_up` needs.
constexpr Index look_up_scratch(Index inner) { return inner + 3 * (inner / GROUP + LANES); }

// out[inner] = the weights of output `row`, without its bias; the values are those of `dequantized` in
// kernels/quantized.py. `kernels` turns 16-bit floats into float32.
void look_up(const MatrixView& matrix, Index row, const Variant& kernels, float* scratch, float* out);

}  // namespace cairn
