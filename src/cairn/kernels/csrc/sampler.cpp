#include "sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <new>

#include "elementary.h"

namespace cairn {
namespace {

constexpr float ALL = -std::numeric_limits<float>::infinity();

constexpr std::greater<std::uint64_t> FALLING;
constexpr std::uint32_t ANY_ID = 0xffffffffu;  // of a key: that of its value which ranks last

// Where the draw falls among so much mass.
std::int64_t part(std::uint64_t bits, std::int64_t mass) {
    return static_cast<std::int64_t>(static_cast<unsigned __int128>(bits) * static_cast<std::uint64_t>(mass) >> 53);
}
// A token stays while the mass before it is short of this.
std::int64_t short_of(double top_p, std::int64_t mass) {
    const double wanted = top_p * static_cast<double>(mass);
    const auto whole = static_cast<std::int64_t>(wanted);
    return static_cast<double>(whole) < wanted ? whole + 1 : whole;
}

constexpr Index lined(Index bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

Sampler::Sampler(const Variant& kernels, std::shared_ptr<Team> team, Index vocab)
    : passes_(*kernels.passes), team_(std::move(team)), vocab_(vocab), rooms_(static_cast<std::size_t>(team_->size())) {
    const Index groups = (vocab + STRIPE * LANES - 1) / (STRIPE * LANES) * LANES, chunks = (vocab + CHUNK - 1) / CHUNK;
    const Index sizes[] = {lined(vocab * 4), lined(groups * 4), lined(chunks * 8), lined(2 * BUCKETS * 8),
                           lined(CHUNK * 8), lined(vocab * 4),  lined(vocab * 8)};
    Index each = 0;
    for (const Index size : sizes) each += size;
    // Fresh pages of zeros: a thread that never samples takes none.
    memory_ = Aligned(static_cast<std::byte*>(std::calloc(static_cast<std::size_t>(each * team_->size() + 64), 1)));
    if (!memory_) throw std::bad_alloc();
    std::byte* at = memory_.get() + (64 - reinterpret_cast<std::uintptr_t>(memory_.get()) % 64);
    for (Room& room : rooms_) {
        std::byte* places[7];
        for (int i = 0; i < 7; i++) places[i] = at, at += sizes[i];
        room.line = reinterpret_cast<float*>(places[0]), room.maxima = reinterpret_cast<float*>(places[1]);
        room.sums = reinterpret_cast<std::int64_t*>(places[2]), room.buckets = reinterpret_cast<std::int64_t*>(places[3]);
        room.chunk = reinterpret_cast<std::int64_t*>(places[4]);
        room.counts = reinterpret_cast<std::int32_t*>(places[5]);
        room.keys = reinterpret_cast<std::uint64_t*>(places[6]);
    }
}

void Sampler::greedy(const float* logits, Index count, std::int64_t* tokens) const {
    team_->run(count, [&](Index line, int) {
        const Peak peak = passes_.peak(logits + line * vocab_, vocab_);
        tokens[line] = peak.finite ? peak.at : static_cast<std::int64_t>(NOT_FINITE);
    });
}

void Sampler::run() {
    team_->run(static_cast<Index>(asks.size()), [&](Index number, int thread) {
        told[static_cast<std::size_t>(number)] = answer(number, rooms_[static_cast<std::size_t>(thread)]);
    });
}

// `room` is a copy: what its line holds is this ask's.
Told Sampler::answer(Index number, Room room) {
    const Ask& ask = asks[static_cast<std::size_t>(number)];
    const bool masked = ask.draw && ask.mask;
    Peak peak = masked ? passes_.allowed_peak(ask.logits, vocab_, ask.mask) : passes_.peak(ask.logits, vocab_);
    if (!peak.finite) return {NOT_FINITE, 0, 0};
    Told told = {NOT_ASKED, 0, peak.value};
    if (masked && ask.top >= 0) told.peak = passes_.peak(ask.logits, vocab_).value;
    if (ask.top >= 0) {
        told.mass = passes_.weigh(ask.logits, vocab_, told.peak, ALL, room.sums);
        const Index count = std::min(ask.top, vocab_);
        highest(ask.logits, vocab_, count, room);
        std::sort(room.keys, room.keys + count, FALLING);
        for (Index i = 0; i < count; i++)
            tops[static_cast<std::size_t>(number * top_width + i)] = id_of(room.keys[i]);
    }
    if (!ask.draw) return told;
    const float* line = ask.logits;
    bool packed = false;  // whether tokens are known by their places among those that the mask allows
    room.count = vocab_;
    if (ask.adjusts()) {
        line = room.line, packed = masked;
        if (masked) {
            room.count = passes_.pack(ask.logits, vocab_, ask.mask, 0, 1, room.line);
            number_allowed(ask, room);
        } else std::memcpy(room.line, ask.logits, static_cast<std::size_t>(vocab_) * 4);
        adjust(ask, room.line, room.counts);
        peak = room.count ? passes_.peak(line, room.count) : Peak{ALL, 0, true, false};
    }
    if (peak.nan || !std::isfinite(peak.value)) {
        told.token = NOTHING_LEFT;
        return told;
    }
    told.token = peak.at;
    if (ask.divisor > 0) {
        const float divisor = ask.late ? 1.0f : ask.divisor;
        if (masked && !packed) {
            room.count = passes_.pack(line, vocab_, ask.mask, peak.value, divisor, room.line);
            packed = true;
        } else passes_.relate(line, room.count, peak.value, divisor, room.line);
        told.token = draw(ask, room);
    }
    if (packed) told.token = passes_.place(ask.mask, told.token);
    return told;
}

// Of the ids that the ask names makes their places among those that are allowed. The others get the place behind the
// line, where nobody looks: none of them can come, whatever is done to it.
void Sampler::number_allowed(const Ask& ask, const Room& room) {
    if (ask.bias == ask.seen_end) return;
    const auto word_of = [&](Index word) {
        std::uint32_t bits;
        std::memcpy(&bits, ask.mask + word * 4, 4);
        return bits;
    };
    const Index words = (vocab_ + 31) / 32;
    std::uint64_t before = 0;
    for (Index word = 0; word < words; word++) {
        room.keys[word] = before;
        before += static_cast<std::uint64_t>(std::popcount(word_of(word)));
    }
    for (Index i = ask.bias; i < ask.seen_end; i++) {
        const std::int32_t word = ids[i] / 32, bit = ids[i] % 32;
        const std::uint32_t bits = word_of(word), lower = (1u << bit) - 1;
        const auto place = static_cast<std::int32_t>(room.keys[word]) + std::popcount(bits & lower);
        ids[i] = bits >> bit & 1 ? place : static_cast<std::int32_t>(room.count);
    }
}

void Sampler::adjust(const Ask& ask, float* line, std::int32_t* counts) const {
    for (Index i = ask.bias; i < ask.bias_end; i++) line[ids[i]] += biases[i];
    if (ask.repetition != 1.0f) {
        for (Index i = ask.seen; i < ask.seen_end; i++) {
            float& value = line[ids[i]];
            if (!counts[ids[i]]) value = value > 0 ? value / ask.repetition : value * ask.repetition;
            counts[ids[i]] = 1;
        }
        for (Index i = ask.seen; i < ask.seen_end; i++) counts[ids[i]] = 0;
    }
    if (ask.presence != 0.0f || ask.frequency != 0.0f) {
        for (Index i = ask.generated; i < ask.seen_end; i++) counts[ids[i]]++;
        for (Index i = ask.generated; i < ask.seen_end; i++) {
            if (!counts[ids[i]]) continue;
            const float times = static_cast<float>(counts[ids[i]]);
            line[ids[i]] -= ask.frequency * times + ask.presence;
            counts[ids[i]] = 0;
        }
    }
    for (Index i = ask.banned; i < ask.banned_end; i++) line[ids[i]] = ALL;
}

// The goal of each draw lies below the mass, so the searches end, on a token that weighs something.
std::int64_t Sampler::draw(const Ask& ask, const Room& room) const {
    if (ask.late) return draw_late(ask, room);
    if (ask.cuts_k(vocab_)) return draw_ranked(ask, room);
    if (ask.top_p < 1) return draw_nucleus(ask, room);
    return draw_whole(ask, ask.least, room);
}

std::int64_t Sampler::draw_whole(const Ask& ask, float least, const Room& room) const {
    std::int64_t goal = part(ask.bits, passes_.weigh(room.line, room.count, 0, least, room.sums));
    Index chunk = 0, at = 0;
    while (goal >= room.sums[chunk]) goal -= room.sums[chunk++];
    const Index from = chunk * CHUNK;
    passes_.weights(room.line + from, std::min(CHUNK, room.count - from), least, room.chunk);
    while (goal >= room.chunk[at]) goal -= room.chunk[at++];
    return from + at;
}

// The line is not divided by the temperature yet: that comes after the cuts, for what they keep.
std::int64_t Sampler::draw_late(const Ask& ask, const Room& room) const {
    std::uint64_t last = key_of(ask.least, ANY_ID);
    if (ask.cuts_k(vocab_)) last = keep_ranked(ask, room).last;
    else if (ask.top_p < 1) last = keep_nucleus(ask, room).kept.last;
    for (Index i = 0; i < room.count; i++) {
        float& value = room.line[i];
        value = key_of(value, static_cast<std::uint32_t>(i)) >= last ? value / ask.divisor : ALL;
    }
    return draw_whole(ask, ALL, room);
}

// Of the `top_k` highest tokens, whose keys are then sorted.
Sampler::Kept Sampler::keep_ranked(const Ask& ask, const Room& room) const {
    const Index count = std::min(ask.top_k, room.count);
    highest(room.line, room.count, count, room);
    std::sort(room.keys, room.keys + count, FALLING);
    std::int64_t mass = 0;
    each_weight(count, room, [&](std::uint64_t, std::int64_t weight) {
        mass += weight;
        return true;
    });
    const std::int64_t enough = ask.top_p < 1 ? short_of(ask.top_p, mass) : mass + 1;
    Kept kept = {0, 0};
    each_weight(count, room, [&](std::uint64_t key, std::int64_t weight) {
        if (value_of(key) < ask.least) return false;
        kept = {kept.mass + weight, key};
        return kept.mass < enough;
    });
    return kept;
}

std::int64_t Sampler::draw_ranked(const Ask& ask, const Room& room) const {
    std::int64_t goal = part(ask.bits, keep_ranked(ask, room).mass), token = 0;
    each_weight(std::min(ask.top_k, room.count), room, [&](std::uint64_t key, std::int64_t weight) {
        token = id_of(key), goal -= weight;
        return goal >= 0;
    });
    return token;
}

// The keys of one bucket, in order; how many.
Index Sampler::sort_bucket(const Nucleus& nucleus, Index which, const Room& room) const {
    const Index count = passes_.bucket(room.line, room.count, nucleus.least, nucleus.factor, which, room.keys);
    // Equal values are in order already.
    if (!std::is_sorted(room.keys, room.keys + count, FALLING)) std::sort(room.keys, room.keys + count, FALLING);
    return count;
}

// Tokens are sorted only within the bucket of values that top-p ends in, and the one that the draw falls into.
Sampler::Nucleus Sampler::keep_nucleus(const Ask& ask, const Room& room) const {
    const std::int64_t mass = passes_.weigh(room.line, room.count, 0, ALL, room.sums);
    const std::int64_t enough = short_of(ask.top_p, mass);
    // All that weigh less than this are together less than the tail that is cut; if rounding says otherwise, all count.
    const double tail = static_cast<double>(mass) / static_cast<double>(ONE) * (1 - ask.top_p) / static_cast<double>(room.count);
    const float likely = std::max(LOWEST, std::min(0.0f, log_of(static_cast<float>(tail)) - 0.01f));
    Nucleus found = {};
    Kept& kept = found.kept;
    for (const float bound : {likely, LOWEST}) {
        found.least = std::max(bound, ask.least);
        found.factor = static_cast<float>(BUCKETS - 1) / std::max(-found.least, 1e-3f);
        passes_.tally(room.line, room.count, found.least, found.factor, room.buckets);
        found.sorted = -1, kept = {0, key_of(found.least, ANY_ID)};
        for (Index which = 0; which < BUCKETS && found.sorted < 0; which++) {
            if (kept.mass + room.buckets[which] < enough) {
                kept.mass += room.buckets[which];
                continue;
            }
            found.count = sort_bucket(found, which, room), found.sorted = which;
            each_weight(found.count, room, [&](std::uint64_t key, std::int64_t weight) {
                kept = {kept.mass + weight, key};
                return kept.mass < enough;
            });
        }
        if (found.sorted >= 0 || found.least == ask.least) break;
    }
    return found;
}

std::int64_t Sampler::draw_nucleus(const Ask& ask, const Room& room) const {
    const Nucleus found = keep_nucleus(ask, room);
    std::int64_t goal = part(ask.bits, found.kept.mass), token = 0;
    Index which = 0;
    while (goal >= room.buckets[which]) goal -= room.buckets[which++];
    const Index count = which == found.sorted ? found.count : sort_bucket(found, which, room);
    each_weight(count, room, [&](std::uint64_t key, std::int64_t weight) {
        token = id_of(key), goal -= weight;
        return goal >= 0;
    });
    return token;
}

// f(key, its weight) for the first `count` keys, until it says no.
template <class F>
void Sampler::each_weight(Index count, const Room& room, F&& f) const {
    float values[CHUNK];
    for (Index from = 0; from < count; from += CHUNK) {
        const Index some = std::min(CHUNK, count - from);
        for (Index i = 0; i < some; i++) values[i] = value_of(room.keys[from + i]);
        passes_.weights(values, some, ALL, room.chunk);
        for (Index i = 0; i < some; i++)
            if (!f(room.keys[from + i], room.chunk[i])) return;
    }
}

// The first `count` keys are then those of the highest of n tokens, the last of them in its place.
void Sampler::highest(const float* line, Index n, Index count, const Room& room) const {
    if (!count) return;
    const Index groups = (n + STRIPE * LANES - 1) / (STRIPE * LANES) * LANES;
    float least = ALL;
    if (count <= groups) {
        // The count-th highest of any so many distinct tokens is a lower bound: take the maxima of groups.
        passes_.maxima(line, n, room.maxima);
        std::nth_element(room.maxima, room.maxima + count - 1, room.maxima + groups, std::greater<float>());
        least = room.maxima[count - 1];
    }
    const Index found = passes_.gather(line, n, least, room.keys);
    std::nth_element(room.keys, room.keys + count - 1, room.keys + found, FALLING);
}

}  // namespace cairn
