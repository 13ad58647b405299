#include "program.h"

#include <algorithm>
#include <type_traits>

#include "dequant_row.h"
#include "elementary.h"

namespace cairn {
namespace {

// Multiplications below which handing work to threads costs more than it saves.
constexpr Index WORTH_THREADS = 1 << 15;
// Pieces a thread should find in one product, so that a slow one can be relieved, and the panels of one piece at least.
constexpr Index PIECES = 8, LEAST_PANELS = 4;
// Inner indices that a thread rounds at least, and the tasks it should find in rounding.
constexpr Index PATCH = 4 * GROUP, PATCHES = 4;

// Of rows that are there already.
struct Made {
    void operator()(const Patch&) const {}
};

// Panels dealt out: a thread's share of each matrix that this one is packed of lies where its share of the others lies.
// So one thread computes what belongs together, a query head and its key's or a gate and what it lets through, and finds
// both in its caches afterwards.
class Deal {
  public:
    Deal(const MatrixView& matrix, Index threads) : matrix_(matrix), threads_(threads) {}

    // Of a thread's panels, in order: all of them, or the runs that `from` to `to` of them make.
    Index count(Index thread) const {
        Index all = 0;
        runs(thread, 0, matrix_.panel_count(), [&](Index first, Index last) { all += last - first; });
        return all;
    }
    template <class F>
    void runs(Index thread, Index from, Index to, F&& f) const {
        Index begin = 0, before = 0;
        for (Index i = 0; i < matrix_.matrices && before < to; i++) {
            const Index end = panel(i), length = end - begin;
            const Index low = begin + length * thread / threads_, high = begin + length * (thread + 1) / threads_;
            const Index first = low + std::max<Index>(0, from - before), last = std::min(high, low + to - before);
            if (first < last) f(first, last);
            before += high - low, begin = end;
        }
    }

  private:
    // Where matrix i ends, in whole panels.
    Index panel(Index i) const {
        Index before = 0;
        for (Index part = 0; part < matrix_.count; part++) {
            const Segment& one = matrix_.parts[part];
            if (matrix_.ends[i] <= one.column + one.out) return before + (matrix_.ends[i] - one.column + LANES - 1) / LANES;
            before += one.panel_count();
        }
        return before;
    }

    const MatrixView& matrix_;
    Index threads_;
};

}  // namespace

Index Program::worth(Index numbers) const { return numbers * 4 < WORTH_THREADS ? 1 : team_->size(); }

void Program::need(Index floats) {
    if (floats <= scratch_floats_) return;
    scratch_ = allocate(static_cast<std::size_t>(floats) * sizeof(float));
    scratch_floats_ = floats;
}

void Program::run(const Sizes& sizes) {
    for (const auto& call : calls_) call(sizes);
}

Inputs Program::inputs(const MatrixView& matrix, Index most) {
    return inputs(std::vector<MatrixView>{matrix}, most);
}

Inputs Program::inputs(const std::vector<MatrixView>& matrices, Index most) {
    Inputs found = {};
    for (const MatrixView& one : matrices) {
        found.pairs |= kernels_.pair_rows && one.any([](const Segment& part) { return part.form == Form::bf16; });
        found.groups |= one.any([](const Segment& part) { return part.quantised(); });
    }
    const Index inner = matrices[0].inner;
    found.groups_at = found.pairs ? lines(most * Activations::pair_bytes(inner)) : 0;
    const Index bytes = found.groups_at + (found.groups ? most * Activations::group_bytes(inner) : 0);
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
    if (!count || (std::is_same_v<Make, Made> && !inputs.any())) return in;
    // Two threads that round rows of one tile would write the same cache lines in turns: a task is a tile, or where
    // there are few, neighbouring columns of one.
    const Tiles tiles(count, inputs.groups ? kernels_.group_rows : inputs.pairs ? kernels_.pair_rows(count) : 1);
    const Index threads = worth(count * size), tasks = threads == 1 ? 1 : PATCHES * threads;
    const Index least = (size * tiles.count + tasks - 1) / tasks;
    const Index width = std::min(size, (least + PATCH - 1) / PATCH * PATCH);
    const auto task = [&](Index i) {
        const Index tile = i % tiles.count, from = i / tiles.count * width;
        const Patch patch = {tiles.first(tile), tiles.height(tile), from, std::min(size, from + width)};
        make(patch);
        if (inputs.any()) kernels_.prepare(in, patch);
    };
    const Index all = tiles.count * ((size + width - 1) / width);
    if (threads == 1)
        for (Index i = 0; i < all; i++) task(i);
    else
        team_->run(all, [&](Index i, int) { task(i); });
    return in;
}

Activations Program::normed(const float* x, const std::int32_t* chosen, Norm norm, Index count, Inputs inputs) const {
    float* out = scratch();
    return rows(out, norm.size, norm.size, count, inputs, [=, this](const Patch& patch) {
        for (Index row = patch.row; row < patch.row + patch.rows; row++) {
            const float* from = x + (chosen ? chosen[row] : row) * norm.size;
            kernels_.norm(from, norm.weight, norm.size, norm.eps, patch.from, patch.to, out + row * norm.size);
        }
    });
}

void Program::product(const Product& job) const {
    const Index threads = team_->size();
    if (!job.in.rows) return;
    if (job.in.rows * job.matrix.inner * job.matrix.out < WORTH_THREADS || threads == 1) {
        kernels_.product(job, 0, job.matrix.panel_count());
        return;
    }
    const Deal deal(job.matrix, threads);
    Index most = 0;
    for (Index thread = 0; thread < threads; thread++) most = std::max(most, deal.count(thread));
    const Index piece = std::max(LEAST_PANELS, most / PIECES / LEAST_PANELS * LEAST_PANELS);
    // The last fifth or so goes out in pieces of the smallest size: whoever is done first waits for no more than one.
    const Index large = most * 4 / 5 / piece, rest = most - large * piece;
    const Index pieces = large + (rest + LEAST_PANELS - 1) / LEAST_PANELS;
    team_->run(pieces * threads, [&](Index i, int) {
        const Index at = i % pieces, from = at < large ? at * piece : large * piece + (at - large) * LEAST_PANELS;
        deal.runs(i / pieces, from, from + (at < large ? piece : LEAST_PANELS),
                  [&](Index first, Index last) { kernels_.product(job, first, last); });
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
                // Rounded to float32 before the cosine is taken, as the reference does.
                const CosSin turn = cos_sin_of(static_cast<float>(positions[token]) * frequencies[i]);
                out[i] = static_cast<float>(turn.cos * factor);
                out[half + i] = static_cast<float>(turn.sin * factor);
            }
        });
    });
}

