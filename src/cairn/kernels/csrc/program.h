// A forward pass as a list of calls over buffers with fixed places, run as a whole: no allocation, no Python.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "matrix.h"
#include "team.h"

namespace cairn {

// How many tokens, rows and logits rows of the buffers a step uses.
struct Sizes {
    Index tokens, rows, logits;
};


// Norm and the size of what it norms; a null weight means none.
struct Norm {
    const float* weight;
    Index size;
    float eps;
};

// What a matrix wants of its activations beside float32, and where the groups begin in the buffer.
struct Inputs {
    bool pairs, groups;
    Index groups_at;

    bool any() const { return pairs || groups; }
};

// How a router's scores choose experts: see `route` in kernels/base.py.
enum class Scores : int { softmax, sigmoid, chosen };
struct Routing {
    Scores scores;
    bool normed;
    float scale;
    Index experts, chosen, groups, chosen_groups;
};

// One adapter's side path of a matrix: x through `down`, and parts of that through `ups` to columns of the output.
struct LowRank {
    struct Up {
        Index first, column;  // of the low rank, and of the output
        MatrixView matrix;
    };
    std::int32_t slot;
    MatrixView down;
    std::vector<Up> ups;
};

// spans[B, 3] as `rows` in kernels/base.py; slots and scales [B, each]: a row's adapters, -1 for none.
struct AdaptRows {
    const std::int32_t *spans, *slots;
    const float* scales;
    Index each;
};

// Calls are added with buffers of their largest size (`most`: tokens, or logits rows for `logits`), which must outlive
// the program, as weights must. See kernels/base.py for what each computes.
struct Buckets;  // experts.h
// recurrent.h
struct Convolution;
struct Scan;
struct GatedNorm;

class Program {
  public:
    Program(const Variant& kernels, std::shared_ptr<Team> team) : kernels_(kernels), team_(std::move(team)) {}

    void embed(const void* table, Dtype dtype, Index hidden_size, const std::int32_t* tokens, float* hidden);
    void look_up(MatrixView table, const std::int32_t* tokens, float* hidden);
    void rope_angles(const float* frequencies, double factor, Index half, const std::int32_t* positions,
                     float* angles);
    void scale(float* hidden, Index size, float factor);
    void norm(const float* x, Norm norm, float* out);
    // A null bias is none.
    void layer_norm(const float* x, Norm norm, const float* bias, float* out);
    void project(const float* x, MatrixView matrix, float* out, Index most);
    void activate(const float* x, Index width, Activation activation, float* out);
    void gate(const float* gates, Index width, Activation activation, float* out);
    void add(const float* x, Index size, float* hidden);
    void norm_project(const float* hidden, Norm norm, MatrixView matrix, float* out, Index most);
    void rope_write(const RopeWrite& job);
    // `job` with everything but the table, places and scratch of one task; `rows` as in kernels/base.py.
    void attention(const Attend& job, const std::int32_t* rows, const std::int32_t* tables, Index width, Index most);
    void project_add(const float* x, MatrixView matrix, float* hidden, Index most);
    void norm_add(const float* x, Norm norm, float* hidden);
    // What it gives is added to `out` or put there.
    void gated_mlp(const float* hidden, Norm norm, MatrixView gate_up, Activation activation, MatrixView down, float* out,
                   bool added, Index most);
    void logits(const float* hidden, const std::int32_t* wanted, Norm norm, MatrixView head, float* out, Index most);
    // A null bias is none.
    void layer_logits(const float* hidden, const std::int32_t* wanted, Norm norm, const float* bias, MatrixView head,
                      float* out, Index most);

