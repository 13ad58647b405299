#include "matrix.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace cairn {
namespace {

template <class T, Index PAIR>
void put_row(std::byte* panel, Index lane, const void* row, Index inner) {
    T* to = reinterpret_cast<T*>(panel);
    const T* from = static_cast<const T*>(row);
    for (Index k = 0; k < inner; k++) to[(k / PAIR * LANES + lane) * PAIR + k % PAIR] = from[k];
}

// Four codes in one number, since bytes one by one take several times as long to pack.
std::uint32_t four(const std::uint8_t* code) {
    std::uint32_t found;
    std::memcpy(&found, code, 4);
    return found;
}
constexpr std::uint32_t each_byte(std::uint32_t byte) { return byte * 0x01010101u; }

void put_four(std::byte* line, Index lane, std::uint32_t codes) { std::memcpy(line + lane * 4, &codes, 4); }

void put_nibbles(std::byte* to, Index lane, const std::uint8_t* code) {
    constexpr std::uint32_t LOW = each_byte(15);
    for (Index k = 0; k < GROUP; k += 8) put_four(to + k * 8, lane, (four(code + k) & LOW) | (four(code + k + 4) & LOW) << 4);
}

// Where each value of a form's table stands in it, by the byte that is stored of int8.
struct Places {
    std::uint8_t of[256] = {};

