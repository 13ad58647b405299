// Compares the bits of kernels' variants, across machines: `bits write FILE VARIANT` keeps what a variant computes, and
// `bits compare FILE VARIANT...` computes the same cases with others and says where bits differ.
//
// Inputs come from integers by exact steps, so every machine has the same. A NaN equals any other: which one comes out is
// the machine's choice. Cases go over every form of weights and of KV, and over sizes that fill no tile and no vector.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "elementary.h"
#include "matrix.h"
#include "sampler.h"

#define CAIRN_DECLARE(name)        \
    namespace cairn::name {        \
    extern const Variant variant; \
    }
CAIRN_DECLARE(portable)
CAIRN_DECLARE(avx2)
CAIRN_DECLARE(avxvnni)
CAIRN_DECLARE(avx512vnni)
CAIRN_DECLARE(avx512)
CAIRN_DECLARE(neon)
CAIRN_DECLARE(neoni8mm)

namespace cairn {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Numbers = std::vector<float>;

// The same numbers everywhere.
class Source64 {
  public:
    explicit Source64(std::uint64_t seed) : state_(seed) {}

    std::uint64_t next() {
        std::uint64_t x = state_ += 0x9e3779b97f4a7c15;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
        x = (x ^ x >> 27) * 0x94d049bb133111eb;
        return x ^ x >> 31;
    }
    int below(int count) { return static_cast<int>(next() >> 33) % count; }
    // About normal: the sum of four numbers of 16 bits.
    float number(float scale = 1.0f) {
        const std::uint64_t x = next();
        std::int64_t sum = 0;
        for (int i = 0; i < 4; i++) sum += static_cast<std::int64_t>(x >> 16 * i & 0xffff) - 32768;
        return static_cast<float>(sum) * 0x1p-15f * scale;
    }
    Numbers numbers(Index count, float scale = 1.0f) {
        Numbers all(static_cast<std::size_t>(count));
        for (float& one : all) one = number(scale);
        return all;
    }
    // Halves from 2^-9 to 2^-7, either sign.
    std::uint16_t half() { return static_cast<std::uint16_t>((6 + below(3)) << 10 | below(1024) | below(2) << 15); }

  private:
    std::uint64_t state_;
};

// Where results go: to a file, or beside those of a file.
class Results {
  public:
    Results(std::FILE* file, bool compare) : file_(file), compare_(compare) {}

    void floats(const std::string& name, const float* x, Index count) {
        Numbers all(x, x + count);
        for (float& one : all)
            if (one != one) one = __builtin_nanf("");
        bytes(name, all.data(), all.size() * sizeof(float), true);
    }
    void floats(const std::string& name, const Numbers& x) { floats(name, x.data(), static_cast<Index>(x.size())); }

    void bytes(const std::string& name, const void* data, std::size_t size, bool floats = false) {
        count_++;
        if (!compare_) {
            const std::uint64_t sizes[2] = {name.size(), size};
            std::fwrite(sizes, sizeof sizes, 1, file_);
            std::fwrite(name.data(), 1, name.size(), file_);
            std::fwrite(data, 1, size, file_);
            return;
        }
        std::uint64_t sizes[2] = {};
        if (std::fread(sizes, sizeof sizes, 1, file_) != 1) return fail(name, "the file ends before it");
        std::string known(sizes[0], ' ');
        Bytes held(sizes[1]);
        if (std::fread(known.data(), 1, known.size(), file_) != known.size() ||
            std::fread(held.data(), 1, held.size(), file_) != held.size())
            return fail(name, "the file ends in it");
        if (known != name || held.size() != size) return fail(name, "the file has " + known + " in its place");
        const auto* ours = static_cast<const std::uint8_t*>(data);
        for (std::size_t i = 0; i < size; i++) {
            if (held[i] == ours[i]) continue;
            char text[128];
            const std::size_t at = i / 4;
            float theirs, here;
            if (floats) {
                std::memcpy(&theirs, held.data() + 4 * at, 4), std::memcpy(&here, ours + 4 * at, 4);
                std::snprintf(text, sizeof text, "number %zu is %.9g (%a), not %.9g (%a)", at, here, here, theirs, theirs);
            } else {
                std::snprintf(text, sizeof text, "byte %zu is %d, not %d", i, ours[i], held[i]);
            }
            return fail(name, text);
        }
    }
    int count() const { return count_; }
    int failed() const { return failed_; }

