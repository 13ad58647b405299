// Softmax attention over paged KV, online in spans of 64 positions at fixed places.
//
// Per query: the spans it sees in order; in each, scores are chains along the head, weights relative to the largest
// score so far, and values are added position by position. Spans and positions that a query does not see leave its
// state as it was (a weight of zero), so tiles of several queries change no bit.
#pragma once

#include "product.h"

namespace cairn::CAIRN_VARIANT {

constexpr float UNSEEN = -3.0e38f;

struct Range {
    Index low, high;  // positions low <= p < high

    bool empty() const { return low >= high; }
};

inline Range common(Range a, Range b) {
    return {a.low > b.low ? a.low : b.low, a.high < b.high ? a.high : b.high};
}

// The queries of one task, in `Attend::scratch`: for each of them [size] query, [padded size] result, [SPAN] scores or
// weights, then the largest score so far, the sum of weights and the factor on the result so far.
struct Queries {
    Index rows, fan, size, wide;
    float *query, *result, *score, *most, *total, *factor;

    explicit Queries(const Attend& job) {
        fan = job.heads / job.kv.heads, rows = job.count * fan, size = job.kv.size, wide = padded(size);
        query = job.scratch;
        result = query + rows * size;
        score = result + rows * wide;
        most = score + rows * SPAN;
        total = most + rows;
        factor = total + rows;
        for (Index token = 0; token < job.count; token++) {
            const Index head = (job.first + token) * job.heads + job.kv_head * fan;
            __builtin_memcpy(query + token * fan * size, job.query + head * size, fan * size * 4);
        }
        for (Index i = 0; i < rows * wide; i++) result[i] = 0.0f;
        for (Index row = 0; row < rows; row++) most[row] = UNSEEN, total[row] = 0.0f;
    }
};

inline Range seen_by(const Attend& job, Index position) {
    const Index low = job.window && position >= job.window ? position - job.window + 1 : 0;
    return {low, position + 1};
}

// score[R][P blocks of 16] = query @ keys, for P neighbouring blocks.
template <int R, int P>
void score_blocks(const float* query, Index size, const float* const* keys, float* score) {
    Vec acc[R][P] = {}, weight[P];
    for (Index k = 0; k < size; k++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) weight[p] = load(keys[p] + k * LANES);
        add_outer<R, P>(acc, query + k, size, weight);
    }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) store(score + r * SPAN + p * LANES, acc[r][p]);
}

// result[R][P vectors] = result * factor + weights @ values, position by position.
template <int R, int P, bool WHOLE>
void mix_values(const Queries& q, Index row, Index column, const float* const* values, Range inside) {
    Vec acc[R][P], value[P];
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++)
            acc[r][p] = load(q.result + (row + r) * q.wide + column + p * LANES) * set(q.factor[row + r]);
    for (Index at = inside.low; at < inside.high; at++) {
        const float* from = values[at / LANES] + at % LANES * q.size + column;
#pragma GCC unroll 4
        for (int p = 0; p < P; p++)
            value[p] = WHOLE ? load(from + p * LANES) : load_first(from, q.size - column);
        add_outer<R, P>(acc, q.score + row * SPAN + at, SPAN, value);
    }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) store(q.result + (row + r) * q.wide + column + p * LANES, acc[r][p]);
}

template <int R>
void score_rows(const Queries& q, Index row, const float* const* keys, Range blocks) {
    constexpr int P = panels_for(R);
    Index at = blocks.low;
    for (; at + P <= blocks.high; at += P)
        score_blocks<R, P>(q.query + row * q.size, q.size, keys + at, q.score + row * SPAN + at * LANES);
    for (; at < blocks.high; at++)
        score_blocks<R, 1>(q.query + row * q.size, q.size, keys + at, q.score + row * SPAN + at * LANES);
}

