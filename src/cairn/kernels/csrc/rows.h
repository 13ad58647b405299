// Kernels of one token at a time: norm, gate, embedding, rotation and the KV write.
#pragma once

#include "kv_q8.h"

namespace cairn::CAIRN_VARIANT {

inline float inverse_rms(const float* x, Index size, float eps) {
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
    return 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(size) + eps);
}

inline void norm(const float* x, const float* weight, Index size, float eps, Index from, Index to, float* out) {
    const float scale = inverse_rms(x, size, eps);
    Index at = from;
    for (; at + LANES <= to; at += LANES) store(out + at, load(weight + at) * (load(x + at) * set(scale)));
    for (; at < to; at++) out[at] = weight[at] * (x[at] * scale);
}

// out = (x - mean) / deviation * weight + bias; `out` may be `x`.
inline void layer_norm(const float* x, const float* weight, const float* bias, Index size, float eps, float* out) {
    const Index whole = size / LANES * LANES;
    Vec total = {}, squares = {};
    for (Index at = 0; at < whole; at += LANES) total = total + load(x + at);
    float rest = 0.0f;
    for (Index at = whole; at < size; at++) rest += x[at];
    const float mean = (sum(total) + rest) / static_cast<float>(size);
    for (Index at = 0; at < whole; at += LANES) {
        const Vec v = load(x + at) - set(mean);
        squares = fma(v, v, squares);
    }
    rest = 0.0f;
    for (Index at = whole; at < size; at++) rest += (x[at] - mean) * (x[at] - mean);
    const float scale = 1.0f / __builtin_sqrtf((sum(squares) + rest) / static_cast<float>(size) + eps);
    for (Index at = 0; at < whole; at += LANES) {
        const Vec normed = load(weight + at) * ((load(x + at) - set(mean)) * set(scale));
        store(out + at, bias ? normed + load(bias + at) : normed);
    }
    for (Index at = whole; at < size; at++)
        out[at] = weight[at] * ((x[at] - mean) * scale) + (bias ? bias[at] : 0.0f);
}

inline Vec silu(const Vec& x) { return x / (set(1.0f) + exp(set(0.0f) - x)); }

inline Vec relu2(const Vec& x) {
    const Vec positive = larger(x, set(0.0f));
    return positive * positive;
}

inline Vec gelu_tanh(const Vec& x) {
    const Vec inner = set(0.7978845608f) * (x + set(0.044715f) * (x * x * x));
    return set(0.5f) * x * (set(1.0f) + tanh(inner));
}