  private:
    void fail(const std::string& name, const std::string& why) {
        if (failed_++ < 20) std::printf("  %s: %s\n", name.c_str(), why.c_str());
    }

    std::FILE* file_;
    bool compare_;
    int count_ = 0, failed_ = 0;
};

template <class... Parts>
std::string named(const char* what, Parts... parts) {
    std::string name = what;
    ((name += ' ', name += std::to_string(parts)), ...);
    return name;
}

// A matrix of one part. Everything that it is packed of is kept beside it.
struct Weights {
    Bytes data, scales, minima, block_scales, block_minima;
    Numbers bias;
    Source source = {};

    Weights(Source64& random, Form form, bool half, bool minimum, Index out, Index inner) {
        source.form = form, source.half = half, source.minimum = minimum, source.out = out, source.inner = inner;
        bias = random.numbers(out);
        const Index groups = inner / GROUP, blocks = inner / SUPER;
        if (form == Form::f32 || form == Form::f16 || form == Form::bf16) {
            for (Index i = 0; i < out * inner; i++) {
                const float x = random.number(0.25f);
                std::uint32_t bits;
                std::memcpy(&bits, &x, 4);
                const std::uint16_t narrow = form == Form::f16 ? random.half() : static_cast<std::uint16_t>(bits >> 16);
                add(data, form == Form::f32 ? static_cast<const void*>(&bits) : &narrow, form == Form::f32 ? 4 : 2);
            }
        } else if (const Index bytes = row_block_bytes(form)) {
            for (Index i = 0; i < out * blocks; i++) {
                const std::uint16_t scale = random.half();
                add(data, &scale, 2);
                for (Index byte = 2; byte < bytes; byte++) data.push_back(static_cast<std::uint8_t>(random.next() >> 40));
            }
        } else {
            for (Index i = 0; i < out * inner; i++) data.push_back(code(random, form));
            const bool in_blocks = form == Form::q4_k || form == Form::q5_k || form == Form::q6_k || form == Form::iq4_xs;
            for (Index i = 0; !in_blocks && i < out * groups; i++)
                number(random, scales, half), minimum ? number(random, minima, half) : void();
            for (Index i = 0; in_blocks && i < out * groups * (form == Form::q6_k ? 2 : 1); i++) {
                scales.push_back(static_cast<std::uint8_t>(form == Form::q6_k     ? random.below(256)
                                                           : form == Form::iq4_xs ? random.below(64) - 32
                                                                                  : random.below(64)));
                minima.push_back(static_cast<std::uint8_t>(random.below(64)));
            }
            for (Index i = 0; in_blocks && i < out * blocks; i++)
                number(random, block_scales, true), number(random, block_minima, true);
            if (in_blocks) source.half = true, source.minimum = form == Form::q4_k || form == Form::q5_k;
        }
        source.data = data.data(), source.scales = scales.data(), source.minima = minima.data();
        source.block_scales = block_scales.data(), source.block_minima = block_minima.data();
    }