template <int R>
void mix_rows(const Queries& q, Index row, const float* const* values, Range inside) {
    constexpr int P = panels_for(R);
    Index column = 0;
    for (; column + P * LANES <= q.size; column += P * LANES)
        mix_values<R, P, true>(q, row, column, values, inside);
    for (; column + LANES <= q.size; column += LANES) mix_values<R, 1, true>(q, row, column, values, inside);
    if (column < q.size) mix_values<R, 1, false>(q, row, column, values, inside);
}

// A height known at compile time, and f(height, first row) for tiles of at most MAX_ROWS rows.
template <int R>
struct Rows {
    static constexpr int value = R;
};
template <class F>
inline void in_tiles(Index rows, F&& f) {
    for (Index row = 0; row < rows;) {
        const Index left = rows - row;
        if constexpr (MAX_ROWS >= 6) {
            if (left >= 6) {
                f(Rows<6>{}, row), row += 6;
                continue;
            }
            if (left >= 4) {
                f(Rows<4>{}, row), row += 4;
                continue;
            }
        }
        if (left >= 3)
            f(Rows<3>{}, row), row += 3;
        else if (left == 2)
            f(Rows<2>{}, row), row += 2;
        else
            f(Rows<1>{}, row), row += 1;
    }
}

// Scores of one span -> weights; the running largest score, sum and factor move on. `seen` counts from the span.
inline void weigh(const Queries& q, Index row, float scale, Range seen, Range blocks) {
    float* score = q.score + row * SPAN;
    constexpr float COUNT[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Vec lanes = load(COUNT);
    Vec value[SPAN / LANES], most = set(q.most[row]);
    const auto bounded = [&](Index block, const Vec& yes, float no) {
        const auto low = static_cast<float>(seen.low - block * LANES);
        const auto high = static_cast<float>(seen.high - 1 - block * LANES);
        return choose_between(lanes, low, high, yes, set(no));
    };
    for (Index block = blocks.low; block < blocks.high; block++) {
        value[block] = bounded(block, load(score + block * LANES) * set(scale), UNSEEN);
        most = larger(most, value[block]);
    }
    const float now = largest(most);
    Vec total = {};
    for (Index block = blocks.low; block < blocks.high; block++) {
        const Vec weight = bounded(block, exp(value[block] - set(now)), 0.0f);
        store(score + block * LANES, weight);
        total = total + weight;
    }
    float buffer[LANES];
    store(buffer, exp(set(q.most[row] - now)));
    q.factor[row] = buffer[0];
    q.total[row] = q.total[row] * buffer[0] + sum(total);
    q.most[row] = now;
}

inline void attend(const Attend& job) {
    const Queries q(job);
    const Range all = {seen_by(job, job.position).low, job.position + job.count};
    for (Index start = all.low / SPAN * SPAN; start < all.high; start += SPAN) {
        const Range inside = common({all.low - start, all.high - start}, {0, SPAN});
        const Range blocks = {inside.low / LANES, (inside.high + LANES - 1) / LANES};
        const float *keys[SPAN / LANES], *values[SPAN / LANES];
        for (Index block = blocks.low; block < blocks.high; block++) {
            const Index id = job.table[start / LANES + block];
            keys[block] = job.kv.keys(id, job.kv_head), values[block] = job.kv.values(id, job.kv_head);
        }
        in_tiles(q.rows, [&](auto tile, Index row) { score_rows<tile.value>(q, row, keys, blocks); });
        for (Index row = 0; row < q.rows; row++) {
            const Range seen = seen_by(job, job.position + row / q.fan);
            weigh(q, row, job.scale, {seen.low - start, seen.high - start}, blocks);
        }
        in_tiles(q.rows, [&](auto tile, Index row) { mix_rows<tile.value>(q, row, values, inside); });
    }
    for (Index row = 0; row < q.rows; row++) {
        const Index head = (job.first + row / q.fan) * job.heads + job.kv_head * q.fan + row % q.fan;
        float* out = job.out + head * q.size;
        // Adding zero makes one zero of both: a weight of zero may have turned the sign of one.
        for (Index i = 0; i < q.size; i++) out[i] = q.result[row * q.wide + i] / q.total[row] + 0.0f;
    }
}

}  // namespace cairn::CAIRN_VARIANT
