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
constexpr Index GROUP = 32;         // inner indices that share a scale where weights are quantised
constexpr Index SUPER = 256;        // inner indices of a super-block, whose groups' scales are whole numbers
constexpr Index BLOCK_TOKENS = 16;  // positions of a KV block
constexpr Index MAX_HEAD = 1024;    // numbers of a head at most
constexpr Index SPAN = 64;          // positions of one softmax step, aligned at multiples of SPAN
constexpr Index SEGMENT = 1024;     // positions whose softmax is computed by itself, aligned likewise

enum class Dtype : int { f32, f16, bf16, q8 };  // q8: KV alone
enum class Activation : int { silu, gelu_tanh, gelu, tanh, clamped_silu, relu2 };

// How a part of a matrix is stored; see Segment.
enum class Form : int {
    f32, f16, bf16, int4, int8, q4_k, q5_k, q6_k, fp4, iq4, iq4_xs, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s
};

// What the codes of fp4, and of iq4 and iq4_xs, stand for, 128 higher: those of MXFP4, doubled, and those of IQ4_NL and IQ4_XS.
constexpr Index CODEBOOK = 16;
alignas(16) constexpr std::uint8_t FP4_VALUES[CODEBOOK] = {128, 129, 130, 131, 132, 134, 136, 140,
                                                           128, 127, 126, 125, 124, 122, 120, 116};
alignas(16) constexpr std::uint8_t IQ4_VALUES[CODEBOOK] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                           129, 141, 153, 166, 181, 197, 217, 241};
constexpr const std::uint8_t* values_of(Form form) {
    return form == Form::fp4 ? FP4_VALUES : form == Form::iq4 || form == Form::iq4_xs ? IQ4_VALUES : nullptr;
}

// Bytes of 256 weights that are named by rows of a codebook, as GGUF has them; 0 for other forms.
constexpr Index row_block_bytes(Form form) {
    switch (form) {
        case Form::iq2_xxs: return 66;
        case Form::iq2_xs: return 74;
        case Form::iq2_s: return 82;
        case Form::iq3_xxs: return 98;
        case Form::iq3_s: return 110;
        default: return 0;
    }
}

// Rows of its codebook, and whether they have eight numbers, or four.
constexpr std::size_t row_count(Form form) {
    return form == Form::iq2_s ? 1024 : form == Form::iq2_xs || form == Form::iq3_s ? 512 : 256;
}
constexpr bool in_eights(Form form) { return form != Form::iq3_xxs && form != Form::iq3_s; }

// The rows of a form's codebook, four or eight magnitudes each, by their numbers. A codebook has three or eight different
// magnitudes, so 16 bits hold a row's places in the list of them: four half bytes, the lower two in the low halves of the
// first and the second byte. A half byte is the place of number j of four; of eight it is that of number j and above it
// that of number j + 4. `low` and `high` have the magnitudes of both by half bytes, 128 higher.
struct alignas(64) Codebook {
    std::uint8_t rows[1024 * 8];
    std::uint16_t places[1024];
    std::uint8_t low[16], high[16];
};