  private:
    static void add(Bytes& to, const void* from, std::size_t size) {
        const auto* at = static_cast<const std::uint8_t*>(from);
        to.insert(to.end(), at, at + size);
    }
    static void number(Source64& random, Bytes& to, bool half) {
        const std::uint16_t narrow = random.half();
        const float wide = random.number(0.01f);
        half ? add(to, &narrow, 2) : add(to, &wide, 4);
    }
    static std::uint8_t code(Source64& random, Form form) {
        if (const std::uint8_t* values = values_of(form))
            return static_cast<std::uint8_t>(values[random.below(CODEBOOK)] ^ 0x80);
        const int codes = form == Form::q6_k ? 64 : form == Form::q5_k ? 32 : form == Form::int8 ? 256 : 16;
        return static_cast<std::uint8_t>(random.below(codes));
    }
};

// x[rows, inner] @ matrix, with x rounded as the matrix's parts want it.
void multiply(Results& to, const std::string& name, const Variant& kernels, const Matrix& matrix, const Numbers& x,
              Index rows, bool add) {
    const MatrixView view = matrix.view();
    const Index stride = static_cast<Index>(x.size()) / rows;
    Aligned groups = allocate(static_cast<std::size_t>(rows * Activations::group_bytes(view.inner) + 64));
    Activations in = {x.data(), stride, rows, view.inner, nullptr, nullptr};
    if (view.any([](const Segment& part) { return part.quantised(); })) in.groups = groups.get();
    kernels.prepare(in, {0, rows, 0, view.inner});
    Numbers out(static_cast<std::size_t>(rows * view.out), 0.5f);
    kernels.product({view, in, out.data(), view.out, add}, 0, view.panel_count());
    to.floats(name, out);
}

constexpr Index ROWS[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17, 33};

void products(Results& to, const Variant& kernels) {
    struct Kind {
        Form form;
        bool half, minimum;
    };
    const Kind kinds[] = {{Form::f32, false, false},     {Form::f16, false, false},    {Form::bf16, false, false},
                          {Form::int4, false, false},    {Form::int4, true, false},    {Form::int4, true, true},
                          {Form::int4, false, true},     {Form::int8, false, false},   {Form::int8, true, false},
                          {Form::int8, true, true},      {Form::int8, false, true},    {Form::fp4, true, false},
                          {Form::fp4, false, false},     {Form::iq4, true, false},     {Form::q4_k, true, true},
                          {Form::q5_k, true, true},      {Form::q6_k, true, false},    {Form::iq4_xs, true, false},
                          {Form::iq2_xxs, true, false},  {Form::iq2_xs, true, false},  {Form::iq2_s, true, false},
                          {Form::iq3_xxs, true, false},  {Form::iq3_s, true, false}};
    for (const Kind& kind : kinds) {
        const bool whole = kind.form == Form::f32 || kind.form == Form::f16 || kind.form == Form::bf16;
        const bool blocks = row_block_bytes(kind.form) || static_cast<int>(kind.form) == static_cast<int>(Form::iq4_xs) ||
                            kind.form == Form::q4_k || kind.form == Form::q5_k || kind.form == Form::q6_k;
        const std::vector<Index> sizes = whole    ? std::vector<Index>{1, 7, 32, 65}
                                         : blocks ? std::vector<Index>{256, 768}
                                                  : std::vector<Index>{32, 64, 96, 224};
        for (const Index inner : sizes) {
            for (const Index outputs : {1, 16, 23, 70}) {
                Source64 random(static_cast<std::uint64_t>(1000 * static_cast<int>(kind.form) + inner + outputs));
                const Weights weights(random, kind.form, kind.half, kind.minimum, outputs, inner);
                const Matrix matrix({weights.source}, outputs % 2 ? weights.bias : Numbers{});
                for (const Index rows : ROWS) {
                    Numbers x = random.numbers(rows * (inner + 3));
                    // Rows that count as zero, or are not finite, are taken for zero; nobody else's are.
                    if (rows > 4)
                        for (Index k = 0; k < inner; k++) x[static_cast<std::size_t>(2 * (inner + 3) + k)] *= 0x1p-120f;
                    if (rows > 5) x[static_cast<std::size_t>(3 * (inner + 3))] = __builtin_inff();
                    multiply(to,
                             named("product", static_cast<int>(kind.form), kind.half, kind.minimum, inner, outputs, rows),
                             kernels, matrix, x, rows, rows % 3 == 0);
                }
            }
        }
    }
    Source64 random(5);
    const Weights first(random, Form::q4_k, true, true, 19, 256), second(random, Form::q6_k, true, false, 40, 256),
        third(random, Form::bf16, false, false, 7, 256);
    const Matrix mixed({first.source, second.source, third.source}, {});
    for (const Index rows : ROWS) multiply(to, named("mixed product", rows), kernels, mixed, random.numbers(rows * 256), rows, false);
}

void codebook_blocks(Results& to, const Variant& kernels, const Form form, const Codebook& book) {
    Source64 random(static_cast<std::uint64_t>(form));
    Bytes block(static_cast<std::size_t>(row_block_bytes(form) * LANES));
    for (auto& one : block) one = static_cast<std::uint8_t>(random.next() >> 40);
    static RowBlock found;
    std::memset(&found, 0, sizeof found);
    kernels.decode_block(form, reinterpret_cast<const std::byte*>(block.data()), book, found);
    to.bytes(named("codes of a block", static_cast<int>(form)), found.codes, sizeof found.codes);
    to.bytes(named("scales of a block", static_cast<int>(form)), found.scale, sizeof found.scale);
    for (Index group = 0; group < SUPER / GROUP; group++)
        to.bytes(named("whole numbers", static_cast<int>(form), group), found.whole + group * 2 * LANES,
                 static_cast<std::size_t>(in_halves(form) ? 2 * LANES : LANES));
}

// Three or four magnitudes for rows of eight, eight for rows of four.
void set_codebooks() {
    for (const Form form : {Form::iq2_xxs, Form::iq2_xs, Form::iq2_s, Form::iq3_xxs, Form::iq3_s}) {
        Source64 random(77 + static_cast<std::uint64_t>(form));
        std::vector<std::byte> rows(row_count(form) * (in_eights(form) ? 8 : 4));
        constexpr int EIGHTS[] = {8, 25, 43, 62}, FOURS[] = {4, 12, 20, 28, 36, 44, 52, 62};
        for (auto& one : rows) one = static_cast<std::byte>(in_eights(form) ? EIGHTS[random.below(4)] : FOURS[random.below(8)]);
        set_codebook(form, rows.data(), rows.size());
    }
}

void rows_of_numbers(Results& to, const Variant& kernels) {
    for (const Index size : {1, 5, 16, 31, 48, 100, 257}) {
        Source64 random(static_cast<std::uint64_t>(size));
        const Numbers x = random.numbers(size, 3.0f), y = random.numbers(size, 3.0f), weight = random.numbers(size),
                      bias = random.numbers(size);
        Numbers out(x.size());
        const auto told = [&](const char* what, int kind = 0) { to.floats(named(what, size, kind), out); };
        kernels.norm(x.data(), weight.data(), size, 1e-5f, 0, size, out.data()), told("norm");
        kernels.layer_norm(x.data(), weight.data(), bias.data(), size, 1e-5f, out.data()), told("layer_norm");
        kernels.layer_norm(x.data(), weight.data(), nullptr, size, 1e-5f, out.data()), told("layer_norm", 1);
        for (const auto kind : {Activation::silu, Activation::gelu_tanh, Activation::gelu, Activation::tanh,
                                Activation::clamped_silu, Activation::relu2}) {
            if (kind != Activation::clamped_silu)
                kernels.activate(x.data(), size, kind, out.data()), told("activate", static_cast<int>(kind));
            kernels.gate(x.data(), y.data(), size, kind, out.data()), told("gate", static_cast<int>(kind));
        }
        out = x, kernels.softcap(out.data(), size, 2.0f), told("softcap");
        out = x, kernels.gate_row(y.data(), size, out.data()), told("gate_row");
        for (const bool first : {false, true})
            kernels.gated_norm(x.data(), y.data(), weight.data(), size, 1e-6f, first, out.data()), told("gated_norm", first);
        for (const auto dtype : {Dtype::f32, Dtype::f16, Dtype::bf16})
            kernels.embed(x.data(), dtype, dtype == Dtype::f32 ? size : size / 2, out.data()), told("embed", static_cast<int>(dtype));
        for (const bool neighbours : {false, true})
            kernels.turn_pairs(x.data(), y.data(), weight.data(), size, neighbours, out.data()), told("turn_pairs", neighbours);

        Convolve job = {};
        for (int place = 0; place < 4; place++) job.seen[place] = place == 1 ? nullptr : x.data();
        job.times[2] = y.data(), job.bias = bias.data(), job.gate = size % 2 ? y.data() : nullptr;
        const Numbers taps = random.numbers(4 * size);
        job.weight = taps.data(), job.reach = 4, job.channels = size, job.silu = size % 3, job.out = out.data();
        kernels.convolve(job), told("convolve");
    }
    // Over all magnitudes, infinities and NaN among them.
    Numbers all;
    for (std::uint64_t bits = 0; bits < 1ull << 32; bits += 1000003) {
        const auto narrow = static_cast<std::uint32_t>(bits);
        float one;
        std::memcpy(&one, &narrow, 4);
        all.push_back(one);
    }
    Numbers out(all.size());
    for (const auto kind : {Activation::silu, Activation::gelu_tanh, Activation::gelu, Activation::tanh, Activation::relu2})
        kernels.activate(all.data(), static_cast<Index>(all.size()), kind, out.data()),
            to.floats(named("activate everything", static_cast<int>(kind)), out);
    using Function = float (*)(float);
    const Function functions[] = {exp_of, expm1_of, log_of, log1p_of, floor_of,
                                  [](float x) { return static_cast<float>(cos_sin_of(x).cos); },
                                  [](float x) { return static_cast<float>(cos_sin_of(x).sin); }};
    int number = 0;
    for (const Function function : functions) {
        for (std::size_t i = 0; i < all.size(); i++) out[i] = function(all[i]);
        to.floats(named("elementary", number++), out);
    }
}

void scans(Results& to, const Variant& kernels) {
    for (const Index keys : {8, 33})
        for (const Index values : {16, 40, 144})
            for (const bool corrected : {false, true}) {
                Source64 random(static_cast<std::uint64_t>(keys + values));
                const Numbers key = random.numbers(keys), query = random.numbers(keys), value = random.numbers(values);
                const Numbers from = random.numbers(keys * values);
                Numbers state(from.size()), out(value.size());
                kernels.scan({key.data(), query.data(), value.data(), 0.9f, 0.3f, corrected ? 0.0f : 0.7f, corrected, keys,
                              values, from.data(), state.data(), out.data()});
                to.floats(named("scan", keys, values, corrected), out);
                to.floats(named("state of a scan", keys, values, corrected), state);
            }
}

// Keys and values of `positions` tokens, written by the variant, and queries.
struct Context {
    Aligned pages;
    Pages kv = {};
    std::vector<std::int32_t> table;
    Numbers query;
    Index heads, positions;

