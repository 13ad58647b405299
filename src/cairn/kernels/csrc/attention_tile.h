// One span of 64 positions: scores of queries with its keys, their weights, and values added by weight.
#pragma once

#include "queries.h"

namespace cairn::CAIRN_VARIANT {

// Query rows of a tile at most, and vectors that R rows keep in registers beside what is read.
constexpr int TILE_ROWS = REGISTERS == 32 && PARTS == 1 ? 6 : WIDTH == 8 ? 4 : 12 / PARTS;
constexpr int vectors_for(int rows, int most) {
    const int fit = (REGISTERS == 32 ? 24 : 12) / (rows * PARTS);
    return fit >= 8 && rows <= 2 && most >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
}

// Where one span's keys and values lie, and those of the next, or of the next task's first (or these again), which are
// asked for meanwhile: memory is late, and from block to block nothing else foretells where the next one lies.
template <class Form>
struct Span {
    static constexpr Index STEPS = SPAN / Form::STEP;

    const std::byte *keys[SPAN / LANES], *values[STEPS];
    const std::byte *after_keys[SPAN / LANES], *after_values[STEPS];
    // Of forms with CODES: the scales of 16 positions' keys and values.
    const float *key_scales[SPAN / LANES], *value_scales[SPAN / LANES];
    Range inside;  // positions that any query of the task sees, counted from the span's first

    // `all`: positions that are seen, of which the span holds some.
    Span(const Attend& job, const Queries<Form>& q, Index start, Range all) {
        inside = common({all.low - start, all.high - start}, {0, SPAN});
        const Range blocks = units(inside, LANES);
        const Index row = q.size * Form::STEP * Form::ELEMENT;
        for (Index block = blocks.low; block < blocks.high; block++) {
            const Index here = start / LANES + block, later = here + SPAN / LANES;
            const Index id = job.table[here];
            Index next = id, head = job.kv_head;
            if (later * LANES < all.high)
                next = job.table[later];
            else if (start + SPAN >= all.high && block - blocks.low < job.next_count)
                next = job.next[block - blocks.low], head = job.next_head;
            const std::byte *from = job.kv.values(id, job.kv_head), *then = job.kv.values(next, head);
            const std::byte *key = job.kv.keys(id, job.kv_head), *later_key = job.kv.keys(next, head);
            if constexpr (Form::CODES) {
                key_scales[block] = reinterpret_cast<const float*>(key);
                value_scales[block] = reinterpret_cast<const float*>(from);
                __builtin_prefetch(later_key, 0, 2), __builtin_prefetch(then, 0, 2);
            }
            from += Form::FRONT, then += Form::FRONT;
            keys[block] = key + Form::FRONT, after_keys[block] = later_key + Form::FRONT;
            constexpr Index EACH = LANES / Form::STEP;
            for (Index i = 0; i < EACH; i++)
                values[block * EACH + i] = from + i * row, after_values[block * EACH + i] = then + i * row;
        }
        if constexpr (Form::STEP == 2) {
            if (inside.low % 2) half(q, inside.low / 2, 0, 0xffff0000u);
            if (inside.high % 2) half(q, inside.high / 2, 1, 0x0000ffffu);
        }
    }

  private:
    // A pair of which one position is unseen or not yet written: a weight of zero would not silence a NaN in it.
    void half(const Queries<Form>& q, Index pair, Index place, std::uint32_t keep) {
        std::byte* copy = q.halves + place * q.size * 4;
        for (Index i = 0; i < q.size; i++) {
            std::uint32_t bits;
            __builtin_memcpy(&bits, values[pair] + i * 4, 4);
            bits &= keep;
            __builtin_memcpy(copy + i * 4, &bits, 4);
        }
        values[pair] = copy;
    }
};

// Integer products of R rows begin with what takes 128 from each code.
template <int R, int P>
inline void start(IntVec (&acc)[R][P], const CodeRow* rows) {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++)
            for (int i = 0; i < PARTS; i++) acc[r][p].part[i] = IntPart{} + rows[r].start;
}

