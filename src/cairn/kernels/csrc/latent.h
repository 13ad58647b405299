// Attention over latents: of a token the pool keeps one row, which is the key of every head and whose first numbers are
// its value. Online in spans and segments as `attention.h` is; queries of one token make a tile, so that none multiplies
// what it does not see.
#pragma once

#include "attention.h"
#include "rows.h"

namespace cairn::CAIRN_VARIANT {

// A row of `size` numbers as they are stored, of which the first `rank` are normed and the others turned; arithmetic is in
// float32. `read` gives sixteen of them from `at` on; those behind the row's end are zero.
struct RowShape {
    Index size, rank;
};
template <class Stored>
struct PlainRow : RowShape {
    Index bytes() const { return size * Stored::ELEMENT; }
    Vec read(const std::byte* row, Index at) const {
        if (at + LANES <= size) return Stored::numbers(row + at * Stored::ELEMENT);
        std::byte buffer[LANES * Stored::ELEMENT] = {};
        __builtin_memcpy(buffer, row + at * Stored::ELEMENT, (size - at) * Stored::ELEMENT);
        return Stored::numbers(buffer);
    }
    void write(const float* x, std::byte* row) const { Stored::write(x, size, row); }
};
struct StoredF32 {
    static constexpr Index ELEMENT = 4;
    static Vec numbers(const std::byte* at) { return load(reinterpret_cast<const float*>(at)); }
    static void write(const float* x, Index size, std::byte* row) { __builtin_memcpy(row, x, size * ELEMENT); }
};
struct StoredF16 {
    static constexpr Index ELEMENT = 2;
    static Vec numbers(const std::byte* at) { return load_half(reinterpret_cast<const std::uint16_t*>(at)); }
    static void write(const float* x, Index size, std::byte* row) {
        rounded(x, size, store_half, [&](Index at, const std::uint16_t* bits, Index count) {
            __builtin_memcpy(row + at * ELEMENT, bits, count * ELEMENT);
        });
    }
};
struct StoredBf16 {
    static constexpr Index ELEMENT = 2;
    static Vec numbers(const std::byte* at) {
        typedef std::uint16_t Narrow __attribute__((vector_size(WIDTH * 2)));
        IntVec wide;
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; i++) {
            Narrow bits;
            __builtin_memcpy(&bits, at + i * WIDTH * ELEMENT, sizeof bits);
            wide.part[i] = __builtin_convertvector(bits, IntPart) << 16;
        }
        return as_float(wide);
    }
    static void write(const float* x, Index size, std::byte* row) {
        rounded(x, size, store_bf16, [&](Index at, const std::uint16_t* bits, Index count) {
            __builtin_memcpy(row + at * ELEMENT, bits, count * ELEMENT);
        });
    }
};

// Codes of 8 bits, and behind them two scales: of what is normed, and of what is turned.
struct RowQ8 : RowShape {
    Index bytes() const { return size + 8; }
    Vec read(const std::byte* row, Index at) const {
        std::int8_t codes[LANES] = {};
        float scale[2];
        __builtin_memcpy(scale, row + size, sizeof scale);
        __builtin_memcpy(codes, row + at, size - at < LANES ? size - at : LANES);
        const Vec numbers = to_float(load_bytes(codes));
        if (at + LANES <= rank) return numbers * set(scale[0]);
        if (at >= rank) return numbers * set(scale[1]);
        float both[LANES];
        for (Index i = 0; i < LANES; i++) both[i] = scale[at + i >= rank];
        return numbers * load(both);
    }
    void write(const float* x, std::byte* row) const {
        const Index first[3] = {0, rank, size};
        for (int part = 0; part < 2; part++) {
            std::byte* out = row + first[part];
            const auto take = [&](Index at, const std::int8_t* codes, Index count) {
                __builtin_memcpy(out + at, codes, count);
            };
            const float scale =
                round_row<std::int8_t>(x + first[part], first[part + 1] - first[part], MOST_CODE, take).scale;
            __builtin_memcpy(row + size + 4 * part, &scale, 4);
        }
    }
};

template <class F>
inline void with_row(Dtype dtype, RowShape shape, F&& f) {
    switch (dtype) {
        case Dtype::f32: return f(PlainRow<StoredF32>{shape});
        case Dtype::f16: return f(PlainRow<StoredF16>{shape});
        case Dtype::bf16: return f(PlainRow<StoredBf16>{shape});
        case Dtype::q8: return f(RowQ8{shape});
    }
}

inline std::byte* row_of(const Pages& kv, Index block, Index place, Index bytes) {
    return kv.base + ((block * kv.layers + kv.layer) * BLOCK_TOKENS + place) * bytes;
}

// out[size] = x with its pairs turned; `out` is not `x`.
inline void turn_pairs(const float* x, const float* cos, const float* sin, Index size, bool neighbours, float* out) {
    for (Index i = 0; i < size / 2; i++) {
        const Index a = neighbours ? 2 * i : i, b = neighbours ? 2 * i + 1 : size / 2 + i;
        out[a] = x[a] * cos[i] - x[b] * sin[i];
        out[b] = x[b] * cos[i] + x[a] * sin[i];
    }
}