    Context(Results& to, const Variant& kernels, Dtype dtype, Index size, Index kv_heads, Index fan, Index many)
        : heads(kv_heads * fan), positions(many) {
        const Index blocks = (many + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        kv = {nullptr, dtype, 1, 0, kv_heads, size};
        const auto bytes = static_cast<std::size_t>((blocks + 1) * 2 * kv_heads * kv.page_bytes());
        pages = allocate(bytes), kv.base = pages.get();
        for (Index i = 0; i < blocks; i++) table.push_back(static_cast<std::int32_t>(blocks - i));
        std::vector<std::int32_t> slots;
        for (Index i = 0; i < many; i++)
            slots.push_back(static_cast<std::int32_t>(table[static_cast<std::size_t>(i / BLOCK_TOKENS)] * BLOCK_TOKENS +
                                                      i % BLOCK_TOKENS));
        Source64 random(static_cast<std::uint64_t>(size + many));
        const Index turned = size >= 32 ? size / 2 : size;
        const Numbers qkv = random.numbers(many * (heads + 2 * kv_heads) * size), angles = random.numbers(many * turned, 0.5f);
        const Numbers q_norm = random.numbers(heads * size), k_norm = random.numbers(kv_heads * size);
        query.resize(static_cast<std::size_t>(many * heads * size));
        RopeWrite job = {qkv.data(), angles.data(), many % 2 ? q_norm.data() : nullptr, many % 2 ? k_norm.data() : nullptr,
                         1e-6f,      kv,            slots.data(), query.data(), heads, turned, many % 3 == 0, many % 3 == 0,
                         many % 5 == 0, false};
        for (Index token = 0; token < many; token++)
            for (Index head = 0; head < kv_heads; head++) kernels.rope_write(job, token, head);
        to.floats(named("turned queries", static_cast<int>(dtype), size, kv_heads, fan, many), query);
        to.bytes(named("written pages", static_cast<int>(dtype), size, kv_heads, fan, many), pages.get(), bytes);
    }
};

void attention(Results& to, const Variant& kernels) {
    struct How {
        Index window;
        float softcap;
        bool both, sinks;
    };
    const How ways[] = {{0, 0.0f, false, false}, {20, 0.0f, false, true}, {0, 3.0f, false, false}, {-32, 0.0f, false, false},
                        {24, 0.0f, true, false}};
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::q8})
        for (const Index size : {16, 24, 40, 128})
            for (const Index fan : {1, 3, 7})
                for (const Index positions : {1, 33, 75, 1100}) {
                    if (positions > 1000 && (fan != 3 || size != 40)) continue;
                    const Context context(to, kernels, dtype, size, 2, fan, positions);
                    Source64 random(99);
                    const Numbers sinks = random.numbers(context.heads);
                    Numbers scratch(static_cast<std::size_t>(attend_scratch(fan, size) + 16));
                    for (const How& how : ways) {
                        Numbers out(context.query.size());
                        for (Index first = 0; first < positions;) {
                            const Index most = attend_tokens(fan), left = positions - first;
                            const Index count = first % 3 == 0 && left >= most ? most : 1;
                            for (Index head = 0; head < 2; head++) {
                                Attend job = {};
                                job.query = context.query.data(), job.kv = context.kv, job.table = context.table.data();
                                job.window = how.window, job.heads = context.heads, job.scale = 0.15f;
                                job.softcap = how.softcap, job.sinks = how.sinks ? sinks.data() : nullptr;
                                job.out = out.data(), job.first = first, job.count = count, job.position = first;
                                job.both = how.both, job.length = positions, job.kv_head = head, job.scratch = scratch.data();
                                kernels.attend(job);
                            }
                            first += count;
                            if (positions > 1000 && first < positions - 60) first = positions - 60;
                        }
                        to.floats(named("attention", static_cast<int>(dtype), size, fan, positions, how.window, how.both,
                                        how.sinks, how.softcap != 0.0f), out);
                    }
                }
}