void Program::scale(float* hidden, Index size, float factor) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, size, [=](Index row, int) {
            for (Index i = row * size; i < (row + 1) * size; i++) hidden[i] *= factor;
        });
    });
}

void Program::norm(const float* x, Norm norm, float* out) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, norm.size, [=, this](Index row, int) {
            const Index at = row * norm.size;
            kernels_.norm(x + at, norm.weight, norm.size, norm.eps, 0, norm.size, out + at);
        });
    });
}

void Program::layer_norm(const float* x, Norm norm, const float* bias, float* out) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, norm.size, [=, this](Index row, int) {
            const Index at = row * norm.size;
            kernels_.layer_norm(x + at, norm.weight, bias, norm.size, norm.eps, out + at);
        });
    });
}

void Program::project(const float* x, MatrixView matrix, float* out, Index most) {
    const Inputs wanted = inputs(matrix, most);
    calls_.push_back([=, this](const Sizes& sizes) {
        product({matrix, rows(x, matrix.inner, matrix.inner, sizes.tokens, wanted, Made{}), out, matrix.out, false});
    });
}

void Program::activate(const float* x, Index width, Activation activation, float* out) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, width, [=, this](Index row, int) {
            kernels_.activate(x + row * width, width, activation, out + row * width);
        });
    });
}

void Program::gate(const float* gates, Index width, Activation activation, float* out) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, width, [=, this](Index row, int) {
            const float* from = gates + row * 2 * width;
            kernels_.gate(from, from + width, width, activation, out + row * width);
        });
    });
}

void Program::add(const float* x, Index size, float* hidden) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, size, [=](Index row, int) {
            for (Index i = row * size; i < (row + 1) * size; i++) hidden[i] += x[i];
        });
    });
}

