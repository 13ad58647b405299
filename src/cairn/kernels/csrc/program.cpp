#include "program.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "lookup.h"

namespace cairn {
namespace {

// Multiplications below which handing work to threads costs more than it saves.
constexpr Index WORTH_THREADS = 1 << 15;
// Pieces a thread should find in one product, so that a slow one can be relieved, and the panels of one piece at least.
constexpr Index PIECES = 8, LEAST_PANELS = 4;
// Inner indices that a thread rounds at least.
constexpr Index PATCH = 4 * GROUP;

// Of rows that are there already.
struct Made {
    void operator()(Index) const {}
};

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

template <class Make>
Activations Program::rows(const float* x, Index stride, Index size, Index count, Inputs inputs, const Make& make) const {
    std::byte* at = rounded_.get();
    const Activations in = {x, stride, count, size, inputs.pairs ? at : nullptr,
                            inputs.groups ? at + inputs.groups_at : nullptr};
    if (!count) return in;
    // Two threads that round rows of one tile would write the same cache lines in turns: a task is a tile, or where
    // there are few, neighbouring groups of one.
    const Tiles tiles(count, inputs.groups ? kernels_.group_rows : inputs.pairs ? kernels_.pair_rows : 1);
    const Index tasks = PIECES * team_->size();
    if (inputs.any() && tiles.count >= tasks / 2) {
        team_->run(tiles.count, [&](Index tile, int) {
            const Patch patch = {tiles.first(tile), tiles.height(tile), 0, size};
            for (Index row = patch.row; row < patch.row + patch.rows; row++) make(row);
            kernels_.prepare(in, patch);
        });
        return in;
    }
    if constexpr (!std::is_same_v<Make, Made>) each(count, size, make);
    if (!inputs.any()) return in;
    const Index least = size * tiles.count / tasks + 1, width = (least + PATCH - 1) / PATCH * PATCH;
    const Index across = (size + width - 1) / width;
    const auto round = [&](Index task) {
        const Index tile = task / across, from = task % across * width;
        kernels_.prepare(in, {tiles.first(tile), tiles.height(tile), from, std::min(size, from + width)});
    };
    each(tiles.count * across, tiles.height(0) * width, round);
    return in;
}

Activations Program::normed(const float* x, const std::int32_t* chosen, Norm norm, Index count, Inputs inputs) const {
    float* out = scratch();
    return rows(out, norm.size, norm.size, count, inputs, [=, this](Index i) {
        const Index from = chosen ? chosen[i] : i;
        kernels_.norm(x + from * norm.size, norm.weight, norm.size, norm.eps, out + i * norm.size);
    });
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
    // The last fifth or so goes out in pieces of the smallest size: whoever is done first waits for no more than one.
    const Index large = panels * 4 / 5 / piece, rest = panels - large * piece;
    team_->run(large + (rest + LEAST_PANELS - 1) / LEAST_PANELS, [&](Index i, int) {
        const Index first = i < large ? i * piece : large * piece + (i - large) * LEAST_PANELS;
        kernels_.product(job, first, std::min(panels, first + (i < large ? piece : LEAST_PANELS)));
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
        // Neighbours of a row share cache lines of a block's keys: where there are many, runs of them go to one thread.
        const Index most = sizes.tokens / (2 * team_->size()), length = std::clamp<Index>(most, 1, BLOCK_TOKENS);
        team_->run((sizes.tokens + length - 1) / length, [&](Index run, int) {
            const Index end = std::min(sizes.tokens, (run + 1) * length);
            for (Index token = run * length; token < end; token++) kernels_.rope_write(job, token);
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
        product({matrix, rows(x, matrix.inner, matrix.inner, sizes.tokens, wanted, Made{}), hidden, matrix.out, true});
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
        const auto gated = [=, this](Index token) {
            float* gate = gates + token * gate_up.out;
            kernels_.gate(gate, gate + width, width, activation, gate);
        };
        product({down, rows(gates, gate_up.out, width, sizes.tokens, back, gated), hidden, down.out, true});
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
