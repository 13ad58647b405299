// Softmax attention over paged KV, online in spans of 64 positions at fixed places.
//
// Per query: the spans it sees in order; in each, scores are chains along the head, weights relative to the largest
// score so far in the segment, and values are added position by position. Segments of 1,024 positions are computed
// apart and then added in order. Spans and positions that a query does not see leave its state as it was (a weight of
// zero), so tiles of several queries change no bit.
#pragma once

#include "attention_tile.h"

namespace cairn::CAIRN_VARIANT {

// A tile's height, known at compile time.
template <int R>
struct Rows {
    static constexpr int value = R;
};
// f(height, first row) for tiles of at most TILE_ROWS rows.
template <class F>
inline void in_tiles(Index rows, F&& f) {
    for (Index row = 0; row < rows;) {
        const Index left = rows - row;
        if constexpr (TILE_ROWS >= 6) {
            if (left >= 6) {
                f(Rows<6>{}, row), row += 6;
                continue;
            }
        }
        if constexpr (TILE_ROWS >= 4) {
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

// Whether all values are finite that a tile multiplies although one of its rows does not see them: a weight of zero
// would not silence the others.
template <class Form, int R>
bool silent(const Attend& job, const Queries<Form>& q, Index row, Index start, const Span<Form>& span) {
    const Range first = seen_by(job, job.position + row / q.fan);
    const Range last = seen_by(job, job.position + (row + R - 1) / q.fan);
    const Range before = {(first.low - start) / Form::STEP * Form::STEP, last.low - start};
    const Range after = {first.high - start, (last.high - start + Form::STEP - 1) / Form::STEP * Form::STEP};
    for (const Range edge : {common(before, span.inside), common(after, span.inside)})
        for (Index at = edge.low; at < edge.high; at++)
            if (!Form::finite(span.values[at / Form::STEP], at % Form::STEP, q.size)) return false;
    return true;
}

// Values for each row by itself, with nothing beside what it sees.
template <class Form>
void mix_apart(const Attend& job, const Queries<Form>& q, Index row, Index start) {
    const Range seen = seen_by(job, job.position + row / q.fan);
    if (common({seen.low - start, seen.high - start}, {0, SPAN}).empty()) return;
    const Span<Form> own(job, q, start, seen);
    mix_rows<Form, 1, false>(q, row, own, units(own.inside, Form::STEP));
}

template <class Form>
void attend_span(const Attend& job, const Queries<Form>& q, Index start, Range all) {
    const Span<Form> span(job, q, start, all);
    std::uint64_t apart = 0;  // rows; tasks of several tokens have less than 64
    in_tiles(q.rows, [&](auto tile, Index row) {
        constexpr int R = decltype(tile)::value;
        const Index first = job.position + row / q.fan, last = job.position + (row + R - 1) / q.fan;
        const Range seen = {seen_by(job, first).low - start, seen_by(job, last).high - start};
        const Range inside = common(seen, span.inside);
        if (inside.empty()) return;
        const Range blocks = units(inside, LANES), steps = units(inside, Form::STEP);
        if (row == 0)
            score_rows<Form, R, true>(q, row, span, blocks);
        else
            score_rows<Form, R, false>(q, row, span, blocks);
        if (job.softcap) soften_rows<Form, R>(q, row, job, blocks);
        weigh<Form, R>(q, row, job, start, blocks, span.value_scales);
        if (!Form::CODES && job.count > 1 && !silent<Form, R>(job, q, row, start, span))
            apart |= ((std::uint64_t{1} << R) - 1) << row;
        else if (row == 0)
            mix_rows<Form, R, true>(q, row, span, steps);
        else
            mix_rows<Form, R, false>(q, row, span, steps);
    });
    // This writes over the pairs that `span` has masked.
    for (Index row = 0; apart >> row; row++)
        if (apart >> row & 1) mix_apart(job, q, row, start);
}

template <class Form>
void attend_as(const Attend& job) {
    const Queries<Form> q(job);
    const Range all = {job.low(job.position), job.high(job.position + job.count - 1)};
    for (Index start = all.low / SPAN * SPAN; start < all.high; start += SPAN) {
        attend_span<Form>(job, q, start, all);
        if ((start + SPAN) % SEGMENT == 0 || start + SPAN >= all.high) {
            q.merge();
            q.begin();
        }
    }
    for (Index row = 0; row < q.rows; row++) {
        const Index head = (job.first + row / q.fan) * job.heads + job.kv_head * q.fan + row % q.fan;
        float* out = job.out + head * q.size;
        const Vec total = set(q.merged_total[row]);
        for (Index at = 0; at < q.size; at += LANES) {
            // Adding zero makes one zero of both: a weight of zero may have turned the sign of one.
            const Vec value = load(q.merged + row * q.wide + at) / total + Vec{};
            if (at + LANES <= q.size)
                store(out + at, value);
            else
                store_first(out + at, value, q.size - at);
        }
    }
}

inline void attend(const Attend& job) {
    with_form(job.kv.dtype, [&](auto form) { attend_as<decltype(form)>(job); });
}

}  // namespace cairn::CAIRN_VARIANT