    explicit Places(Form form) {
        const std::uint8_t* values = values_of(form);
        for (Index i = CODEBOOK; values && i-- > 0;) of[values[i]] = static_cast<std::uint8_t>(i);
    }
};

// Codes as their places in a table of values; `place` has them by the bytes that are stored of int8.
void put_places(std::byte* to, Index lane, const std::uint8_t* code, const std::uint8_t* place) {
    std::uint8_t places[GROUP];
    for (Index k = 0; k < GROUP; k++) places[k] = place[code[k] ^ 0x80];
    put_nibbles(to, lane, places);
}

void put_bytes(std::byte* to, Index lane, const std::uint8_t* code) {
    for (Index k = 0; k < GROUP; k += 4) put_four(to + k * 16, lane, four(code + k) ^ each_byte(0x80));
}

// One output of a quantised part; see Segment for the order.
void put_groups(const Segment& part, std::byte* panel, Index lane, const Source& from, Index row) {
    const Index groups = part.inner / GROUP, codes = part.group_codes() * LANES;
    const Index width = part.half ? 2 : 4, scales = width * LANES;
    const auto* code = static_cast<const std::uint8_t*>(from.data) + row * part.inner;
    const auto number = [&](const void* numbers, Index group) {
        return static_cast<const std::byte*>(numbers) + (row * groups + group) * width;
    };
    const bool places = values_of(part.form);
    const Places place(part.form);
    for (Index group = 0; group < groups; group++, code += GROUP) {
        std::byte* unit = panel + group / 2 * part.unit_bytes();
        if (part.form == Form::int4)
            put_nibbles(unit + group % 2 * codes, lane, code);
        else if (places)
            put_places(unit + group % 2 * codes, lane, code, place.of);
        else
            put_bytes(unit + group % 2 * codes, lane, code);
        std::byte* beside = unit + 2 * codes + group % 2 * scales + lane * width;
        std::memcpy(beside, number(from.scales, group), static_cast<std::size_t>(width));
        if (part.minimum) std::memcpy(beside + 2 * scales, number(from.minima, group), static_cast<std::size_t>(width));
    }
}

// Whole number i of `count` of a super-block: the inverse of `whole_numbers`.
void put_whole(std::byte* to, Index i, unsigned number, Index count = 256) {
    const Index share = count / 4;
    if (i < 3 * share) {
        to[i] |= static_cast<std::byte>(number & 63);
        return;
    }
    for (Index part = 0; part < 3; part++)
        to[part * share + i - 3 * share] |= static_cast<std::byte>((number >> (2 * part) & 3) << 6);
}

// The codes of a group of super-blocks, of 4 to 6 bits.
void put_block_codes(std::byte* group, Index bits, Index lane, const std::uint8_t* code) {
    if (bits == 6) {
        constexpr std::uint32_t LOW = each_byte(63), TWO = each_byte(3);
        for (Index half = 0; half < 2; half++, code += GROUP / 2)
            for (Index line = 0; line < 3; line++)
                put_four(group + half * 192 + line * 64, lane,
                         (four(code + 4 * line) & LOW) | (four(code + 12) >> (2 * line) & TWO) << 6);
        return;
    }
    put_nibbles(group, lane, code);
    if (bits != 5) return;
    std::uint32_t fifths = 0;
    for (Index q = 0; q < GROUP / 4; q++) fifths |= (four(code + 4 * q) >> 4 & each_byte(1)) << q;
    put_four(group + 256, lane, fifths);
}

// One output of a part in super-blocks; see Segment for the order.
void put_blocks(const Segment& part, std::byte* panel, Index lane, const Source& from, Index row) {
    const Index blocks = part.inner / SUPER, numbers = part.form == Form::q6_k ? 16 : 8, kinds = part.minimum ? 2 : 1;
    const auto* code = static_cast<const std::uint8_t*>(from.data) + row * part.inner;
    const auto* scale = static_cast<const std::uint8_t*>(from.scales) + row * blocks * numbers;
    const auto* minimum = static_cast<const std::uint8_t*>(from.minima) + (part.minimum ? row * blocks * numbers : 0);
    std::byte* unit = panel + part.front_bytes();
    for (Index block = 0; block < blocks; block++, unit += part.block_bytes()) {
        std::byte* front = panel + (block * kinds * LANES + lane) * 2;
        const Index at = (row * blocks + block) * 2;
        std::memcpy(front, static_cast<const std::byte*>(from.block_scales) + at, 2);
        if (part.minimum) std::memcpy(front + 2 * LANES, static_cast<const std::byte*>(from.block_minima) + at, 2);
        for (Index n = 0; n < numbers; n++, scale++) {
            if (part.form == Form::q6_k)
                unit[n * LANES + lane] = static_cast<std::byte>(*scale);
            else
                put_whole(unit, n * LANES + lane, *scale), put_whole(unit, 128 + n * LANES + lane, *minimum++);
        }
        for (Index n = 0; n < SUPER / GROUP; n++, code += GROUP)
            put_block_codes(unit + part.whole_bytes() + n * part.code_bytes(), part.bits(), lane, code);
    }
}

// One output of a part in iq4_xs; see Segment for the order.
void put_table_blocks(const Segment& part, std::byte* panel, Index lane, const Source& from, Index row) {
    const Index blocks = part.inner / SUPER, groups = SUPER / GROUP;
    const auto* code = static_cast<const std::uint8_t*>(from.data) + row * part.inner;
    const auto* scale = static_cast<const std::int8_t*>(from.scales) + row * blocks * groups;
    const Places place(part.form);
    std::byte* codes = panel + part.front_bytes();
    for (Index block = 0; block < blocks; block++) {
        std::byte* front = panel + block * 128;
        std::memcpy(front + 2 * lane, static_cast<const std::byte*>(from.block_scales) + (row * blocks + block) * 2, 2);
        for (Index n = 0; n < groups; n++, code += GROUP, codes += part.code_bytes()) {
            put_whole(front + 2 * LANES, n * LANES + lane, static_cast<unsigned>(*scale++ + 32), groups * LANES);
            put_places(codes, lane, code, place.of);
        }
    }
}

// One output of a part that names rows of a codebook; see Segment for the order.
void put_row_blocks(const Segment& part, std::byte* panel, Index lane, const Source& from, Index row) {
    const Index blocks = part.inner / SUPER, bytes = row_block_bytes(part.form);
    const auto* at = static_cast<const std::byte*>(from.data) + row * blocks * bytes;
    for (Index block = 0; block < blocks; block++, at += bytes)
        for (Index i = 0; i < bytes; i++) panel[(block * bytes + i) * LANES + lane] = at[i];
}

void put(const Segment& part, std::byte* panels, Index to_row, const Source& from, Index row) {
    std::byte* panel = panels + to_row / LANES * part.panel_bytes();
    const Index lane = to_row % LANES, at = row * part.inner;
    const auto halves = [&] { return static_cast<const std::uint16_t*>(from.data) + at; };
    if (part.form == Form::f32)
        put_row<float, 1>(panel, lane, static_cast<const float*>(from.data) + at, part.inner);
    else if (part.form == Form::f16)
        put_row<std::uint16_t, 1>(panel, lane, halves(), part.inner);
    else if (part.form == Form::bf16)
        put_row<std::uint16_t, 2>(panel, lane, halves(), part.inner);
    else if (part.in_rows())
        put_row_blocks(part, panel, lane, from, row);
    else if (part.form == Form::iq4_xs)
        put_table_blocks(part, panel, lane, from, row);
    else if (part.in_blocks())
        put_blocks(part, panel, lane, from, row);
    else
        put_groups(part, panel, lane, from, row);
}

// Rows of a part that come from one source, from row `first` of the part on.
struct Run {
    const Source* source;
    Index first;
};

// Packs rows `from` to `to` of a part.
void put_rows(const Segment& part, std::byte* panels, const std::vector<Run>& runs, Index from, Index to) {
    for (const Run& run : runs) {
        const Index end = std::min(to, run.first + run.source->out);
        for (Index row = std::max(from, run.first); row < end && run.source->data; row++)
            put(part, panels, row, *run.source, row - run.first);
    }
}

// Packs all rows, of many on all cores: each takes whole panels, which nobody else writes to.
void put_runs(const Segment& part, std::byte* panels, const std::vector<Run>& runs) {
    constexpr Index LEAST = Index{1} << 20, MOST = 16;  // numbers that are worth a thread, and threads
    const Index cores = static_cast<Index>(std::thread::hardware_concurrency());
    const Index count = std::max(Index{1}, std::min({cores, MOST, part.panel_count(), part.out * part.inner / LEAST}));
    const auto first = [&](Index share) { return std::min(part.out, part.panel_count() * share / count * LANES); };
    std::vector<std::thread> others;
    Index begun = 1;
    try {
        for (; begun < count; begun++)
            others.emplace_back([&, begun] { put_rows(part, panels, runs, first(begun), first(begun + 1)); });
    } catch (const std::system_error&) {  // no more threads are to be had
    }
    put_rows(part, panels, runs, 0, first(1));
    put_rows(part, panels, runs, first(begun), part.out);
    for (std::thread& one : others) one.join();
}

// By form; each is set once and then stays.
std::array<std::unique_ptr<Codebook>, static_cast<int>(Form::iq3_s) + 1> codebooks;

const Codebook* codebook_of(Form form) { return codebooks[static_cast<int>(form)].get(); }

// Fills in what is known of the rows.
void list_places(Form form, Codebook& book) {
    const Index width = in_eights(form) ? 8 : 4, count = static_cast<Index>(row_count(form));
    std::uint8_t place[256] = {}, values[256];
    Index found = 0;
    for (Index i = 0; i < count * width; i++) place[book.rows[i]] = 1;
    for (Index value = 0; value < 256; value++)
        if (place[value]) place[value] = static_cast<std::uint8_t>(found), values[found++] = static_cast<std::uint8_t>(value + 128);
    if (found > (width == 8 ? 4 : 8)) throw std::invalid_argument("a codebook has more different magnitudes than its form");
    const Index bits = width == 8 ? 2 : 3, most = (1 << bits) - 1;
    for (Index half = 0; half < 16; half++) {
        const auto value = [&](Index at) { return at < found ? values[at] : std::uint8_t{0}; };
        book.low[half] = value(half & most), book.high[half] = value(half >> bits);
    }
    constexpr int SHIFT[] = {0, 8, 4, 12};
    for (Index i = 0; i < count; i++) {
        unsigned places = 0;
        for (Index j = 0; j < width; j++)
            places |= static_cast<unsigned>(place[book.rows[i * width + j]]) << (SHIFT[j % 4] + j / 4 * bits);
        book.places[i] = static_cast<std::uint16_t>(places);
    }
}

bool alike(const Segment& part, const Source& from) {
    return part.form == from.form && part.half == from.half && part.minimum == from.minimum;
}

}  // namespace

