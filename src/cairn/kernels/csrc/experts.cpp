#include "experts.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "elementary.h"

namespace cairn {
namespace {

// Rows that are held at once at least, so that a step of few tokens is one run.
constexpr Index LEAST_ROWS = 512;
// As in program.cpp: panels of one piece at least, and pieces that a thread should find.
constexpr Index LEAST_PANELS = 4, PIECES = 8;
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

float to_choose(float score) { return std::isnan(score) ? LOWEST : score; }

// The largest of choice[count] that is not used yet, the first of equal ones; it is used then.
Index take_largest(const float* choice, Index count, float* used) {
    Index best = -1;
    for (Index i = 0; i < count; i++)
        if (!used[i] && (best < 0 || to_choose(choice[i]) > to_choose(choice[best]))) best = i;
    used[best] = 1.0f;
    return best;
}

// Leaves the groups whose two best together are best; the others' choices become the lowest there are.
void keep_groups(float* choice, const Routing& routing, float* used, float* sums) {
    const Index size = routing.experts / routing.groups;
    std::fill(used, used + routing.experts, 0.0f);
    for (Index group = 0; group < routing.groups; group++) {
        float *from = choice + group * size, *beside = used + group * size;
        const float best = to_choose(from[take_largest(from, size, beside)]);
        sums[group] = size > 1 ? best + to_choose(from[take_largest(from, size, beside)]) : best;
    }
    std::fill(used, used + routing.groups, 0.0f);
    for (Index i = 0; i < routing.chosen_groups; i++) take_largest(sums, routing.groups, used);
    for (Index i = 0; i < routing.experts; i++)
        if (!used[i / size]) choice[i] = LOWEST;
}

void soften(float* x, Index count) {
    float most = x[0], sum = 0.0f;
    for (Index i = 1; i < count; i++) most = x[i] > most ? x[i] : most;
    for (Index i = 0; i < count; i++) x[i] = exp_of(x[i] - most);
    for (Index i = 0; i < count; i++) sum += x[i];
    for (Index i = 0; i < count; i++) x[i] /= sum;
}

// `scratch`: four times the experts.
void route_row(const float* scores, const float* bias, const Routing& routing, float* scratch, std::int32_t* chosen,
               float* shares) {
    const Index count = routing.experts;
    float *part = scratch, *choice = part + count, *used = choice + count, *sums = used + count;
    std::copy(scores, scores + count, part);
    if (routing.scores == Scores::softmax) soften(part, count);
    if (routing.scores == Scores::sigmoid)
        for (Index i = 0; i < count; i++) part[i] = 1.0f / (1.0f + exp_of(-part[i]));
    for (Index i = 0; i < count; i++) choice[i] = bias ? part[i] + bias[i] : part[i];
    if (routing.groups > 1) keep_groups(choice, routing, used, sums);
    std::fill(used, used + count, 0.0f);
    for (Index i = 0; i < routing.chosen; i++)
        chosen[i] = static_cast<std::int32_t>(take_largest(choice, count, used));
    std::sort(chosen, chosen + routing.chosen);
    for (Index i = 0; i < routing.chosen; i++) shares[i] = part[chosen[i]];
    if (routing.scores == Scores::chosen) soften(shares, routing.chosen);
    float sum = 0.0f;
    for (Index i = 0; i < routing.chosen; i++) sum += shares[i];
    for (Index i = 0; i < routing.chosen; i++)
        shares[i] = (routing.normed ? shares[i] / (sum + 1e-20f) : shares[i]) * routing.scale;
}

}  // namespace

void Buckets::sort(Index count) {
    std::fill(starts.begin(), starts.end(), 0);
    for (Index i = 0; i < count * each; i++) starts[static_cast<std::size_t>(chosen[i]) + 1]++;
    for (std::size_t i = 1; i < starts.size(); i++) starts[i] += starts[i - 1];
    for (Index i = 0; i < count * each; i++) {
        const Index place = starts[static_cast<std::size_t>(chosen[i])]++;
        places[static_cast<std::size_t>(i)] = place;
        tokens[static_cast<std::size_t>(place)] = static_cast<std::int32_t>(i / each);
    }
    for (std::size_t i = starts.size() - 1; i > 0; i--) starts[i] = starts[i - 1];
    starts[0] = 0;
}

Index Buckets::fit(Index first, Index tile_rows) {
    parts.clear(), tiles.clear();
    const auto start = [&](Index expert) { return starts[static_cast<std::size_t>(expert)]; };
    const Index all = static_cast<Index>(gate_up.size());
    Index end = first;
    for (; end < all && (end == first || start(end + 1) - start(first) <= most); end++) {
        const Index rows = start(end + 1) - start(end), at = start(end) - start(first);
        if (!rows) continue;
        parts.push_back({end, at, rows});
        const Tiles cut(rows, tile_rows);
        for (Index i = 0; i < cut.count; i++) tiles.push_back({end, at + cut.first(i), cut.height(i)});
    }
    return end;
}

void Program::route(const float* scores, const float* bias, const Routing& routing, std::int32_t* chosen,
                    float* shares) {
    const Index wide = padded(4 * routing.experts);
    need(team_->size() * wide);
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, 16 * routing.experts, [=, this](Index row, int thread) {
            route_row(scores + row * routing.experts, bias, routing, scratch() + thread * wide,
                      chosen + row * routing.chosen, shares + row * routing.chosen);
        });
    });
}

