#include "program.h"

#include <algorithm>
#include <cmath>

#include "lookup.h"

namespace cairn {
namespace {

// Multiplications below which handing work to threads costs more than it saves.
constexpr Index WORTH_THREADS = 1 << 15;
// Pieces a thread should find in one product, so that a slow one can be relieved, and the panels of one piece at least.
constexpr Index PIECES = 8, LEAST_PANELS = 4;

}  // namespace

template <class Body>
void Program::each(Index count, Index size, const Body& body) const {
    if (count * size * 4 < WORTH_THREADS)
        for (Index i = 0; i < count; i++) body(i);
    else
        team_->run(count, [&](Index i, int) { body(i); });
}

void Program::need(Index floats) {
    if (floats <= scratch_floats_) return;
    scratch_ = allocate(static_cast<std::size_t>(floats) * sizeof(float));
    scratch_floats_ = floats;
}

void Program::run(const Sizes& sizes) {
    for (const auto& call : calls_) call(sizes);
}

Inputs Program::inputs(const MatrixView& matrix, Index most) {
    Inputs found = {};
    found.pairs = kernels_.pair_rows && matrix.any([](const Segment& part) { return part.form == Form::bf16; });
    found.groups = matrix.any([](const Segment& part) { return part.quantised(); });
    found.groups_at = found.pairs ? lines(most * Activations::pair_bytes(matrix.inner)) : 0;
    const Index bytes = found.groups_at + (found.groups ? most * Activations::group_bytes(matrix.inner) : 0);
    if (bytes > rounded_bytes_) {
        rounded_ = allocate(static_cast<std::size_t>(bytes));
        rounded_bytes_ = bytes;
    }
    return found;
}

Activations Program::rows(const float* x, Index stride, Index size, Index count, Inputs inputs) const {
    std::byte* at = rounded_.get();
    return {x, stride, count, size, inputs.pairs ? at : nullptr, inputs.groups ? at + inputs.groups_at : nullptr};
}

Activations Program::normed(const float* x, const std::int32_t* chosen, Norm norm, Index count, Inputs inputs) const {
    float* out = scratch();
    const Activations found = rows(out, norm.size, norm.size, count, inputs);
    each(count, norm.size, [&](Index i) {
        const Index from = chosen ? chosen[i] : i;
        kernels_.norm(x + from * norm.size, norm.weight, norm.size, norm.eps, out + i * norm.size);
        if (inputs.any()) kernels_.prepare(found, i);
    });
    return found;
}

void Program::product(const Product& job) const {
    const Index panels = job.matrix.panel_count();
    if (!job.in.rows) return;
    if (job.in.rows * job.matrix.inner * job.matrix.out < WORTH_THREADS || team_->size() == 1) {
        kernels_.product(job, 0, panels);
        return;
    }
    const Index share = panels / (team_->size() * PIECES) / LEAST_PANELS * LEAST_PANELS;
    const Index piece = std::max(LEAST_PANELS, share);
    team_->run((panels + piece - 1) / piece, [&](Index i, int) {
        kernels_.product(job, i * piece, std::min(panels, (i + 1) * piece));
    });
}

void Program::embed(const void* table, Dtype dtype, Index size, const std::int32_t* tokens, float* hidden) {
    const Index bytes = size * (dtype == Dtype::f32 ? 4 : 2);
    calls_.push_back([=, this](const Sizes& sizes) {
        for (Index i = 0; i < sizes.tokens; i++)
            kernels_.embed(static_cast<const std::byte*>(table) + tokens[i] * bytes, dtype, size, hidden + i * size);
    });
}

void Program::look_up(MatrixView table, const std::int32_t* tokens, float* hidden) {
    const Index each = padded(look_up_scratch(table.inner));
    need(team_->size() * each);
    calls_.push_back([=, this](const Sizes& sizes) {
        team_->run(sizes.tokens, [&](Index i, int thread) {
            cairn::look_up(table, tokens[i], kernels_, scratch() + thread * each, hidden + i * table.inner);
        });
    });
}

void Program::rope_angles(const float* frequencies, double factor, Index half, const std::int32_t* positions,
                          float* angles) {
    calls_.push_back([=, this](const Sizes& sizes) {
        team_->run(sizes.tokens, [&](Index token, int) {
            float* out = angles + token * 2 * half;
            for (Index i = 0; i < half; i++) {
                // Rounded to float32 before the exact cosine is taken, as the reference does.
                const double angle = static_cast<float>(positions[token]) * frequencies[i];
                out[i] = static_cast<float>(std::cos(angle) * factor);
                out[half + i] = static_cast<float>(std::sin(angle) * factor);
            }
        });
    });
}

void Program::norm_project(const float* hidden, Norm norm, MatrixView matrix, float* out, Index most) {
    need(most * norm.size);
    const Inputs wanted = inputs(matrix, most);
    calls_.push_back([=, this](const Sizes& sizes) {
        product({matrix, normed(hidden, nullptr, norm, sizes.tokens, wanted), out, matrix.out, false});
    });
}

void Program::rope_write(const RopeWrite& job) {
    calls_.push_back([=, this](const Sizes& sizes) {
        // Neighbours share cache lines of a block's keys: whole runs of them go to one thread.
        team_->run((sizes.tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS, [&](Index run, int) {
            const Index end = std::min(sizes.tokens, (run + 1) * BLOCK_TOKENS);
            for (Index token = run * BLOCK_TOKENS; token < end; token++) kernels_.rope_write(job, token);
        });
    });
}

void Program::attention(const Attend& job, const std::int32_t* rows, const std::int32_t* tables, Index width,
                        Index most) {
    const Index fan = job.heads / job.kv.heads, most_tokens = attend_tokens(fan);
    const Index each = padded(attend_scratch(fan, job.kv.size));
    need(each * team_->size());
    if (static_cast<Index>(tiles_.size()) < 2 * most) tiles_.resize(static_cast<std::size_t>(2 * most));
    calls_.push_back([=, this](const Sizes& sizes) {
        Index tiles = 0;
        for (std::int32_t row = 0; row < sizes.rows; row++)
            for (std::int32_t at = 0; at < rows[3 * row + 1]; at += static_cast<std::int32_t>(most_tokens), tiles++)
                tiles_[2 * tiles] = row, tiles_[2 * tiles + 1] = at;
        // Later tiles of a prompt see more: they come first.
        team_->run(tiles * job.kv.heads, [&](Index task, int thread) {
            const std::int32_t* tile = tiles_.data() + 2 * (tiles - 1 - task / job.kv.heads);
            const std::int32_t* row = rows + 3 * tile[0];
            Attend one = job;
            one.table = tables + tile[0] * width;
            one.first = row[0] + tile[1];
            one.count = std::min<Index>(most_tokens, row[1] - tile[1]);
            one.position = row[2] + tile[1];
            one.kv_head = task % job.kv.heads;
            one.scratch = scratch() + thread * each;
            kernels_.attend(one);
        });
    });
}

void Program::project_add(const float* x, MatrixView matrix, float* hidden, Index most) {
    const Inputs wanted = inputs(matrix, most);
    calls_.push_back([=, this](const Sizes& sizes) {
        const Activations in = rows(x, matrix.inner, matrix.inner, sizes.tokens, wanted);
        if (wanted.any()) each(sizes.tokens, matrix.inner, [&](Index i) { kernels_.prepare(in, i); });
        product({matrix, in, hidden, matrix.out, true});
    });
}

void Program::gated_mlp(float* hidden, Norm norm, MatrixView gate_up, Activation activation, MatrixView down,
                        Index most) {
    const Index width = gate_up.out / 2, both = padded(most * norm.size);
    need(both + most * gate_up.out);
    const Inputs wide = inputs(gate_up, most), back = inputs(down, most);
    calls_.push_back([=, this](const Sizes& sizes) {
        float* gates = scratch() + both;
        product({gate_up, normed(hidden, nullptr, norm, sizes.tokens, wide), gates, gate_up.out, false});
        const Activations in = rows(gates, gate_up.out, width, sizes.tokens, back);
        team_->run(sizes.tokens, [&](Index token, int) {
            float* gate = gates + token * gate_up.out;
            kernels_.gate(gate, gate + width, width, activation, gate);
            if (back.any()) kernels_.prepare(in, token);
        });
        product({down, in, hidden, down.out, true});
    });
}

void Program::logits(const float* hidden, const std::int32_t* wanted, Norm norm, MatrixView head, float* out,
                     Index most) {
    need(most * norm.size);
    const Inputs rounded = inputs(head, most);
    calls_.push_back([=, this](const Sizes& sizes) {
        product({head, normed(hidden, wanted, norm, sizes.logits, rounded), out, head.out, false});
    });
}

}  // namespace cairn
