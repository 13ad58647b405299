// Layers that keep a state: a short convolution and a scan, token by token.
#pragma once

#include "program.h"

namespace cairn {

// The states of one layer: [blocks][layers][numbers] floats, and which block a row reads and writes. A block of a row's
// table has the state after the last computed token of its positions; see `convolve` in kernels/base.py.
struct States {
    float* base;
    Index layers, layer, numbers;
    const std::int32_t* rows;    // as in kernels/base.py
    const std::int32_t* tables;  // [rows][width]
    Index width;

    float* at(std::int32_t block) const { return base + (block * layers + layer) * numbers; }
    Index first(Index row) const { return rows[3 * row]; }
    Index count(Index row) const { return rows[3 * row + 1]; }
    Index start(Index row) const { return rows[3 * row + 2]; }
    // What the row begins with; null for zeros.
    const float* before(Index row) const {
        const Index from = start(row);
        return from ? at(tables[row * width + (from - 1) / BLOCK_TOKENS]) : nullptr;
    }
    // Where the state after token `i` of the row is kept; null where it is not.
    float* after(Index row, Index i) const {
        const Index end = start(row) + i + 1;
        if (end % BLOCK_TOKENS && i + 1 < count(row)) return nullptr;
        const std::int32_t block = tables[row * width + (end - 1) / BLOCK_TOKENS];
        return block < 0 ? nullptr : at(block);
    }
};

// See `convolve` in kernels/base.py. A null bias is none.
struct Convolution {
    const float* x;
    Index width, first;  // numbers of a row of x, and where the inputs begin
    const float *weight, *bias;
    Index reach, channels;
    bool silu, gated;
    States states;
    float* out;
};

// See `delta` and `mamba2` in kernels/base.py: the latter has a skip.
struct Scan {
    const float* x;
    const float* gates;
    Index width, first;  // numbers of a row of gates, and where the scan's begin
    const float *decay, *time_bias, *skip;
    float low, high;
    Index key_heads, heads, keys, values;
    bool tiled;
    States states;
    float* out;
};

struct GatedNorm {
    const float *x, *gates;
    Index numbers, width, first;
    const float* weight;
    Index size;
    bool whole;  // whether there is a weight for each number, not for each of a size
    float eps;
    bool gate_first;
    float* out;
};

}  // namespace cairn