    void softcap(float* logits, Index size, float cap);
    void scale_logits(float* logits, Index size, float factor);
    void scale_queries(float* query, Index size, const std::int32_t* positions, float beta, float original, int ahead);
    void latent_write(const LatentWrite& job);
    // Queries of `wide` numbers, of which the last are turned, through their heads' keys; `kept` numbers of each.
    void latent_queries(const float* x, Index wide, const std::vector<MatrixView>& keys, const float* angles,
                        Index turned, bool neighbours, float* query, Index kept, Index most);
    // As `attention`.
    void latent_attention(const LatentAttend& job, const std::int32_t* rows, const std::int32_t* tables, Index width,
                          Index most);
    // Heads of rows of `wide` numbers, from number `from` on, in place. A null weight is 1.
    void norm_heads(float* x, Index wide, Index from, Index heads, Norm norm);
    // `apart`: the weight has numbers of each head, otherwise of one. A null bias is none.
    void layer_norm_heads(float* x, Index wide, Index from, Index heads, Norm norm, bool apart, const float* bias);
    void turn_heads(const float* x, Index heads, Index size, const float* angles, Index turned, float* out);
    // `out` may be `x`.
    void xielu(const float* x, Index size, const float* positive, const float* negative, float* out);
    void scale_by(float* hidden, Index size, const float* factor);
    // activation(x) times `size` numbers of rows of `wide`.
    void gate_with(const float* x, Index size, Activation activation, const float* by, Index wide, Index from,
                   float* out);
    // Streams x[M, count, size] of a hidden state, in streams.cpp.
    void mix_streams(const float* x, Index count, Index size, const float* parts, float* out);
    void correct_streams(const float* given, const float* parts, Index count, Index size, Index active, float* x);
    void take_stream(const float* x, Index count, Index size, Index place, float* out);
    void put_stream(const float* x, Index count, Index size, Index place, float* out);
    void add_streams(const float* x, Index count, Index size, Index first, float* out);
    void match_magnitude(const float* like, Index size, float* x);
    // The first half of gates[M, 2 width].
    void sparsify(float* gates, Index width, float factor);
    void scale_columns(const float* x, Index size, const float* weight, float* out);
    // Each head's x, of `wide` numbers, through its matrix.
    void heads_product(const float* x, Index wide, const std::vector<MatrixView>& matrices, float* out, Index out_wide,
                       Index most);
    // A null bias is none.
    void route(const float* scores, const float* bias, const Routing& routing, std::int32_t* chosen, float* shares);
    // `chosen` experts of each token, the matrices of all.
    void experts(const float* x, const std::int32_t* chosen, const float* shares, Index each,
                 const std::vector<MatrixView>& gate_up, Activation activation, const std::vector<MatrixView>& down,
                 float* out, Index most);
    // Each of them times the factor of its expert.
    void scale_shares(float* shares, const std::int32_t* chosen, Index each_token, const float* factors);
    // out[M, size] = x times each token's one share, which becomes 1.
    void scale_tokens(const float* x, Index size, float* shares, float* out);
    void add_gated(const float* x, const float* gate, Index size, float* hidden);
    void convolve(const Convolution& job, Index most);
    void scan(const Scan& job);
    void gated_norm(const GatedNorm& job);
    // In adapters.cpp.
    void adapt(const AdaptRows& rows, const float* x, const std::vector<LowRank>& adapters, float* out, Index width,
               Index most);
    // x[M, numbers] through gates behind the heads of a row of qkv, `width` numbers long.
    void gate_heads(float* x, const float* qkv, Index width, Index numbers, Index size);

    // Not safe from two threads at once.
    void run(const Sizes& sizes);

  private:
    void need(Index floats);
    Inputs inputs(const MatrixView& matrix, Index most);
    Inputs inputs(const std::vector<MatrixView>& matrices, Index most);
    void run_experts(Buckets& buckets, const Sizes& sizes);
    Activations normed(const float* x, const std::int32_t* chosen, Norm norm, Index count, Inputs inputs) const;
    // Rows x[count, size], which make(patch) computes, rounded where the matrix wants that.
    template <class Make>
    Activations rows(const float* x, Index stride, Index size, Index count, Inputs inputs, const Make& make) const;
    void product(const Product& job) const;
    // f(row, thread) for each of them, on threads where their numbers are worth it.
    template <class F>
    void each(Index rows, Index size, const F& f) const;
    // How many threads `numbers` of a kernel that reads and writes each of them are worth.
    Index worth(Index numbers) const;
    float* scratch() const { return reinterpret_cast<float*>(scratch_.get()); }

    const Variant& kernels_;
    std::shared_ptr<Team> team_;
    std::vector<std::function<void(const Sizes&)>> calls_;
    struct Run {
        Index row, first, count;
    };
    std::vector<Run> runs_;  // of one adapt call
    std::vector<std::int32_t> tiles_;  // (row, first token of the row's) pairs of one attention call
    Aligned scratch_;
    Index scratch_floats_ = 0;
    Aligned rounded_;  // activations of the product at hand, as parts of its matrix want them
    Index rounded_bytes_ = 0;
};

template <class F>
void Program::each(Index rows, Index size, const F& f) const {
    if (worth(rows * size) == 1)
        for (Index row = 0; row < rows; row++) f(row, 0);
    else
        team_->run(rows, f);
}

}  // namespace cairn