// x Phi(x). Phi(-|x|) is half of the complementary error function of z = |x| / sqrt 2, which is t e^(P(t) - z^2) with
// t = 1 / (1 + z / 2) and the polynomial of W. H. Press et al., Numerical Recipes, 6.2: off by 1.2e-7 of itself at most.
inline Vec gelu(const Vec& x) {
    constexpr float TERMS[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                               0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
    const Vec z = larger(x, set(0.0f) - x) * set(0.70710678f);
    const Vec t = set(1.0f) / (set(1.0f) + set(0.5f) * z);
    Vec poly = set(0.17087277f);
    for (const float term : TERMS) poly = fma(poly, t, set(term));
    const Vec tail = set(0.5f) * t * exp(poly - z * z) * x;
    return choose_between(x, 0.0f, __builtin_inff(), x - tail, tail);
}

inline Vec activate(const Vec& x, Activation activation) {
    switch (activation) {
        case Activation::silu: return silu(x);
        case Activation::gelu: return gelu(x);
        case Activation::tanh: return tanh(x);
        case Activation::relu2: return relu2(x);
        case Activation::clamped_silu:  // a gate's alone
        case Activation::gelu_tanh: break;
    }
    return gelu_tanh(x);
}

// out = activation(x); `out` may be `x`.
inline void activate_row(const float* x, Index size, Activation activation, float* out) {
    Index at = 0;
    for (; at + LANES <= size; at += LANES) store(out + at, activate(load(x + at), activation));
    if (at < size) store_first(out + at, activate(load_first(x + at, size - at), activation), size - at);
}

// What a gate lets through: see `gate` in kernels/base.py.
inline Vec gated(const Vec& gate, const Vec& up, Activation activation) {
    if (activation != Activation::clamped_silu) return activate(gate, activation) * up;
    const Vec low = smaller(gate, set(7.0f)), all = larger(smaller(up, set(7.0f)), set(-7.0f));
    return (all + set(1.0f)) * (low / (set(1.0f) + exp(set(-1.702f) * low)));
}

// out = activation(gate) * up; `out` may be `gate`.
inline void gate(const float* gate, const float* up, Index size, Activation activation, float* out) {
    Index at = 0;
    for (; at + LANES <= size; at += LANES)
        store(out + at, gated(load(gate + at), load(up + at), activation));
    if (at < size) {
        const Index rest = size - at;
        store_first(out + at, gated(load_first(gate + at, rest), load_first(up + at, rest), activation), rest);
    }
}

inline void softcap(float* x, Index size, float cap) {
    Index at = 0;
    for (; at + LANES <= size; at += LANES) store(x + at, set(cap) * tanh(load(x + at) / set(cap)));
    if (at < size) store_first(x + at, set(cap) * tanh(load_first(x + at, size - at) / set(cap)), size - at);
}

inline void embed(const void* row, Dtype dtype, Index size, float* out) {
    if (dtype == Dtype::f32) {
        __builtin_memcpy(out, row, size * 4);
        return;
    }
    const auto* from = static_cast<const std::uint16_t*>(row);
    for (Index i = 0; i < size; i++) {
        if (dtype == Dtype::bf16) {
            const std::uint32_t bits = static_cast<std::uint32_t>(from[i]) << 16;
            __builtin_memcpy(out + i, &bits, 4);
        } else {
            out[i] = half_to_float(from[i]);
        }
    }
}

// Head x[size], times `scale` and `weight` where there is one, with the pairs (i, i + turned / 2) of its first `turned`
// numbers turned: to out[size]. `late`: the weight is multiplied with what is turned.
inline void turn(const float* x, const float* all, float scale, const float* cos, const float* sin, Index turned,
                 Index size, bool late, float* out) {
    const Index half = turned / 2;
    const float* weight = late ? nullptr : all;
    const auto normed = [&](Index at, Index count) {
        const Vec value = count == LANES ? load(x + at) : load_first(x + at, count);
        if (!weight) return value;
        return (count == LANES ? load(weight + at) : load_first(weight + at, count)) * (value * set(scale));
    };
    for (Index at = 0; at < half; at += LANES) {
        const Index count = half - at < LANES ? half - at : LANES;
        const Vec a = normed(at, count), b = normed(half + at, count);
        if (count == LANES) {
            const Vec c = load(cos + at), s = load(sin + at);
            store(out + at, a * c - b * s), store(out + half + at, b * c + a * s);
        } else {
            const Vec c = load_first(cos + at, count), s = load_first(sin + at, count);
            store_first(out + at, a * c - b * s, count), store_first(out + half + at, b * c + a * s, count);
        }
    }
    for (Index at = turned; at < size; at += LANES) {
        const Index count = size - at < LANES ? size - at : LANES;
        if (count == LANES)
            store(out + at, normed(at, count));
        else
            store_first(out + at, normed(at, count), count);
    }
    // Turning changes no length, so the scale is that of what was turned.
    for (Index at = 0; late && all && at < size; at++) out[at] = all[at] * (out[at] * scale);
}

inline void rope_write(const RopeWrite& job, Index token, Index kv_head) {
    const Index size = job.kv.size, kv_heads = job.kv.heads, fan = job.heads / kv_heads;
    const Index each = job.gated ? 2 * size : size;  // from one query head to the next
    const float* x = job.qkv + token * (job.heads * each + 2 * kv_heads * size);
    const float *cos = job.turned ? job.angles + token * job.turned : nullptr, *sin = cos + job.turned / 2;
    // Of one head, or of all heads whatever head it is.
    const auto scale = [&](const float* weight, bool whole, const float* head, const float* all, Index heads) {
        return !weight ? 0.0f : whole ? inverse_rms(all, heads * size, job.eps) : inverse_rms(head, size, job.eps);
    };
    for (Index head = kv_head * fan; head < (kv_head + 1) * fan; head++) {
        const float* weight = job.q_whole ? job.q_norm + head * size : job.q_norm;
        turn(x + head * each, weight, scale(job.q_norm, job.q_whole, x + head * each, x, job.heads), cos, sin, job.turned,
             size, job.late, job.query + (token * job.heads + head) * size);
    }
    const float* keys = x + job.heads * each;
    const Index block = job.slots[token] / BLOCK_TOKENS, place = job.slots[token] % BLOCK_TOKENS;
    x = keys + kv_head * size;
    with_form(job.kv.dtype, [&](auto form) {
        float key[MAX_HEAD];
        turn(x, job.k_whole ? job.k_norm + kv_head * size : job.k_norm, scale(job.k_norm, job.k_whole, x, keys, kv_heads),
             cos, sin, job.turned, size, job.late, key);
        form.write_keys(job.kv.keys(block, kv_head), place, key, size);
        form.write_values(job.kv.values(block, kv_head), place, x + kv_heads * size, size);
    });
}

}  // namespace cairn::CAIRN_VARIANT
