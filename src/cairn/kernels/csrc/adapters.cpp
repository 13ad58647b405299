// The side path of adapters: x through a matrix of low rank and back, added to what a projection gave.
#include <algorithm>

#include "program.h"

namespace cairn {
namespace {

// Tokens of a run from which its products go to all threads; shorter runs go to one thread each.
constexpr Index LONG_RUN = 8;

}  // namespace

void Program::adapt(const AdaptRows& rows, const float* x, const std::vector<LowRank>& adapters, float* out,
                    Index width, Index most) {
    Index widest = 0;
    std::int32_t last = -1;
    for (const LowRank& one : adapters) widest = std::max(widest, one.down.out), last = std::max(last, one.slot);
    std::vector<int> places(static_cast<std::size_t>(last + 1), -1);
    for (std::size_t i = 0; i < adapters.size(); i++) places[static_cast<std::size_t>(adapters[i].slot)] = static_cast<int>(i);
    need(most * widest);
    runs_.reserve(static_cast<std::size_t>(most));
    calls_.push_back([=, this](const Sizes& sizes) {
        const auto of = [&](Index row, Index which) -> const LowRank* {
            const std::int32_t slot = rows.slots[row * rows.each + which];
            if (slot < 0 || slot > last || places[static_cast<std::size_t>(slot)] < 0) return nullptr;
            return &adapters[static_cast<std::size_t>(places[static_cast<std::size_t>(slot)])];
        };
        const auto alike = [&](Index a, Index b) {
            for (Index i = 0; i < rows.each; i++)
                if (rows.slots[a * rows.each + i] != rows.slots[b * rows.each + i] ||
                    rows.scales[a * rows.each + i] != rows.scales[b * rows.each + i])
                    return false;
            return true;
        };
        // Neighbouring rows with the same adapters are one run of tokens: (row, first token, tokens).
        runs_.clear();
        for (Index row = 0; row < sizes.rows; row++) {
            bool any = false;
            for (Index i = 0; i < rows.each; i++) any |= of(row, i) != nullptr;
            if (!any) continue;
            const Index first = rows.spans[3 * row], count = rows.spans[3 * row + 1];
            if (!runs_.empty() && runs_.back().first + runs_.back().count == first && alike(runs_.back().row, row))
                runs_.back().count += count;
            else
                runs_.push_back({row, first, count});
        }
        // A run's tokens have places of their own in the scratch memory, and its adapters are added in order.
        const auto path = [&](const Run& run, auto&& multiply) {
            for (Index i = 0; i < rows.each; i++) {
                const LowRank* one = of(run.row, i);
                if (one == nullptr) continue;
                const MatrixView& down = one->down;
                float* low = scratch() + run.first * widest;
                multiply({down, {x + run.first * down.inner, down.inner, run.count, down.inner, nullptr, nullptr}, low,
                          widest, false});
                const float scale = rows.scales[run.row * rows.each + i];
                for (Index token = 0; token < run.count; token++)
                    for (Index at = 0; at < down.out; at++) low[token * widest + at] *= scale;
                for (const LowRank::Up& up : one->ups)
                    multiply({up.matrix, {low + up.first, widest, run.count, up.matrix.inner, nullptr, nullptr},
                              out + run.first * width + up.column, width, true});
            }
        };
        for (const Run& run : runs_)
            if (run.count >= LONG_RUN) path(run, [&](const Product& job) { product(job); });
        std::erase_if(runs_, [](const Run& run) { return run.count >= LONG_RUN; });
        const auto alone = [&](Index i, int) {
            path(runs_[static_cast<std::size_t>(i)],
                 [&](const Product& job) { kernels_.product(job, 0, job.matrix.panel_count()); });
        };
        each(static_cast<Index>(runs_.size()), widest * width, alone);
    });
}

}  // namespace cairn