// score[R][P blocks of 16] = query @ keys, for P neighbouring blocks.
// Here and below the loops that fill and store `acc` are unrolled as well: an index that is known at run time only would
// send all sums through memory.
template <class Form, int R, int P, bool AHEAD>
void score_blocks(const Queries<Form>& q, Index row, const Span<Form>& span, Index block) {
    constexpr Index BYTES = LANES * Form::STEP * Form::ELEMENT;
    typename Form::Sum acc[R][P] = {};
    if constexpr (Form::CODES) start<R, P>(acc, q.query_codes + row);
    const auto* query = q.query + row * q.size;
    for (Index k = 0; k < q.size / Form::STEP; k++) {
        typename Form::Raw raw[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            raw[p] = Form::read(span.keys[block + p] + k * BYTES);
            if (AHEAD) __builtin_prefetch(span.after_keys[block + p] + k * BYTES, 0, 2);
        }
        Form::template add<R, P>(acc, query + k * Form::STEP, q.size, raw);
    }
    float* score = q.score + row * SPAN + block * LANES;
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            float* at = score + r * SPAN + p * LANES;
            if constexpr (Form::CODES)
                store(at, to_float(acc[r][p]) * (set(q.query_codes[row + r].scale) * load(span.key_scales[block + p])));
            else
                store(at, acc[r][p]);
        }
}

// result[R][P vectors] = result * factor + weights @ values, position by position.
template <class Form, int R, int P, bool AHEAD, bool WHOLE>
void mix_values(const Queries<Form>& q, Index row, const Span<Form>& span, Range steps, Index column) {
    constexpr Index BYTES = LANES * Form::STEP * Form::ELEMENT;
    const Index from = column * Form::STEP * Form::ELEMENT;
    typename Form::Sum acc[R][P];
    float* result = q.result + row * q.wide + column;
    if constexpr (Form::CODES) {
        start<R, P>(acc, q.weight_codes + row);
    } else {
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int p = 0; p < P; p++) acc[r][p] = load(result + r * q.wide + p * LANES) * set(q.factor[row + r]);
    }
    const auto* weights = q.weights(row);
    for (Index at = steps.low; at < steps.high; at++) {
        typename Form::Raw raw[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            const Index place = from + p * BYTES;
            raw[p] = WHOLE ? Form::read(span.values[at] + place)
                           : Form::read_first(span.values[at] + place, q.size - column);
            if (AHEAD) __builtin_prefetch(span.after_values[at] + place, 0, 2);
        }
        Form::template add<R, P>(acc, weights + at * Form::STEP, q.WEIGHTS, raw);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            float* at = result + r * q.wide + p * LANES;
            if constexpr (Form::CODES)
                store(at, fma(to_float(acc[r][p]), set(q.weight_codes[row + r].scale), load(at) * set(q.factor[row + r])));
            else
                store(at, acc[r][p]);
        }
}

template <class Form, int R, bool AHEAD>
void score_rows(const Queries<Form>& q, Index row, const Span<Form>& span, Range blocks) {
    constexpr int P = vectors_for(R, SPAN / LANES);
    Index at = blocks.low;
    for (; at + P <= blocks.high; at += P) score_blocks<Form, R, P, AHEAD>(q, row, span, at);
    for (; at < blocks.high; at++) score_blocks<Form, R, 1, AHEAD>(q, row, span, at);
}

template <class Form, int R, bool AHEAD>
void mix_rows(const Queries<Form>& q, Index row, const Span<Form>& span, Range steps) {
    constexpr int P = vectors_for(R, 8);
    Index column = 0;
    for (; column + P * LANES <= q.size; column += P * LANES)
        mix_values<Form, R, P, AHEAD, true>(q, row, span, steps, column);
    for (; column + LANES <= q.size; column += LANES)
        mix_values<Form, R, 1, AHEAD, true>(q, row, span, steps, column);
    if (column < q.size) mix_values<Form, R, 1, AHEAD, false>(q, row, span, steps, column);
}

