// The queries of one attention task, and what is known of their softmax so far.
#pragma once

#include "kv_q8.h"

namespace cairn::CAIRN_VARIANT {

constexpr float UNSEEN = -3.0e38f;

inline Range common(Range a, Range b) {
    return {a.low > b.low ? a.low : b.low, a.high < b.high ? a.high : b.high};
}
// Whole units of `size` that hold the range.
inline Range units(Range a, Index size) { return {a.low / size, (a.high + size - 1) / size}; }

// The queries of one task, in `Attend::scratch`: for each of them [size] query, [padded size] result of this segment
// and of those before, [SPAN] scores or weights; the largest score and the factor on the result so far, the largest
// score and the sum of weights of the segments before, and [LANES] sums of weights of this one. Last, two pairs of
// values that are seen by half. Of forms with CODES each row has also what belongs to its query's codes and its weights'.
template <class Form>
struct Queries {
    using Number = typename Form::Number;
    static constexpr Index WEIGHTS = SPAN * 4 / static_cast<Index>(sizeof(Number));  // from one row's to the next's

    Index rows, fan, size, wide;
    Number* query;
    float *result, *merged, *score, *most, *total, *factor, *merged_most, *merged_total;
    CodeRow *query_codes, *weight_codes;
    std::byte* halves;

    explicit Queries(const Attend& job) {
        fan = job.heads / job.kv.heads, rows = job.count * fan, size = job.kv.size, wide = padded(size);
        query = reinterpret_cast<Number*>(job.scratch);
        result = job.scratch + rows * size;
        merged = result + rows * wide;
        score = merged + rows * wide;
        most = score + rows * SPAN;
        factor = most + rows, merged_most = factor + rows, merged_total = merged_most + rows;
        total = merged_total + rows;
        query_codes = reinterpret_cast<CodeRow*>(total + rows * LANES), weight_codes = query_codes + rows;
        halves = reinterpret_cast<std::byte*>(weight_codes + rows);
        for (Index row = 0; row < rows; row++) {
            const float* from = job.query + ((job.first + row / fan) * job.heads + job.kv_head * fan + row % fan) * size;
            if constexpr (Form::CODES)
                query_codes[row] = Form::put_query(from, size, query + row * size);
            else
                put_query(from, query + row * size);
        }
        for (Index i = 0; i < rows * wide; i++) merged[i] = 0.0f;
        for (Index row = 0; row < rows; row++) {
            // A sink is a segment before all others, whose value is zero.
            const bool sink = job.sinks;
            merged_most[row] = sink ? job.sinks[job.kv_head * fan + row % fan] * Form::LOG : UNSEEN;
            merged_total[row] = sink ? 1.0f : 0.0f;
        }
        begin();
    }

    Number* weights(Index row) const { return reinterpret_cast<Number*>(score) + row * WEIGHTS; }

    // A segment begins.
    void begin() const {
        for (Index i = 0; i < rows * wide; i++) result[i] = 0.0f;
        for (Index i = 0; i < rows * LANES; i++) total[i] = 0.0f;
        for (Index row = 0; row < rows; row++) most[row] = UNSEEN;
    }

    // A segment ends: what it gave is added to what those before it gave.
    void merge() const {
        for (Index row = 0; row < rows; row++) {
            const float now = most[row] > merged_most[row] ? most[row] : merged_most[row];
            const Vec before = Form::exp(set(merged_most[row] - now)), here = Form::exp(set(most[row] - now));
            for (Index at = row * wide; at < (row + 1) * wide; at += LANES)
                store(merged + at, load(merged + at) * before + load(result + at) * here);
            merged_total[row] = merged_total[row] * first(before) + sum(load(total + row * LANES)) * first(here);
            merged_most[row] = now;
        }
    }

    static float first(const Vec& x) { return x.part[0][0]; }

    void put_query(const float* from, Number* to) const {
        Index at = 0;
        for (; at + LANES <= size; at += LANES) Form::put(to + at, load(from + at));
        if (at < size) {
            Number rest[LANES];
            Form::put(rest, load_first(from + at, size - at));
            __builtin_memcpy(to + at, rest, (size - at) * sizeof(Number));
        }
    }
};

inline Range seen_by(const Attend& job, Index position) {
    return {job.low(position), job.high(position)};
}

}  // namespace cairn::CAIRN_VARIANT
