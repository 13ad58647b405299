// Attention over latents as calls of a program.
#include <algorithm>

#include "program.h"

namespace cairn {
namespace {

// Query heads that one attention task takes at most: several tasks a token, for as many threads.
constexpr Index HEADS = 8;

// The largest number of heads up to HEADS that divides all of them.
Index together(Index heads) {
    Index found = 1;
    for (Index i = 1; i <= std::min(heads, HEADS); i++)
        if (heads % i == 0) found = i;
    return found;
}

}  // namespace

void Program::heads_product(const float* x, Index wide, const std::vector<MatrixView>& matrices, float* out,
                            Index out_wide, Index most) {
    const auto heads = static_cast<Index>(matrices.size());
    const Index inner = matrices[0].inner;
    const Inputs wanted = inputs(matrices, most);
    // Each head's rows are rounded in a place of their own.
    const Index each = lines(wanted.groups_at + (wanted.groups ? most * Activations::group_bytes(inner) : 0));
    if (heads * each > rounded_bytes_) {
        rounded_ = allocate(static_cast<std::size_t>(heads * each));
        rounded_bytes_ = heads * each;
    }
    calls_.push_back([=, this](const Sizes& sizes) {
        if (!sizes.tokens) return;
        const auto task = [&](Index head) {
            std::byte* at = rounded_.get() + head * each;
            const Activations in = {x + head * wide, heads * wide, sizes.tokens, inner, wanted.pairs ? at : nullptr,
                                    wanted.groups ? at + wanted.groups_at : nullptr};
            if (wanted.any()) kernels_.prepare(in, {0, sizes.tokens, 0, inner});
            const MatrixView& matrix = matrices[static_cast<std::size_t>(head)];
            kernels_.product({matrix, in, out + head * out_wide, heads * out_wide, false}, 0, matrix.panel_count());
        };
        if (worth(sizes.tokens * heads * inner * matrices[0].out / 4) == 1)
            for (Index head = 0; head < heads; head++) task(head);
        else
            team_->run(heads, [&](Index head, int) { task(head); });
    });
}

void Program::latent_write(const LatentWrite& job) {
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, job.kv.size, [=, this](Index token, int) { kernels_.latent_write(job, token); });
    });
}

void Program::latent_queries(const float* x, Index wide, const std::vector<MatrixView>& keys, const float* angles,
                             Index turned, bool neighbours, float* query, Index kept, Index most) {
    heads_product(x, wide, keys, query, kept, most);
    const auto heads = static_cast<Index>(keys.size());
    calls_.push_back([=, this](const Sizes& sizes) {
        each(sizes.tokens, heads * turned, [=, this](Index token, int) {
            const float* from = angles + token * turned;
            for (Index head = token * heads; head < (token + 1) * heads; head++)
                kernels_.turn_pairs(x + (head + 1) * wide - turned, from, from + turned / 2, turned, neighbours,
                                    query + (head + 1) * kept - turned);
        });
    });
}

void Program::latent_attention(const LatentAttend& job, const std::int32_t* rows, const std::int32_t* tables,
                               Index width, Index most) {
    const Index fan = together(job.attend.heads), groups = job.attend.heads / fan, most_tokens = attend_tokens(fan);
    const Index each = padded(attend_scratch(fan, job.attend.kv.size));
    need(each * team_->size());
    if (static_cast<Index>(tiles_.size()) < 2 * most) tiles_.resize(static_cast<std::size_t>(2 * most));
    calls_.push_back([=, this](const Sizes& sizes) {
        Index tiles = 0;
        for (std::int32_t row = 0; row < sizes.rows; row++)
            for (std::int32_t at = 0; at < rows[3 * row + 1]; at += static_cast<std::int32_t>(most_tokens), tiles++)
                tiles_[2 * tiles] = row, tiles_[2 * tiles + 1] = at;
        team_->run(tiles * groups, [&](Index task, int thread) {
            // Later tiles of a prompt see more: they come first. Heads of the same tokens share what they read.
            const std::int32_t *tile = tiles_.data() + 2 * (tiles - 1 - task / groups), *row = rows + 3 * tile[0];
            LatentAttend one = job;
            one.attend.kv.heads = groups;  // of queries, each of which reads the same rows
            one.attend.table = tables + tile[0] * width;
            one.attend.first = row[0] + tile[1];
            one.attend.count = std::min<Index>(most_tokens, row[1] - tile[1]);
            one.attend.position = row[2] + tile[1];
            one.attend.length = row[2] + row[1];
            one.attend.kv_head = task % groups;
            one.attend.scratch = scratch() + thread * each;
            kernels_.latent_attend(one);
        });
    });
}

}  // namespace cairn