inline void latent_write(const LatentWrite& job, Index token) {
    const Index size = job.kv.size, rank = size - job.turned;
    const float *x = job.x + token * size, *angles = job.angles + token * job.turned;
    float row[MAX_HEAD];
    norm(x, job.norm, rank, job.eps, 0, rank, row);
    turn_pairs(x + rank, angles, angles + job.turned / 2, job.turned, job.neighbours, row + rank);
    const Index block = job.slots[token] / BLOCK_TOKENS, place = job.slots[token] % BLOCK_TOKENS;
    with_row(job.kv.dtype, {size, rank}, [&](auto form) { form.write(row, row_of(job.kv, block, place, form.bytes())); });
}

// score[R][P positions] = query . row: sixteen chains along the row, added as a tree.
template <class Row, int R, int P>
void score_latents(const Row& form, const Queries<KvF32>& q, Index row, const std::byte* const* rows, Index place) {
    Vec acc[R][P] = {};
    const float* query = q.query + row * q.size;
    const Index whole = q.size / LANES * LANES;
    for (Index k = 0; k < whole; k += LANES) {
        Vec key[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) key[p] = form.read(rows[place + p], k);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const Vec x = load(query + r * q.size + k);
#pragma GCC unroll 8
            for (int p = 0; p < P; p++) acc[r][p] = fma(x, key[p], acc[r][p]);
        }
    }
    if (whole < q.size) {
        for (int p = 0; p < P; p++) {
            const Vec key = form.read(rows[place + p], whole);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++)
                acc[r][p] = fma(load_first(query + r * q.size + whole, q.size - whole), key, acc[r][p]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) q.score[(row + r) * SPAN + place + p] = sum(acc[r][p]);
}

// result[R][P vectors] = result * factor + weights @ rows, position by position.
template <class Row, int R, int P>
void mix_latents(const Row& form, const Queries<KvF32>& q, Index row, const std::byte* const* rows, Range inside,
                 Index column) {
    Vec acc[R][P];
    float* result = q.result + row * q.wide + column;
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) acc[r][p] = load(result + r * q.wide + p * LANES) * set(q.factor[row + r]);
    const float* weights = q.weights(row);
    for (Index at = inside.low; at < inside.high; at++) {
        Vec value[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) value[p] = form.read(rows[at], column + p * LANES);
        add_outer<R, P>(acc, weights + at, q.WEIGHTS, value);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) store(result + r * q.wide + p * LANES, acc[r][p]);
}

// The queries of one token in one span, of which they see the positions `inside`.
template <class Row>
void attend_token(const Row& form, const LatentAttend& job, const Queries<KvF32>& q, Index token, Index start,
                  Range inside, const std::byte* const* rows) {
    const Range blocks = units(inside, LANES);
    in_tiles(q.fan, [&](auto tile, Index first) {
        constexpr int R = decltype(tile)::value, SOME = vectors_for(R, 4);
        const Index row = token * q.fan + first;
        Index at = inside.low;
        for (; at + SOME <= inside.high; at += SOME) score_latents<Row, R, SOME>(form, q, row, rows, at);
        for (; at < inside.high; at++) score_latents<Row, R, 1>(form, q, row, rows, at);
        weigh<KvF32, R>(q, row, job.attend, start, blocks);
        Index column = 0;
        for (; column + SOME * LANES <= job.rank; column += SOME * LANES)
            mix_latents<Row, R, SOME>(form, q, row, rows, inside, column);
        for (; column < job.rank; column += LANES) mix_latents<Row, R, 1>(form, q, row, rows, inside, column);
    });
}

template <class Row>
void latent_attend_as(const Row& form, const LatentAttend& latent) {
    const Attend& job = latent.attend;
    const Queries<KvF32> q(job);
    const Index end = job.high(job.position + job.count - 1);
    for (Index start = 0; start < end; start += SPAN) {
        const Index here = end - start < SPAN ? end - start : SPAN;
        const std::byte* rows[SPAN];
        for (Index i = 0; i < here; i++)
            rows[i] = row_of(job.kv, job.table[(start + i) / BLOCK_TOKENS], (start + i) % BLOCK_TOKENS, form.bytes());
        for (Index token = 0; token < job.count; token++) {
            const Range inside = common({0, job.high(job.position + token) - start}, {0, SPAN});
            if (!inside.empty()) attend_token(form, latent, q, token, start, inside, rows);
        }
        if ((start + SPAN) % SEGMENT == 0 || start + SPAN >= end) {
            q.merge();
            q.begin();
        }
    }
    for (Index row = 0; row < q.rows; row++) {
        const Index head = (job.first + row / q.fan) * job.heads + job.kv_head * q.fan + row % q.fan;
        float* out = job.out + head * latent.rank;
        const Vec total = set(q.merged_total[row]);
        for (Index at = 0; at < latent.rank; at += LANES) {
            const Vec value = load(q.merged + row * q.wide + at) / total;
            if (at + LANES <= latent.rank)
                store(out + at, value);
            else
                store_first(out + at, value, latent.rank - at);
        }
    }
}

inline void latent_attend(const LatentAttend& job) {
    with_row(job.attend.kv.dtype, {job.attend.kv.size, job.rank}, [&](auto form) { latent_attend_as(form, job); });
}

}  // namespace cairn::CAIRN_VARIANT