// Outputs of a packed matrix that are stored alike, in panels of 16, each streamed along the inner index k.
//   f32   [inner][16] floats
//   f16   [inner][16] halves
//   bf16  [inner / 2, rounded up][16][2]: k even in the low half of a 32-bit lane, k odd in the high half
//   int4, int8  two groups of 32 k beside each other, the second unused where their number is odd:
//         [2][codes of a group], [2][16] scales, [2][16] minima where there are any; both in floats or in halves
//         codes of int4: [4][16][4], k = 8 p + j in the low half of a byte, k = 8 p + 4 + j in the high half
//         codes of int8: [8][16][4], k = 4 q + j, each 128 higher than the code is
//   fp4, iq4  like int4; what a code of int8 is stands in a table: see values_of
//   iq4_xs  first each super-block's [16] scales in halves and its 128 whole numbers: [8][16] scales, each 32 higher than it
//         is, the first 96 in the low six bits of 96 bytes, the other 32 in what these leave; then the codes, those of iq4
//   iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s  [inner / 256][bytes of a block][16]: the bytes are those of GGUF's blocks
//   q4_k, q5_k, q6_k  first each super-block's [16] scales and, but for q6_k, [16] minima in halves, padded to a line;
//         then each super-block's whole numbers, and the codes of its 8 groups
//         whole numbers of q4_k and q5_k: [8][16] scales and [8][16] minima from 0 to 63, the first 192 in the low six
//         bits of 192 bytes, the other 64 in what these leave: lowest bits in the first 64 bytes, then the next two
//         whole numbers of q6_k: [16][16] scales of half groups, int8
//         codes of q4_k: those of int4; of q5_k these and [16][4] bytes with bit q the fifth of k = 4 q + j
//         codes of q6_k: [2][3][16][4], the low six bits k = 16 p + 4 i + j for i below 3; i = 3 in what these leave, its
//         lowest two bits in the first line
struct Segment {
    const std::byte* panels;
    const float* bias;  // padded to whole panels, or null
    Form form;
    bool half, minimum;  // of quantised forms: scales are halves; there are minima
    Index inner, out;
    Index column;  // its first output in the matrix
    const Codebook* codebook = nullptr;  // of forms that have one

    Index panel_count() const { return (out + LANES - 1) / LANES; }
    bool quantised() const { return in_nibbles() || form == Form::int8 || in_blocks() || in_rows(); }
    bool in_nibbles() const { return form == Form::int4 || form == Form::fp4 || form == Form::iq4; }
    bool in_blocks() const {
        return form == Form::q4_k || form == Form::q5_k || form == Form::q6_k || form == Form::iq4_xs;
    }
    bool in_rows() const { return row_block_bytes(form) > 0; }
    // Bytes of two groups, and of one output's codes of a group.
    Index unit_bytes() const {
        return 2 * (group_codes() + (half ? 2 : 4) * (minimum ? 2 : 1)) * LANES;
    }
    Index group_codes() const { return in_nibbles() ? 16 : 32; }
    // Of super-blocks: bits of a code, bytes of a group's codes, of the whole numbers of one, and of what stands first.
    Index bits() const { return form == Form::q6_k ? 6 : form == Form::q5_k ? 5 : 4; }
    Index code_bytes() const { return bits() * GROUP * LANES / 8; }
    Index whole_bytes() const { return form == Form::q6_k ? 256 : form == Form::iq4_xs ? 0 : 192; }
    Index block_bytes() const { return whole_bytes() + SUPER / GROUP * code_bytes(); }
    Index front_bytes() const {
        const Index each = form == Form::iq4_xs ? 128 : (minimum ? 2 : 1) * LANES * 2;
        return (inner / SUPER * each + 63) / 64 * 64;
    }
    Index panel_bytes() const {
        return form == Form::f32    ? inner * LANES * 4
               : form == Form::f16  ? inner * LANES * 2
               : form == Form::bf16 ? (inner + 1) / 2 * LANES * 4
               : in_rows()          ? inner / SUPER * LANES * row_block_bytes(form)
               : in_blocks()        ? front_bytes() + inner / SUPER * block_bytes()
                                    : (inner / GROUP + 1) / 2 * unit_bytes();
    }
};

// Code k of a group of super-blocks, of output `lane` of 16.
inline int block_code(const std::byte* group, Index bits, Index lane, Index k) {
    const Index at = lane * 4 + k % 4, q = k / 4;
    const auto byte = [&](Index offset) { return static_cast<int>(group[offset + at]); };
    if (bits == 6) {
        const Index half = q / 4 * 192;
        if (q % 4 < 3) return byte(half + q % 4 * 64) & 63;
        return byte(half) >> 6 | byte(half + 64) >> 6 << 2 | byte(half + 128) >> 6 << 4;
    }
    const int low = byte(q / 2 * 64) >> (q % 2 * 4) & 15;
    return bits == 4 ? low : low | (byte(256) >> q & 1) << 4;
}

