// What a program (compiled once) and the kernels (compiled once for each instruction set) know of each other.
//
// Functions take raw views with explicit shapes; strides count elements. Nothing here allocates or throws. What is
// computed for one token depends on that token and its row's KV alone, bit for bit: every sum is one chain in the
// order of its inner index, or a fixed tree over the 16 lanes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cairn {

using Index = std::ptrdiff_t;

constexpr Index LANES = 16;         // outputs of a panel; numbers of a vector
constexpr Index BLOCK_TOKENS = 16;  // positions of a KV block
constexpr Index SPAN = 64;          // positions of one softmax step, aligned at multiples of SPAN

enum class Dtype : int { f32, f16, bf16 };
enum class Activation : int { silu, gelu_tanh };

// A packed matrix: panels of 16 outputs, each streamed along the inner index k.
//   f32   [inner][16] floats
//   f16   [inner][16] halves
//   bf16  [inner / 2, rounded up][16][2]: k even in the low half of a 32-bit lane, k odd in the high half
struct MatrixView {
    const std::byte* panels;
    const float* bias;  // padded to whole panels, or null
    Dtype dtype;
    Index inner, out;

    Index panel_count() const { return (out + LANES - 1) / LANES; }
    Index panel_bytes() const {
        return dtype == Dtype::f32   ? inner * LANES * 4
               : dtype == Dtype::f16 ? inner * LANES * 2
                                     : (inner + 1) / 2 * LANES * 4;
    }
};

// out[rows, matrix.out] = (or +=) x[rows, matrix.inner] @ matrix + bias
struct Product {
    MatrixView matrix;
    const float* x;
    Index x_stride, rows;
    float* out;
    Index out_stride;
    bool add;
};

// KV of one group: blocks of [layers][2][heads][16 * size] floats; keys of a block and head are [size][16], values
// [16][size], so that both products of attention stream panels of 16.
struct Pages {
    float* base;
    Index layers, layer, heads, size;

    Index page() const { return BLOCK_TOKENS * size; }
    float* keys(Index block, Index head) const {
        return base + (((block * layers + layer) * 2) * heads + head) * page();
    }
    float* values(Index block, Index head) const { return keys(block, head) + heads * page(); }
};

// Splits, norms, rotates and stores one token: see `rope_write` in kernels/base.py.
struct RopeWrite {
    const float *qkv, *angles, *q_norm, *k_norm;
    float eps;
    Pages kv;
    const std::int32_t* slots;
    float* query;
    Index heads;
};

// Queries of one row that are computed together, for one key-value head.
struct Attend {
    const float* query;  // [tokens, heads, size]
    Pages kv;
    const std::int32_t* table;  // the row's blocks
    Index window, heads;
    float scale;
    float* out;  // [tokens, heads * size]
    Index first, count, position;  // first token in the step, tokens, position of the first
    Index kv_head;
    float* scratch;  // attend_scratch() floats
};

struct Variant {
    const char* name;
    void (*product)(const Product&, Index first_panel, Index last_panel);
    void (*norm)(const float* x, const float* weight, Index size, float eps, float* out);
    void (*gate)(const float* gate, const float* up, Index size, Activation activation, float* out);
    void (*embed)(const void* row, Dtype dtype, Index size, float* out);
    void (*rope_write)(const RopeWrite&, Index token);
    void (*attend)(const Attend&);
    // For the roofline: see probe.h. `chains` of 16 multiply-adds make one turn.
    float (*read_all)(const float* from, Index count);
    float (*multiply_add)(Index turns, float factor);
    Index chains;
};

constexpr Index padded(Index count) { return (count + LANES - 1) / LANES * LANES; }

// Query rows that one attention task takes at most: about 24, in whole tokens.
constexpr Index attend_tokens(Index fan) { return fan >= 24 ? 1 : 24 / fan; }
constexpr Index attend_scratch(Index fan, Index size) {
    return attend_tokens(fan) * fan * (size + padded(size) + SPAN + 4);
}

}  // namespace cairn
