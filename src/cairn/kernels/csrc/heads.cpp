// Calls of a program over the heads of rows that lie in wider ones: norms, turns, gates.
#include <algorithm>
#include "elementary.h"
#include "program.h"

namespace cairn {

void Program::norm_heads(float* x, Index wide, Index from, Index heads, Norm norm) {
    std::shared_ptr<std::vector<float>> ones;
    if (!norm.weight) {
        ones = std::make_shared<std::vector<float>>(static_cast<std::size_t>(norm.size), 1.0f);
        norm.weight = ones->data();
    }
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, heads * norm.size, [=, this](Index token, int) {
            float* row = x + token * wide + from;
            for (Index at = 0; at < heads * norm.size; at += norm.size)
                kernels_.norm(row + at, ones ? ones->data() : norm.weight, norm.size, norm.eps, 0, norm.size, row + at);
        });
    });
}

void Program::layer_norm_heads(float* x, Index wide, Index from, Index heads, Norm norm, bool apart, const float* bias) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, heads * norm.size, [=, this](Index token, int) {
            float* row = x + token * wide + from;
            for (Index head = 0; head < heads; head++) {
                const float* weight = norm.weight + (apart ? head * norm.size : 0);
                float* at = row + head * norm.size;
                kernels_.layer_norm(at, weight, bias, norm.size, norm.eps, at);
            }
        });
    });
}

void Program::turn_heads(const float* x, Index heads, Index size, const float* angles, Index turned, float* out) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, heads * size, [=, this](Index token, int) {
            const float* from = angles + token * turned;
            for (Index at = token * heads * size; at < (token + 1) * heads * size; at += size) {
                kernels_.turn_pairs(x + at, from, from + turned / 2, turned, false, out + at);
                for (Index i = turned; i < size; i++) out[at + i] = x[at + i];
            }
        });
    });
}

void Program::scale_by(float* hidden, Index size, const float* factor) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, size, [=](Index row, int) {
            for (Index i = row * size; i < (row + 1) * size; i++) hidden[i] *= *factor;
        });
    });
}

void Program::xielu(const float* x, Index size, const float* positive, const float* negative, float* out) {
    calls_.push_back([=, this](const Sizes& sizes) {
        const float above = log1p_of(exp_of(*positive)), below = 0.5f + log1p_of(exp_of(*negative));
        each(sizes.tokens, 16 * size, [=](Index row, int) {
            for (Index i = row * size; i < (row + 1) * size; i++) {
                const float one = x[i];
                out[i] = one > 0.0f ? above * one * one + 0.5f * one
                                    : (expm1_of(std::min(one, -1e-6f)) - one) * below + 0.5f * one;
            }
        });
    });
}

void Program::gate_with(const float* x, Index size, Activation activation, const float* by, Index wide, Index from,
                        float* out) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, size, [=, this](Index row, int) {
            kernels_.gate(x + row * size, by + row * wide + from, size, activation, out + row * size);
        });
    });
}

}  // namespace cairn
