#include "recurrent.h"

#include <algorithm>

#include "elementary.h"

namespace cairn {
namespace {

// Tokens of a row that one task convolves.
constexpr Index RUN = 16;

float softplus(float x) { return x > 20.0f ? x : log1p_of(exp_of(x)); }
float sigmoid(float x) { return 1.0f / (1.0f + exp_of(-x)); }

// One token's inputs and those before it, for the kernel.
Convolve inputs_of(const Convolution& job, Index row, Index i) {
    const Index begin = job.states.first(row), window = job.reach - 1;
    const float* before = job.states.before(row);
    Convolve one = {};
    for (Index place = 0; place < job.reach; place++) {
        const Index at = i - window + place;
        if (at >= 0) {
            const float* x = job.x + (begin + at) * job.width;
            one.seen[place] = job.gated ? x : x + job.first;
            one.times[place] = job.gated ? x + 2 * job.channels : nullptr;
        } else if (before && at + window >= 0) {
            one.seen[place] = before + (at + window) * job.channels;
        }
    }
    const Index token = begin + i;
    one.weight = job.weight, one.bias = job.bias, one.reach = job.reach, one.channels = job.channels;
    one.silu = job.silu, one.gate = job.gated ? job.x + token * job.width + job.channels : nullptr;
    one.out = job.out + token * job.channels;
    return one;
}

// Writes what the row leaves behind. `held` has room for a window: the one before may stand where another is written.
void keep(const Convolution& job, Index row, float* held) {
    const Index window = job.reach - 1, begin = job.states.first(row), count = job.states.count(row);
    const float* before = job.states.before(row);
    if (before)
        std::copy(before, before + window * job.channels, held);
    else
        std::fill(held, held + window * job.channels, 0.0f);
    for (Index i = 0; i < count; i++) {
        float* to = job.states.after(row, i);
        if (!to) continue;
        for (Index place = 0; place < window; place++, to += job.channels) {
            const Index at = i + 1 - window + place;
            if (at < 0) {
                const float* from = held + (at + window) * job.channels;
                std::copy(from, from + job.channels, to);
                continue;
            }
            const float* x = job.x + (begin + at) * job.width;
            if (job.gated)
                for (Index c = 0; c < job.channels; c++) to[c] = x[c] * x[2 * job.channels + c];
            else
                std::copy(x + job.first, x + job.first + job.channels, to);
        }
    }
}

// One head of one row, token by token. `held`: room for its matrix, where no other place is for it.
void scan_row(const Scan& job, const Variant& kernels, Index row, Index head, float* held) {
    const Index size = job.keys * job.values, all = job.heads * size, inner = job.heads * job.values;
    const Index wide = job.key_heads * job.keys, begin = job.states.first(row), count = job.states.count(row);
    const Index place = job.states.numbers - all + head * size;
    const Index key_head = job.tiled ? head % job.key_heads : head / (job.heads / job.key_heads);
    const bool delta = !job.skip;
    const float* now = job.states.before(row);
    if (now) {
        now += place;
    } else {
        std::fill(held, held + size, 0.0f);
        now = held;
    }
    for (Index i = 0; i < count; i++) {
        const float* x = job.x + (begin + i) * (inner + 2 * wide);
        const float* gates = job.gates + (begin + i) * job.width + job.first + head;
        ScanStep step = {};
        const float *first = x + key_head * job.keys + (delta ? 0 : inner), *second = first + wide;
        step.query = delta ? first : second, step.key = delta ? second : first;
        step.value = x + head * job.values + (delta ? 2 * wide : 0);
        float time = softplus(gates[delta ? job.heads : 0] + job.time_bias[head]);
        if (!delta) time = std::min(std::max(time, job.low), job.high);
        step.decay = exp_of(job.decay[head] * time);
        step.share = delta ? sigmoid(gates[0]) : time;
        step.skip = delta ? 0.0f : job.skip[head];
        step.corrected = delta, step.keys = job.keys, step.values = job.values;
        float* kept = job.states.after(row, i);
        step.from = now, step.to = kept ? kept + place : held;
        step.out = job.out + (begin + i) * inner + head * job.values;
        kernels.scan(step);
        now = step.to;
    }
}

}  // namespace

void Program::convolve(const Convolution& job, Index most) {
    const Index wide = padded((job.reach - 1) * job.channels);
    need(team_->size() * wide);
    if (static_cast<Index>(tiles_.size()) < 2 * most) tiles_.resize(static_cast<std::size_t>(2 * most));
    calls_.push_back([=, this](const Sizes& sizes) {
        Index tiles = 0;
        for (std::int32_t row = 0; row < sizes.rows; row++)
            for (std::int32_t at = 0; at < job.states.count(row); at += RUN, tiles++)
                tiles_[static_cast<std::size_t>(2 * tiles)] = row, tiles_[static_cast<std::size_t>(2 * tiles + 1)] = at;
        const auto tile = [&](Index i, int) {
            const Index row = tiles_[static_cast<std::size_t>(2 * i)], at = tiles_[static_cast<std::size_t>(2 * i + 1)];
            for (Index token = at; token < std::min<Index>(at + RUN, job.states.count(row)); token++)
                kernels_.convolve(inputs_of(job, row, token));
        };
        const auto end = [&](Index row, int thread) { keep(job, row, scratch() + thread * wide); };
        // Nothing is written before everything is read: one row's end may be where another begins.
        const bool alone = worth(sizes.tokens * job.channels * job.reach) == 1;
        if (alone)
            for (Index i = 0; i < tiles; i++) tile(i, 0);
        else
            team_->run(tiles, tile);
        each(sizes.rows, wide, end);
    });
}

void Program::scan(const Scan& job) {
    const Index size = padded(job.keys * job.values);
    need(team_->size() * size);
    calls_.push_back([=, this](const Sizes& sizes) {
        const auto task = [&](Index i, int thread) {
            scan_row(job, kernels_, i / job.heads, i % job.heads, scratch() + thread * size);
        };
        const Index tasks = sizes.rows * job.heads;
        if (worth(sizes.tokens * job.heads * size) == 1)
            for (Index i = 0; i < tasks; i++) task(i, 0);
        else
            team_->run(tasks, task);
    });
}

void Program::gated_norm(const GatedNorm& job) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, job.numbers, [=, this](Index row, int) {
            const float *x = job.x + row * job.numbers, *gates = job.gates + row * job.width + job.first;
            for (Index at = 0; at < job.numbers; at += job.size)
                kernels_.gated_norm(x + at, gates + at, job.whole ? job.weight + at : job.weight, job.size, job.eps,
                                    job.gate_first, job.out + row * job.numbers + at);
        });
    });
}

void Program::gate_heads(float* x, const float* qkv, Index width, Index numbers, Index size) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, numbers, [=, this](Index row, int) {
            for (Index at = 0; at < numbers; at += size)
                kernels_.gate_row(qkv + row * width + 2 * at + size, size, x + row * numbers + at);
        });
    });
}

}  // namespace cairn