void set_codebook(Form form, const std::byte* rows, std::size_t size) {
    std::unique_ptr<Codebook>& to = codebooks[static_cast<int>(form)];
    if (to) return;
    auto book = std::make_unique<Codebook>();
    std::memcpy(book->rows, rows, size);
    list_places(form, *book);
    to = std::move(book);
}

Matrix::Matrix(const std::vector<Source>& sources, const std::vector<float>& bias, const std::byte* mapped)
    : mapped_(mapped) {
    if (sources.empty()) throw std::invalid_argument("a matrix needs at least one part");
    for (const Source& one : sources) {
        if (one.inner != sources[0].inner) throw std::invalid_argument("parts of a matrix need one input size");
        if (row_block_bytes(one.form) && !codebook_of(one.form))
            throw std::invalid_argument("a matrix of rows of a codebook needs that codebook first");
        if (parts_.empty() || !alike(parts_.back(), one))
            parts_.push_back(
                {nullptr, nullptr, one.form, one.half, one.minimum, one.inner, 0, out_, codebook_of(one.form)});
        parts_.back().out += one.out;
        ends_.push_back(out_ += one.out);
    }
    const auto size = [](const Segment& part) { return lines(part.panel_count() * part.panel_bytes()); };
    for (const Segment& part : parts_) bytes_ += static_cast<std::size_t>(size(part));
    if (!mapped_) panels_ = allocate_weights(bytes_);
    Index at = 0;
    auto source = sources.begin();
    for (Segment& part : parts_) {
        part.panels = (mapped_ ? mapped_ : panels_.get()) + at;
        std::vector<Run> runs;
        for (Index row = 0; row < part.out; row += source->out, ++source) runs.push_back({&*source, row});
        if (!mapped_ && sources[0].data) put_runs(part, panels_.get() + at, runs);
        at += size(part);
    }
    if (!bias.empty()) add_bias(bias);
}

void Matrix::add_bias(const std::vector<float>& bias) {
    if (static_cast<Index>(bias.size()) != out_) throw std::invalid_argument("a bias needs one number an output");
    Index whole = 0;
    for (const Segment& part : parts_) whole += padded(part.out);
    bias_ = allocate(static_cast<std::size_t>(whole) * sizeof(float));
    auto* to = reinterpret_cast<float*>(bias_.get());
    for (Segment& part : parts_) {
        std::memcpy(to, bias.data() + part.column, static_cast<std::size_t>(part.out) * sizeof(float));
        part.bias = to;
        to += padded(part.out);
    }
}

}  // namespace cairn