void latents(Results& to, const Variant& kernels) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::q8})
        for (const Index rank : {24, 64})
            for (const Index fan : {1, 5, 16})
                for (const Index positions : {19, 90}) {
                    const Index turned = 8, size = rank + turned, blocks = (positions + 15) / 16;
                    const auto bytes = static_cast<std::size_t>((blocks + 1) * BLOCK_TOKENS * (size * 4 + 8));
                    const Aligned pages = allocate(bytes);
                    Source64 random(static_cast<std::uint64_t>(rank + positions));
                    const Numbers x = random.numbers(positions * size), angles = random.numbers(positions * turned);
                    const Numbers norm = random.numbers(rank), query = random.numbers(positions * fan * size);
                    std::vector<std::int32_t> table, slots;
                    for (Index i = 0; i < blocks; i++) table.push_back(static_cast<std::int32_t>(i + 1));
                    for (Index i = 0; i < positions; i++) slots.push_back(static_cast<std::int32_t>(i + BLOCK_TOKENS));
                    const Pages kv = {pages.get(), dtype, 1, 0, 1, size};
                    const LatentWrite write = {x.data(), angles.data(), norm.data(), 1e-6f, kv, slots.data(), turned, fan == 1};
                    for (Index token = 0; token < positions; token++) kernels.latent_write(write, token);
                    const auto name = [&](const char* what) { return named(what, static_cast<int>(dtype), rank, fan, positions); };
                    to.bytes(name("latents"), pages.get(), bytes);
                    Numbers out(static_cast<std::size_t>(positions * fan * rank));
                    Numbers scratch(static_cast<std::size_t>(attend_scratch(fan, size) + 16));
                    for (Index first = 0; first < positions; first += attend_tokens(fan)) {
                        LatentAttend job = {};
                        job.attend.query = query.data(), job.attend.kv = kv, job.attend.table = table.data();
                        job.attend.heads = fan, job.attend.scale = 0.2f, job.attend.out = out.data();
                        job.attend.first = job.attend.position = first, job.attend.length = positions;
                        job.attend.count = positions - first < attend_tokens(fan) ? positions - first : attend_tokens(fan);
                        job.attend.scratch = scratch.data(), job.rank = rank;
                        kernels.latent_attend(job);
                    }
                    to.floats(name("attention over latents"), out);
                }
}