// COUNT whole numbers below 64 of a super-block: of q4_k and q5_k [8][16] scales, then [8][16] minima; of iq4_xs scales.
template <Index COUNT = 256>
[[gnu::always_inline]] inline void whole_numbers(const std::byte* from, std::uint8_t* to) {
    constexpr Index LOW = COUNT / 4 * 3, PART = COUNT / 4;
    const auto* at = reinterpret_cast<const std::uint8_t*>(from);
    for (Index i = 0; i < LOW; i++) to[i] = at[i] & 63;
    for (Index i = 0; i < PART; i++)
        to[LOW + i] = static_cast<std::uint8_t>(at[i] >> 6 | at[PART + i] >> 6 << 2 | at[2 * PART + i] >> 6 << 4);
}

// What blocks of 16 outputs stand for that name rows of a codebook: codes [8 groups][8][16][4] as of int8, whole numbers
// [8 groups][2 halves][16], the second only where `in_halves`, and [16] floats in 16 bits. A scale is `row_step` times that
// float times the whole number.
struct alignas(64) RowBlock {
    std::byte codes[SUPER * LANES];
    std::uint8_t whole[SUPER / GROUP * 2 * LANES];
    std::uint16_t scale[LANES];
};
constexpr bool in_halves(Form form) { return form == Form::iq2_xs || form == Form::iq2_s; }
constexpr float row_step(Form form) {
    return form == Form::iq3_s ? 1.0f : form == Form::iq3_xxs ? 0.25f : 0.125f;
}

// A packed matrix: its parts, whose outputs are concatenated in order.
struct MatrixView {
    const Segment* parts;
    Index count;
    Index inner, out;
    const Index* ends;  // of the matrices that it was packed of, in outputs
    Index matrices;
    // Of a matrix whose panels are mapped from a file, all of them; null for others.
    const std::byte* mapped = nullptr;
    std::size_t mapped_bytes = 0;

    // Panels of all parts, numbered through.
    Index panel_count() const {
        Index sum = 0;
        for (Index i = 0; i < count; i++) sum += parts[i].panel_count();
        return sum;
    }
    template <class F>
    bool any(F&& is) const {
        for (Index i = 0; i < count; i++)
            if (is(parts[i])) return true;
        return false;
    }
};

// Bytes in whole cache lines.
constexpr Index lines(Index bytes) { return (bytes + 63) / 64 * 64; }

// Rows are cut into as few tiles as hold them, of nearly equal height, the higher ones first.
struct Tiles {
    Index count, low, higher;

    Tiles(Index rows, Index most) : count((rows + most - 1) / most), low(rows / count), higher(rows % count) {}
    Index height(Index tile) const { return low + (tile < higher); }
    Index first(Index tile) const { return tile * low + (tile < higher ? tile : higher); }
    Index of(Index row) const {
        const Index split = higher * (low + 1);
        return row < split ? row / (low + 1) : higher + (row - split) / low;
    }
};

// A group of a tile of R activation rows that are rounded to codes of 8 bits, in the order in which it is multiplied:
//   int8 [8][R][4]: k = 4 q + j; or [4][R][8], see BESIDE in dot.h
//   float [R] scales
//   int32 [R]: -8 * sum of the row's codes, which takes 8 from each weight
//   int32 [R]: -128 * sum
//   float [R]: scale * sum, which a minimum is multiplied by
//   int32 [2][R]: -32 * sum of the first half of the codes, and of the second
// A tile's groups follow each other; see kernels/quantized.py for the rounding.
constexpr Index ROW_GROUP_BYTES = 56;