void Program::norm_add(const float* x, Norm norm, float* hidden) {
    const Index wide = padded(norm.size);
    need(team_->size() * wide);
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, norm.size, [=, this](Index row, int thread) {
            float *normed = scratch() + thread * wide, *to = hidden + row * norm.size;
            kernels_.norm(x + row * norm.size, norm.weight, norm.size, norm.eps, 0, norm.size, normed);
            for (Index i = 0; i < norm.size; i++) to[i] += normed[i];
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
        // Neighbours of a row share cache lines of a block's keys: runs of them go to one thread. Of many, whole tokens,
        // whose heads lie beside each other; of few, heads, which that thread has computed and will attend with.
        const Index heads = job.kv.heads, runs = (sizes.tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        const Index together = runs < PIECES * team_->size() ? 1 : heads;
        const auto task = [&](Index i) {
            const Index last = std::min(sizes.tokens, (i % runs + 1) * BLOCK_TOKENS), from = i / runs * together;
            for (Index token = i % runs * BLOCK_TOKENS; token < last; token++)
                for (Index head = from; head < from + together; head++) kernels_.rope_write(job, token, head);
        };
        const Index tasks = runs * heads / together;
        if (worth(sizes.tokens * (job.heads + 2 * heads) * job.kv.size) == 1)
            for (Index i = 0; i < tasks; i++) task(i);
        else
            team_->run(tasks, [&](Index i, int) { task(i); });
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
        const auto task_of = [&](Index i) {
            // Later tiles of a prompt see more: they come first.
            const std::int32_t *tile = tiles_.data() + 2 * (tiles - 1 - i % tiles), *row = rows + 3 * tile[0];
            Attend one = job;
            one.table = tables + tile[0] * width;
            one.first = row[0] + tile[1];
            one.count = std::min<Index>(most_tokens, row[1] - tile[1]);
            one.position = row[2] + tile[1];
            one.length = row[2] + row[1];
            one.kv_head = i / tiles;
            return one;
        };
        const Index tasks = tiles * job.kv.heads;
        team_->run(tasks, [&](Index task, int thread) {
            Attend one = task_of(task);
            one.scratch = scratch() + thread * each;
            if (task + 1 < tasks) {
                const Attend then = task_of(task + 1);
                const Index block = then.low(then.position) / BLOCK_TOKENS, each = SPAN / BLOCK_TOKENS;
                one.next = then.table + block, one.next_head = then.kv_head;
                one.next_count = std::min(each - block % each, (then.high(then.position) - 1) / BLOCK_TOKENS + 1 - block);
            }
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

void Program::gated_mlp(const float* hidden, Norm norm, MatrixView gate_up, Activation activation, MatrixView down,
                        float* out, bool added, Index most) {
    const Index width = gate_up.out / 2, both = padded(most * norm.size);
    need(both + most * gate_up.out);
    const Inputs wide = inputs(gate_up, most), back = inputs(down, most);
    calls_.push_back([=, this](const Sizes& sizes) {
        float* gates = scratch() + both;
        product({gate_up, normed(hidden, nullptr, norm, sizes.tokens, wide), gates, gate_up.out, false});
        const auto gated = [=, this](const Patch& patch) {
            for (Index row = patch.row; row < patch.row + patch.rows; row++) {
                float* gate = gates + row * gate_up.out + patch.from;
                kernels_.gate(gate, gate + width, patch.to - patch.from, activation, gate);
            }
        };
        product({down, rows(gates, gate_up.out, width, sizes.tokens, back, gated), out, down.out, added});
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

void Program::layer_logits(const float* hidden, const std::int32_t* wanted, Norm norm, const float* bias,
                           MatrixView head, float* out, Index most) {
    need(most * norm.size);
    const Inputs rounded = inputs(head, most);
    calls_.push_back([=, this](const Sizes& sizes) {
        float* normed = scratch();
        each(sizes.logits, norm.size, [=, this](Index row, int) {
            const float* from = hidden + wanted[row] * norm.size;
            kernels_.layer_norm(from, norm.weight, bias, norm.size, norm.eps, normed + row * norm.size);
        });
        product({head, rows(normed, norm.size, norm.size, sizes.logits, rounded, Made{}), out, head.out, false});
    });
}

void Program::scale_logits(float* logits, Index size, float factor) {
    calls_.push_back([=](const Sizes& sizes) {
        for (Index i = 0; i < sizes.logits * size; i++) logits[i] *= factor;
    });
}

void Program::scale_queries(float* query, Index size, const std::int32_t* positions, float beta, float original,
                            int ahead) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, size, [=](Index row, int) {
            const float turns = floor_of(static_cast<float>(positions[row] + ahead) / original);
            const float factor = 1.0f + beta * log_of(1.0f + turns);
            for (Index i = row * size; i < (row + 1) * size; i++) query[i] *= factor;
        });
    });
}

void Program::softcap(float* logits, Index size, float cap) {
    calls_.push_back([=, this](const Sizes& sizes) {
        // Rows are few and long: pieces of them.
        constexpr Index PIECE = 4096;
        const Index pieces = (size + PIECE - 1) / PIECE;
        team_->run(sizes.logits * pieces, [&](Index i, int) {
            const Index from = i % pieces * PIECE;
            kernels_.softcap(logits + i / pieces * size + from, std::min(PIECE, size - from), cap);
        });
    });
}

}  // namespace cairn
