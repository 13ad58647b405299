// Kernels of layers that keep a state, of one token at a time.
#pragma once

#include "rows.h"

namespace cairn::CAIRN_VARIANT {

inline void convolve(const Convolve& job) {
    for (Index at = 0; at < job.channels; at += LANES) {
        const Index count = job.channels - at < LANES ? job.channels - at : LANES;
        const auto some = [&](const float* from) { return count == LANES ? load(from + at) : load_first(from + at, count); };
        Vec total = {};
        for (Index place = 0; place < job.reach; place++) {
            if (!job.seen[place]) continue;
            Vec one = some(job.seen[place]);
            if (job.times[place]) one = one * some(job.times[place]);
            total = fma(one, some(job.weight + place * job.channels), total);
        }
        if (job.bias) total = total + some(job.bias);
        if (job.silu) total = silu(total);
        if (job.gate) total = total * some(job.gate);
        if (count == LANES)
            store(job.out + at, total);
        else
            store_first(job.out + at, total, count);
    }
}

// 1 / sqrt(sum of squares + eps)
inline float inverse_length(const float* x, Index size, float eps) {
    Vec squares = {};
    Index at = 0;
    for (; at + LANES <= size; at += LANES) {
        const Vec v = load(x + at);
        squares = fma(v, v, squares);
    }
    if (at < size) {
        const Vec v = load_first(x + at, size - at);
        squares = fma(v, v, squares);
    }
    return 1.0f / __builtin_sqrtf(sum(squares) + eps);
}

// Columns of a head's matrix, TILE vectors of them: each is a chain along the keys, so the tile changes no bit.
template <int TILE>
inline void scan_columns(const ScanStep& job, const float* key, const float* query, Index at, Index last) {
    const auto get = [&](const float* from, int i) {
        return i + 1 < TILE || last == LANES ? load(from + at + i * LANES) : load_first(from + at + i * LANES, last);
    };
    const auto put = [&](float* to, int i, const Vec& value) {
        if (i + 1 < TILE || last == LANES)
            store(to + at + i * LANES, value);
        else
            store_first(to + at + i * LANES, value, last);
    };
    const Vec decay = set(job.decay), share = set(job.share);
    Vec change[TILE], sum[TILE];
#pragma GCC unroll 8
    for (int i = 0; i < TILE; i++) change[i] = sum[i] = Vec{};
    if (job.corrected)
        for (Index k = 0; k < job.keys; k++) {
            const Vec one = set(key[k]);
#pragma GCC unroll 8
            for (int i = 0; i < TILE; i++) change[i] = fma(one, get(job.from + k * job.values, i), change[i]);
        }
#pragma GCC unroll 8
    for (int i = 0; i < TILE; i++) {
        const Vec value = get(job.value, i);
        change[i] = share * (job.corrected ? value - decay * change[i] : value);
    }
    for (Index k = 0; k < job.keys; k++) {
        const Vec one = set(key[k]), asked = set(query[k]);
#pragma GCC unroll 8
        for (int i = 0; i < TILE; i++) {
            const Vec now = fma(one, change[i], decay * get(job.from + k * job.values, i));
            put(job.to + k * job.values, i, now);
            sum[i] = fma(asked, now, sum[i]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < TILE; i++)
        put(job.out, i, job.skip != 0.0f ? fma(set(job.skip), get(job.value, i), sum[i]) : sum[i]);
}

inline void scan(const ScanStep& job) {
    float key[MAX_HEAD], query[MAX_HEAD];
    const float *k = job.key, *q = job.query;
    if (job.corrected) {
        const float keys = inverse_length(k, job.keys, 1e-6f), asked = inverse_length(q, job.keys, 1e-6f);
        const float root = 1.0f / __builtin_sqrtf(static_cast<float>(job.keys));
        for (Index i = 0; i < job.keys; i++) key[i] = k[i] * keys, query[i] = q[i] * asked * root;
        k = key, q = query;
    }
    // As many sums as registers hold beside what is loaded.
    constexpr int MOST = REGISTERS >= 32 ? 128 / LANES / (16 / WIDTH) : 64 / LANES / (16 / WIDTH);
    constexpr int TILE = MOST < 1 ? 1 : MOST;
    Index at = 0;
    for (; at + TILE * LANES <= job.values; at += TILE * LANES) scan_columns<TILE>(job, k, q, at, LANES);
    for (; at < job.values; at += LANES)
        scan_columns<1>(job, k, q, at, job.values - at < LANES ? job.values - at : LANES);
}

// `size` numbers, normed and gated; `out` may be `x`.
inline void gated_norm(const float* x, const float* gate, const float* weight, Index size, float eps, bool gate_first,
                       float* out) {
    const auto some = [&](const float* from, Index at) {
        return size - at < LANES ? load_first(from + at, size - at) : load(from + at);
    };
    const auto given = [&](Index at) {
        const Vec v = some(x, at);
        return gate_first ? v * silu(some(gate, at)) : v;
    };
    Vec squares = {};
    for (Index at = 0; at < size; at += LANES) {
        const Vec v = given(at);
        squares = fma(v, v, squares);
    }
    const Vec scale = set(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(size) + eps));
    for (Index at = 0; at < size; at += LANES) {
        Vec normed = some(weight, at) * (given(at) * scale);
        if (!gate_first) normed = normed * silu(some(gate, at));
        if (size - at < LANES)
            store_first(out + at, normed, size - at);
        else
            store(out + at, normed);
    }
}

// out *= sigmoid(gate)
inline void gate_row(const float* gate, Index size, float* out) {
    for (Index at = 0; at < size; at += LANES) {
        const Index count = size - at < LANES ? size - at : LANES;
        const auto some = [&](const float* from) { return count == LANES ? load(from + at) : load_first(from + at, count); };
        const Vec gated = some(out) / (set(1.0f) + exp(set(0.0f) - some(gate)));
        if (count == LANES)
            store(out + at, gated);
        else
            store_first(out + at, gated, count);
    }
}

}  // namespace cairn::CAIRN_VARIANT