void vocabulary(Results& to, const Variant& kernels) {
    const Passes& passes = *kernels.passes;
    for (const Index n : {1, 17, 64, 1000, 5003}) {
        Source64 random(static_cast<std::uint64_t>(n));
        const Numbers x = random.numbers(n, 4.0f);
        const auto room = static_cast<std::size_t>(n + 2 * STRIPE * LANES);
        Numbers line(room);
        std::vector<std::int64_t> sums(room + 2 * BUCKETS);
        std::vector<std::uint64_t> keys(room);
        Bytes mask(static_cast<std::size_t>(n / 8 + 8));
        for (Index i = 0; i < n; i++)
            if (random.below(3)) mask[static_cast<std::size_t>(i / 8)] |= static_cast<std::uint8_t>(1 << i % 8);
        mask[0] |= 1;
        const auto whole = [&](const char* what, const auto& from, Index count) {
            to.bytes(named(what, n), from.data(), static_cast<std::size_t>(count) * sizeof from[0]);
        };
        const auto one = [&](const char* what, std::int64_t number) { to.bytes(named(what, n), &number, sizeof number); };
        const Peak peak = passes.peak(x.data(), n), allowed = passes.allowed_peak(x.data(), n, mask.data());
        one("peak", peak.at), one("finite", peak.finite), one("allowed", allowed.at);
        passes.relate(x.data(), n, peak.value, 0.7f, line.data()), to.floats(named("related", n), line.data(), n);
        const Numbers related(line.begin(), line.begin() + n);
        one("weighed", passes.weigh(related.data(), n, 0.0f, LOWEST, sums.data()));
        whole("sums of weights", sums, (n + CHUNK - 1) / CHUNK);
        passes.weights(related.data(), n, -6.0f, sums.data()), whole("weights", sums, n);
        passes.tally(related.data(), n, -20.0f, 51.0f, sums.data()), whole("tally", sums, BUCKETS);
        whole("bucket", keys, passes.bucket(related.data(), n, -20.0f, 51.0f, 200, keys.data()));
        whole("gathered", keys, passes.gather(related.data(), n, -5.0f, keys.data()));
        passes.maxima(x.data(), n, line.data());
        to.floats(named("maxima", n), line.data(), (n + STRIPE * LANES - 1) / (STRIPE * LANES) * LANES);
        const Index packed = passes.pack(x.data(), n, mask.data(), allowed.value, 0.7f, line.data());
        to.floats(named("packed", n), line.data(), packed), one("place", passes.place(mask.data(), packed - 1));
    }
}