// Rows that a matrix is multiplied with: float32, and rounded once for all outputs where parts of it want that, in tiles
// of at most Variant::pair_rows or group_rows. A tile begins at its first row's share of the bytes.
struct Activations {
    const float* x;
    Index stride, rows, inner;
    std::byte* pairs;   // [inner / 2, rounded up][R] pairs of bfloat16, the even one low; or null
    std::byte* groups;  // or null

    static Index pair_bytes(Index inner) { return (inner + 1) / 2 * 4; }
    static Index group_bytes(Index inner) { return inner / GROUP * ROW_GROUP_BYTES; }
};

// Neighbouring rows, and neighbouring inner indices of them: from a multiple of GROUP to another or to the end.
struct Patch {
    Index row, rows, from, to;
};

// out[rows, matrix.out] = (or +=) x[rows, matrix.inner] @ matrix + bias
struct Product {
    MatrixView matrix;
    Activations in;
    float* out;
    Index out_stride;
    bool add;
};

// KV of one group: blocks of [layers][2][heads][16 * size] numbers, laid out so that both products of attention stream
// panels of 16:
//   f32, f16  keys of a block and head [size][16], values [16][size]
//   bf16      keys [size / 2][16][2], values [8][size][2]: pairs along the inner index, as in MatrixView
//   q8        first [16] floats, the scales of the positions; then keys [size / 4][16][4], values [4][size][4], as kv_q8.h
//             has the codes of a lane
struct Pages {
    std::byte* base;
    Dtype dtype;
    Index layers, layer, heads, size;

    Index page_bytes() const {
        return BLOCK_TOKENS * (dtype == Dtype::q8 ? size + 4 : size * (dtype == Dtype::f32 ? 4 : 2));
    }
    std::byte* keys(Index block, Index head) const {
        return base + (((block * layers + layer) * 2) * heads + head) * page_bytes();
    }
    std::byte* values(Index block, Index head) const { return keys(block, head) + heads * page_bytes(); }
};

// Splits, norms, rotates and stores a token's query heads of one key-value head, and that: see `rope_write` in
// kernels/base.py.
struct RopeWrite {
    const float *qkv, *angles, *q_norm, *k_norm;
    float eps;
    Pages kv;
    const std::int32_t* slots;
    float* query;
    Index heads;
    Index turned;           // numbers of a head that are turned, from the first on
    bool q_whole, k_whole;  // whether a norm is over all heads together
    bool late;              // whether norms come after turning
    bool gated;             // whether a gate stands behind each query head
};

constexpr Index MOST_REACH = 16;  // tokens that a convolution sees at most

// The convolution of one token: inputs, the oldest first, each times another where there is one; null ones are zero.
struct Convolve {
    const float *seen[MOST_REACH], *times[MOST_REACH];
    const float *weight, *bias;  // [reach, channels], [channels]; a null bias is none
    const float* gate;           // what the sum is multiplied by; or null
    Index reach, channels;
    bool silu;
    float* out;
};

// One token of one head: to[keys, values] = decay * from + key (x) change, out = query @ to + skip * value, where change
// is share * value. A corrected one is share * (value - decay * key @ from), with key and query divided by their lengths,
// and query by the root of its size. `to` may be `from`.
struct ScanStep {
    const float *key, *query, *value;
    float decay, share, skip;
    bool corrected;
    Index keys, values;
    const float* from;
    float *to, *out;
};

// Queries of one row that are computed together, for one key-value head.
struct Attend {
    const float* query;  // [tokens, heads, size]
    Pages kv;
    const std::int32_t* table;  // the row's blocks
    Index window, heads;
    float scale, softcap;  // a softcap of 0 is none
    const float* sinks;  // [heads]: a score of each head that takes a share and gives no value; or null
    float* out;  // [tokens, heads * size]
    Index first, count, position;  // first token in the step, tokens, position of the first
    bool both;     // whether a query sees what comes after it, too: as far as a window of the same size, to the row's end
    Index length;  // positions of the row
    Index kv_head;
    float* scratch;  // attend_scratch() floats
    // Blocks of which keys and values of `next_head` are asked for at the end: the first that the next task reads.
    const std::int32_t* next;
    Index next_count, next_head;

