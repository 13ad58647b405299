// Calls of a program over the streams of a hidden state (Gemma 3n), and what its MLP lets through.
#include <algorithm>
#include <cmath>

#include "program.h"

namespace cairn {
namespace {

// In one order, whatever the machine's vectors are.
double mean_square(const float* x, Index size) {
    double sum = 0.0;
    for (Index i = 0; i < size; i++) sum += static_cast<double>(x[i]) * x[i];
    return sum / static_cast<double>(size);
}

}  // namespace

void Program::mix_streams(const float* x, Index count, Index size, const float* parts, float* out) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, count * count * size, [=](Index token, int) {
            const float *from = x + token * count * size, *part = parts + token * count * count;
            float* to = out + token * count * size;
            for (Index stream = 0; stream < count; stream++, to += size) {
                std::copy(from + stream * size, from + (stream + 1) * size, to);
                for (Index other = 0; other < count; other++) {
                    const float share = part[stream * count + other];
                    for (Index i = 0; i < size; i++) to[i] += share * from[other * size + i];
                }
            }
        });
    });
}

void Program::correct_streams(const float* given, const float* parts, Index count, Index size, Index active, float* x) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, count * size, [=](Index token, int) {
            float* row = x + token * count * size;
            for (Index i = 0; i < size; i++) {
                const float more = given[token * size + i] - row[active * size + i];
                for (Index stream = 0; stream < count; stream++)
                    row[stream * size + i] += more * (parts[token * count + stream] + 1.0f);
            }
        });
    });
}

void Program::take_stream(const float* x, Index count, Index size, Index place, float* out) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, size, [=](Index token, int) {
            const float* from = x + (token * count + place) * size;
            std::copy(from, from + size, out + token * size);
        });
    });
}

void Program::put_stream(const float* x, Index count, Index size, Index place, float* out) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, size, [=](Index token, int) {
            const float* from = x + token * size;
            std::copy(from, from + size, out + (token * count + place) * size);
        });
    });
}

void Program::add_streams(const float* x, Index count, Index size, Index first, float* out) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, count * size, [=](Index token, int) {
            for (Index stream = first; stream < count; stream++)
                for (Index i = 0; i < size; i++) out[(token * count + stream) * size + i] += x[token * size + i];
        });
    });
}

void Program::match_magnitude(const float* like, Index size, float* x) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, size, [=](Index token, int) {
            float* row = x + token * size;
            const auto wanted = static_cast<float>(std::sqrt(mean_square(like + token * size, size)));
            const auto found = static_cast<float>(std::sqrt(std::max(mean_square(row, size), 1e-5)));
            for (Index i = 0; i < size; i++) row[i] = row[i] * wanted / found;
        });
    });
}

void Program::sparsify(float* gates, Index width, float factor) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, 4 * width, [=](Index token, int) {
            float* row = gates + token * 2 * width;
            double sum = 0.0, spread = 0.0;
            for (Index i = 0; i < width; i++) sum += row[i];
            const double mean = sum / static_cast<double>(width);
            for (Index i = 0; i < width; i++) spread += (row[i] - mean) * (row[i] - mean);
            const auto least = static_cast<float>(mean + std::sqrt(spread / static_cast<double>(width)) * factor);
            for (Index i = 0; i < width; i++) row[i] = std::max(row[i] - least, 0.0f);
        });
    });
}

void Program::scale_columns(const float* x, Index size, const float* weight, float* out) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, size, [=](Index token, int) {
            for (Index i = 0; i < size; i++) out[token * size + i] = x[token * size + i] * weight[i];
        });
    });
}

}  // namespace cairn