void everything(Results& to, const Variant& kernels) {
    rows_of_numbers(to, kernels);
    for (const Form form : {Form::iq2_xxs, Form::iq2_xs, Form::iq2_s, Form::iq3_xxs, Form::iq3_s}) {
        Source64 random(1);
        const Weights weights(random, form, true, false, 16, SUPER);
        const Matrix matrix({weights.source}, {});
        codebook_blocks(to, kernels, form, *matrix.view().parts[0].codebook);
    }
    scans(to, kernels);
    vocabulary(to, kernels);
    latents(to, kernels);
    attention(to, kernels);
    products(to, kernels);
}

const Variant* find(const std::string& name) {
    const Variant* const all[] = {
        &portable::variant,
#if defined(CAIRN_HAS_AVX2)
        &avx2::variant,
#endif
#if defined(CAIRN_HAS_AVXVNNI)
        &avxvnni::variant,
#endif
#if defined(CAIRN_HAS_AVX512VNNI)
        &avx512vnni::variant,
#endif
#if defined(CAIRN_HAS_AVX512)
        &avx512::variant,
#endif
#if defined(CAIRN_HAS_NEON)
        &neon::variant,
#endif
#if defined(CAIRN_HAS_NEONI8MM)
        &neoni8mm::variant,
#endif
    };
    for (const Variant* one : all)
        if (name == one->name) return one;
    std::fprintf(stderr, "there are no kernels %s here\n", name.c_str());
    return nullptr;
}

int run(const std::string& path, bool compare, const std::string& name) {
    const Variant* kernels = find(name);
    std::FILE* file = std::fopen(path.c_str(), compare ? "rb" : "wb");
    if (!kernels || !file) return 2;
    Results to(file, compare);
    everything(to, *kernels);
    if (std::fclose(file)) return 2;
    std::printf("%s: %d cases, %d with other bits\n", name.c_str(), to.count(), to.failed());
    return to.failed() ? 1 : 0;
}

}  // namespace
}  // namespace cairn

int main(int count, char** words) {
    if (count < 4) {
        std::fprintf(stderr, "bits write|compare FILE VARIANT...\n");
        return 2;
    }
    cairn::set_codebooks();
    int worst = 0;
    for (int i = 3; i < count; i++) {
        const int found = cairn::run(words[2], std::string(words[1]) == "compare", words[i]);
        worst = found > worst ? found : worst;
    }
    return worst;
}
