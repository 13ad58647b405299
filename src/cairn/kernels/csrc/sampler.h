// What is asked of lines of logits, and who answers. The meaning is kernels/sampling.py, to the bit: every number here
// is made by the steps stated there, sums are of integers, and nothing is fused.
#pragma once

#include <memory>
#include <vector>

#include "kernel.h"
#include "matrix.h"
#include "team.h"

namespace cairn {

constexpr Index CHUNK = 1024;   // numbers whose weights are summed together
constexpr Index STRIPE = 64;     // numbers of which one maximum is kept
constexpr Index BUCKETS = 1024;  // of values, in the search for top-p's last token
constexpr std::int64_t ONE = std::int64_t{1} << 40;
constexpr float LOWEST = -44.0f;  // what is below weighs nothing

struct Peak {
    float value;
    Index at;  // the lowest of those with this value
    bool finite, nan;
};

// Value and id in one number: a larger one ranks earlier. A zero's sign does not count.
inline std::uint64_t key_of(float value, std::uint32_t id) {
    value += 0.0f;
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<std::uint64_t>(bits) << 32 | (0xffffffffu - id);
}
inline float value_of(std::uint64_t key) {
    auto bits = static_cast<std::uint32_t>(key >> 32);
    bits = bits & 0x80000000u ? bits & 0x7fffffffu : ~bits;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
inline std::int32_t id_of(std::uint64_t key) {
    return static_cast<std::int32_t>(0xffffffffu - static_cast<std::uint32_t>(key));
}

// Passes over one line, compiled once for each instruction set: see logit_passes.h. n >= 1.
struct Passes {
    Peak (*peak)(const float* x, Index n);
    void (*relate)(const float* x, Index n, float peak, float divisor, float* out);  // out = (x - peak) / divisor
    // The same of the numbers that a mask allows, side by side in their order; `finite` is of all, `at` a place in x.
    // What is packed, so many numbers of it, may be followed by up to LANES others, within n rounded up.
    Peak (*allowed_peak)(const float* x, Index n, const unsigned char* mask);
    Index (*pack)(const float* x, Index n, const unsigned char* mask, float peak, float divisor, float* out);
    Index (*place)(const unsigned char* mask, Index packed);  // where in x such a number comes from
    void (*maxima)(const float* x, Index n, float* out);                             // of each STRIPE
    Index (*gather)(const float* x, Index n, float least, std::uint64_t* keys);      // of those >= least, ids rising
    // Weights of those x - shift that are >= least, summed over each CHUNK; returns the whole.
    std::int64_t (*weigh)(const float* x, Index n, float shift, float least, std::int64_t* sums);
    void (*weights)(const float* x, Index n, float least, std::int64_t* out);  // one by one; 0 below
    // The same in BUCKETS (and room for as many) of values, x in bucket -x * factor; and what is in one of them.
    void (*tally)(const float* x, Index n, float least, float factor, std::int64_t* sums);
    Index (*bucket)(const float* x, Index n, float least, float factor, Index which, std::uint64_t* keys);
};

// One line's question. Spans index the sampler's lists.
struct Ask {
    const float* logits;
    bool draw;
    Index top;           // how many of the raw distribution; -1: nothing of it
    float divisor;       // temperature; 0 is greedy
    Index top_k;         // 0: all
    double top_p;        // 1: all
    float least;         // min-p's log; -inf: all
    float repetition, presence, frequency;
    bool late;           // the cuts look at the distribution before the temperature
    std::uint64_t bits;  // 53, of the draw
    Index bias, bias_end, banned, banned_end, seen, generated, seen_end;
    const unsigned char* mask;  // a bit a token that may come, in words of 32; null: all

    bool cuts_k(Index vocab) const { return 0 < top_k && top_k < vocab; }
    bool adjusts() const { return bias != bias_end || banned != banned_end || seen != seen_end; }
};

enum Verdict : std::int64_t { NOT_FINITE = -1, NOTHING_LEFT = -2, NOT_ASKED = -3 };

// What a line gave: a token or why there is none, and where asked for the raw distribution.
struct Told {
    std::int64_t token, mass;
    float peak;
};

class Sampler {
  public:
    // Memory for the lines of one step a thread, `vocab` numbers each; it becomes real where it is used.
    Sampler(const Variant& kernels, std::shared_ptr<Team> team, Index vocab);

    // The asks of one step: lists are filled, then `run` answers them. Kept between steps, so that none allocates.
    std::vector<Ask> asks;
    std::vector<std::int32_t> ids;  // what biases, bans and histories name
    std::vector<float> biases;      // beside `ids`
    std::vector<Told> told;
    std::vector<std::int32_t> tops;  // [asks, top_width]
    Index top_width = 0;

    Index vocab() const { return vocab_; }
    void greedy(const float* logits, Index count, std::int64_t* tokens) const;
    // Not safe from two threads at once.
    void run();

  private:
    // `line` is of `count` numbers: those of all tokens, or of the ones that a mask allows alone. Places in it rank as
    // their ids do, and what is left out would weigh nothing.
    struct Room {
        Index count;
        float *line, *maxima;
        std::int64_t *sums, *buckets, *chunk;
        std::int32_t* counts;
        std::uint64_t* keys;
    };
    // What the cuts keep: its mass, and the key of the last token, before which all others rank.
    struct Kept {
        std::int64_t mass;
        std::uint64_t last;
    };
    // With it, how buckets were made of values, and which of them is sorted, with so many keys; -1: none.
    struct Nucleus {
        Kept kept;
        float least, factor;
        Index sorted, count;
    };

    Told answer(Index number, Room room);
    void number_allowed(const Ask& ask, const Room& room);
    void adjust(const Ask& ask, float* line, std::int32_t* counts) const;
    std::int64_t draw(const Ask& ask, const Room& room) const;
    std::int64_t draw_whole(const Ask& ask, float least, const Room& room) const;
    std::int64_t draw_late(const Ask& ask, const Room& room) const;
    Kept keep_ranked(const Ask& ask, const Room& room) const;
    std::int64_t draw_ranked(const Ask& ask, const Room& room) const;
    Index sort_bucket(const Nucleus& nucleus, Index which, const Room& room) const;
    Nucleus keep_nucleus(const Ask& ask, const Room& room) const;
    std::int64_t draw_nucleus(const Ask& ask, const Room& room) const;
    void highest(const float* line, Index n, Index count, const Room& room) const;
    template <class F>
    void each_weight(Index count, const Room& room, F&& f) const;

    const Passes& passes_;
    std::shared_ptr<Team> team_;
    Index vocab_;
    std::vector<Room> rooms_;
    Aligned memory_;
};

}  // namespace cairn