// Scores of R rows, scaled and capped.
template <class Form, int R>
void soften_rows(const Queries<Form>& q, Index row, const Attend& job, Range blocks) {
    for (int r = 0; r < R; r++) {
        float* score = q.score + (row + r) * SPAN;
        for (Index block = blocks.low; block < blocks.high; block++) {
            const Vec value = load(score + block * LANES) * set(job.scale);
            store(score + block * LANES, set(job.softcap) * tanh(value / set(job.softcap)));
        }
    }
}

// Scores of R rows in one span -> weights; the rows' largest scores, sums and factors move on. WHOLE: every row sees all
// of the span; otherwise what a row does not see gets a weight of zero. `scales`: of values, of forms with CODES.
template <class Form, int R, bool WHOLE>
void weigh_rows(const Queries<Form>& q, Index row, const Attend& job, Index start, Range blocks,
                const float* const* scales) {
    constexpr float COUNT[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (WHOLE) blocks = {0, SPAN / LANES};
    const auto bounded = [&](Index r, Index block, const Vec& yes, float no) {
        if (WHOLE) return yes;
        const Range seen = seen_by(job, job.position + (row + r) / q.fan);
        const Index from = start + block * LANES;
        const auto low = static_cast<float>(seen.low - from), high = static_cast<float>(seen.high - 1 - from);
        return choose_between(load(COUNT), low, high, yes, set(no));
    };
    const Vec scale = set((job.softcap ? 1.0f : job.scale) * Form::LOG);
    float now[LANES] = {}, factor[LANES] = {};
    for (int r = 0; r < R; r++) {
        float* score = q.score + (row + r) * SPAN;
        Vec most = set(q.most[row + r]);
#pragma GCC unroll 4
        for (Index block = blocks.low; block < blocks.high; block++) {
            const Vec value = bounded(r, block, load(score + block * LANES) * scale, UNSEEN);
            store(score + block * LANES, value);
            most = larger(most, value);
        }
        now[r] = largest(most);
        factor[r] = q.most[row + r] - now[r];
        q.most[row + r] = now[r];
    }
    store(factor, Form::exp(load(factor)));
    for (int r = 0; r < R; r++) {
        float* score = q.score + (row + r) * SPAN;
        float* total = q.total + (row + r) * LANES;
        Vec sum = load(total) * set(factor[r]);
        IntVec most = {};
#pragma GCC unroll 4
        for (Index block = blocks.low; block < blocks.high; block++) {
            // Weights take the place of scores that were read: they are no wider.
            const Vec weight = bounded(r, block, Form::exp(load(score + block * LANES) - set(now[r])), 0.0f);
            if constexpr (Form::CODES) {
                const Vec scaled = bounded(r, block, weight * load(scales[block]), 0.0f);
                store(score + block * LANES, scaled);
                most = larger(most, magnitude(scaled));
                sum = sum + weight;
            } else
                sum = sum + Form::put(q.weights(row + r) + block * LANES, weight);
        }
        if constexpr (Form::CODES) q.weight_codes[row + r] = Form::put_weights(score, blocks, most);
        store(total, sum);
        q.factor[row + r] = factor[r];
    }
}

template <class Form, int R>
void weigh(const Queries<Form>& q, Index row, const Attend& job, Index start, Range blocks,
           const float* const* scales = nullptr) {
    const Range first = seen_by(job, job.position + row / q.fan);
    const Range last = seen_by(job, job.position + (row + R - 1) / q.fan);
    if (last.low <= start && first.high >= start + SPAN)
        weigh_rows<Form, R, true>(q, row, job, start, blocks, scales);
    else
        weigh_rows<Form, R, false>(q, row, job, start, blocks, scales);
}

}  // namespace cairn::CAIRN_VARIANT