    // The first position that one at `at` sees.
    Index low(Index at) const {
        if (window < 0) return at - at % -window;  // positions in pieces of that size, each for itself
        return window && at >= window ? at - window + 1 : 0;
    }
    // Behind the last position that it sees.
    Index high(Index at) const { return !both ? at + 1 : window && at + window < length ? at + window : length; }
};

// Norms and turns a token's latent and stores it: see `latent_write` in kernels/base.py. Of its pages, one row a token.
struct LatentWrite {
    const float *x, *angles, *norm;
    float eps;
    Pages kv;
    const std::int32_t* slots;
    Index turned;
    bool neighbours;
};

// `attend.kv.heads` counts groups of query heads that are computed together, of which `attend.kv_head` is one.
struct LatentAttend {
    Attend attend;
    Index rank;  // numbers of a row that are its value
};

struct Passes;  // sampler.h

struct Variant {
    const char* name;
    // Panels are those of all parts, numbered through.
    void (*product)(const Product&, Index first_panel, Index last_panel);
    // Rows of a tile at most, of `rows` in all; null where parts in bfloat16 multiply float32.
    Index (*pair_rows)(Index rows);
    Index group_rows;
    void (*prepare)(const Activations&, const Patch&);  // rounds them
    // Numbers `from` to `to` of a row that is normed, from a multiple of 16.
    void (*norm)(const float* x, const float* weight, Index size, float eps, Index from, Index to, float* out);
    // A null bias is none.
    void (*layer_norm)(const float* x, const float* weight, const float* bias, Index size, float eps, float* out);
    void (*activate)(const float* x, Index size, Activation activation, float* out);
    void (*gate)(const float* gate, const float* up, Index size, Activation activation, float* out);
    void (*softcap)(float* x, Index size, float cap);
    void (*embed)(const void* row, Dtype dtype, Index size, float* out);
    // Sixteen outputs' blocks that name rows of a codebook.
    void (*decode_block)(Form form, const std::byte* block, const Codebook& rows, RowBlock& to);
    void (*rope_write)(const RopeWrite&, Index token, Index kv_head);
    void (*attend)(const Attend&);
    void (*convolve)(const Convolve&);
    void (*scan)(const ScanStep&);
    void (*gated_norm)(const float* x, const float* gate, const float* weight, Index size, float eps, bool gate_first,
                       float* out);
    void (*gate_row)(const float* gate, Index size, float* out);
    void (*latent_write)(const LatentWrite&, Index token);
    void (*turn_pairs)(const float* x, const float* cos, const float* sin, Index size, bool neighbours, float* out);
    void (*latent_attend)(const LatentAttend&);
    // For the roofline: see probe.h. `chains` of 16 multiply-adds, or so many products, make one turn.
    float (*read_all)(const float* from, Index count);
    float (*multiply_add)(Index turns, float factor);
    Index chains;
    float (*multiply_bytes)(Index turns, int fill);
    Index byte_products;
    float (*multiply_pairs)(Index turns, int fill);
    Index pair_products;
    const Passes* passes;  // over the vocabulary
};

constexpr Index padded(Index count) { return (count + LANES - 1) / LANES * LANES; }

// Query rows that one attention task takes at most: about 48, in whole tokens.
constexpr Index attend_tokens(Index fan) { return fan >= 48 ? 1 : 48 / fan; }
constexpr Index attend_scratch(Index fan, Index size) {
    return attend_tokens(fan) * fan * (size + 2 * padded(size) + SPAN + LANES + 8) + 2 * size;
}

}  // namespace cairn