void Program::experts(const float* x, const std::int32_t* chosen, const float* shares, Index each,
                      const std::vector<MatrixView>& gate_up, Activation activation,
                      const std::vector<MatrixView>& down, float* out, Index most) {
    const Index rows = std::min(most * each, std::max(most, LEAST_ROWS));
    need(padded(rows * gate_up[0].inner) + rows * gate_up[0].out);
    auto made = std::make_shared<Buckets>();
    made->gated = gate_up[0].out == 2 * down[0].inner;
    made->gate_up = gate_up, made->down = down, made->activation = activation, made->each = each, made->most = rows;
    made->wide = inputs(gate_up, rows), made->back = inputs(down, rows);
    made->x = x, made->chosen = chosen, made->shares = shares, made->out = out;
    const auto all = static_cast<std::size_t>(most * each);
    made->starts.resize(gate_up.size() + 1), made->tokens.resize(all), made->places.resize(all);
    made->parts.reserve(gate_up.size()), made->tiles.reserve(static_cast<std::size_t>(rows) + gate_up.size());
    calls_.push_back([=, this](const Sizes& sizes) { run_experts(*made, sizes); });
}

void Program::run_experts(Buckets& b, const Sizes& sizes) {
    const Index size = b.gate_up[0].inner, width = b.down[0].inner, wide = b.gate_up[0].out, count = static_cast<Index>(b.gate_up.size());
    float *held = scratch(), *gates = held + padded(b.most * size);
    const auto tasks = [&](Index all, Index numbers, const auto& f) {
        if (worth(numbers) == 1)
            for (Index i = 0; i < all; i++) f(i);
        else
            team_->run(all, [&](Index i, int) { f(i); });
    };
    // One expert's rows of a product; all of a run lie in one buffer.
    const auto rows_of = [&](const ExpertRows& part, float* x, Index stride, Index inner, const Inputs& inputs) {
        std::byte* at = rounded_.get();
        std::byte* groups = at + inputs.groups_at + part.first * Activations::group_bytes(inner);
        return Activations{x + part.first * stride, stride, part.rows, inner,
                           inputs.pairs ? at + part.first * Activations::pair_bytes(inner) : nullptr,
                           inputs.groups ? groups : nullptr};
    };
    const auto part_of = [&](const ExpertRows& tile) {
        return *std::lower_bound(b.parts.begin(), b.parts.end(), tile,
                                 [](const ExpertRows& one, const ExpertRows& other) { return one.expert < other.expert; });
    };
    const auto multiply = [&](const std::vector<MatrixView>& matrices, float* x, Index stride, const Inputs& inputs,
                              float* out, Index out_stride) {
        Index most = 0, all = 0;
        for (const ExpertRows& part : b.parts) {
            const Index panels = matrices[static_cast<std::size_t>(part.expert)].panel_count();
            most = std::max(most, panels), all += panels;
        }
        const Index fair = all / (PIECES * team_->size()) / LEAST_PANELS * LEAST_PANELS;
        const Index piece = std::min(most, std::max(LEAST_PANELS, fair)), pieces = (most + piece - 1) / piece;
        const Index work = b.parts.back().first + b.parts.back().rows;
        tasks(pieces * static_cast<Index>(b.parts.size()), work * matrices[0].inner * matrices[0].out / 4, [&](Index i) {
            const ExpertRows& part = b.parts[static_cast<std::size_t>(i / pieces)];
            const MatrixView& matrix = matrices[static_cast<std::size_t>(part.expert)];
            const Index from = i % pieces * piece, to = std::min(matrix.panel_count(), from + piece);
            if (from < to)
                kernels_.product({matrix, rows_of(part, x, stride, matrix.inner, inputs), out + part.first * out_stride,
                                  out_stride, false}, from, to);
        });
    };
    const auto ready = [&](const Activations& in, const Patch& patch, const Inputs& inputs) {
        if (inputs.any()) kernels_.prepare(in, patch);
    };

    b.sort(sizes.tokens);
    std::fill(b.out, b.out + sizes.tokens * size, 0.0f);
    for (Index first = 0, end; first < count; first = end) {
        const Index start = b.starts[static_cast<std::size_t>(first)];
        end = b.fit(first, kernels_.group_rows);
        if (b.parts.empty()) continue;
        for (const ExpertRows& part : b.parts) {
            const auto expert = static_cast<std::size_t>(part.expert);
            for (const MatrixView* one : {&b.gate_up[expert], &b.down[expert]})
                if (one->mapped) ask_for(one->mapped, one->mapped_bytes);
        }
        const Index all = static_cast<Index>(b.tiles.size()), rows = b.parts.back().first + b.parts.back().rows;
        tasks(all, rows * size, [&](Index i) {
            const ExpertRows& tile = b.tiles[static_cast<std::size_t>(i)];
            for (Index row = tile.first; row < tile.first + tile.rows; row++) {
                const float* from = b.x + b.tokens[static_cast<std::size_t>(start + row)] * size;
                std::copy(from, from + size, held + row * size);
            }
            const ExpertRows part = part_of(tile);
            ready(rows_of(part, held, size, size, b.wide), {tile.first - part.first, tile.rows, 0, size}, b.wide);
        });
        multiply(b.gate_up, held, size, b.wide, gates, wide);
        tasks(all, rows * wide, [&](Index i) {
            const ExpertRows& tile = b.tiles[static_cast<std::size_t>(i)];
            for (Index row = tile.first; row < tile.first + tile.rows; row++) {
                float* gate = gates + row * wide;
                if (b.gated)
                    kernels_.gate(gate, gate + width, width, b.activation, gate);
                else
                    kernels_.activate(gate, width, b.activation, gate);
            }
            const ExpertRows part = part_of(tile);
            ready(rows_of(part, gates, wide, width, b.back), {tile.first - part.first, tile.rows, 0, width}, b.back);
        });
        // The inputs are done with: what the experts give takes their place.
        multiply(b.down, gates, wide, b.back, held, size);
        each(sizes.tokens, size * b.each, [&](Index token, int) {
            float* out = b.out + token * size;
            for (Index i = token * b.each; i < (token + 1) * b.each; i++) {
                if (b.chosen[i] < first || b.chosen[i] >= end) continue;
                const float *from = held + (b.places[static_cast<std::size_t>(i)] - start) * size, share = b.shares[i];
                for (Index k = 0; k < size; k++) out[k] += share * from[k];
            }
        });
    }
}

void Program::scale_shares(float* shares, const std::int32_t* chosen, Index each_token, const float* factors) {
    calls_.push_back([=](const Sizes& sizes) {
        for (Index i = 0; i < sizes.tokens * each_token; i++) shares[i] *= factors[chosen[i]];
    });
}

void Program::scale_tokens(const float* x, Index size, float* shares, float* out) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, size, [=](Index row, int) {
            for (Index i = row * size; i < (row + 1) * size; i++) out[i] = x[i] * shares[row];
            shares[row] = 1.0f;
        });
    });
}

void Program::add_gated(const float* x, const float* gate, Index size, float* hidden) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, size, [=](Index row, int) {
            const float share = 1.0f / (1.0f + exp_of(-gate[row]));
            for (Index i = row * size; i < (row + 1) * size; i++) hidden[i] += share * x[i];
        });
    });
}

}  // namespace cairn
