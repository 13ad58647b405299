#include "matrix.h"

#include <cstring>
#include <stdexcept>

namespace cairn {
namespace {

template <class T, Index PAIR>
void put_row(std::byte* panel, Index lane, const void* row, Index inner) {
    T* to = reinterpret_cast<T*>(panel);
    const T* from = static_cast<const T*>(row);
    for (Index k = 0; k < inner; k++) to[(k / PAIR * LANES + lane) * PAIR + k % PAIR] = from[k];
}

void put_nibbles(std::byte* to, Index lane, const std::uint8_t* code) {
    for (Index k = 0; k < GROUP; k++)
        to[k / 8 * 64 + lane * 4 + k % 4] |= static_cast<std::byte>((code[k] & 15) << (k % 8 < 4 ? 0 : 4));
}

// Codes as their places in a table of values; `place` has them by the bytes that are stored of int8.
void put_places(std::byte* to, Index lane, const std::uint8_t* code, const std::uint8_t* place) {
    std::uint8_t places[GROUP];
    for (Index k = 0; k < GROUP; k++) places[k] = place[code[k] ^ 0x80];
    put_nibbles(to, lane, places);
}

void put_bytes(std::byte* to, Index lane, const std::uint8_t* code) {
    for (Index k = 0; k < GROUP; k++)
        to[k / 4 * 64 + lane * 4 + k % 4] = static_cast<std::byte>(code[k] ^ 0x80);
}

// One output of a quantised part; see Segment for the order.
void put_groups(const Segment& part, std::byte* panel, Index lane, const Source& from, Index row) {
    const Index groups = part.inner / GROUP, codes = part.group_codes() * LANES;
    const Index width = part.half ? 2 : 4, scales = width * LANES;
    const auto* code = static_cast<const std::uint8_t*>(from.data) + row * part.inner;
    const auto number = [&](const void* numbers, Index group) {
        return static_cast<const std::byte*>(numbers) + (row * groups + group) * width;
    };
    const std::uint8_t* values = values_of(part.form);
    std::uint8_t place[256] = {};
    for (Index i = CODEBOOK; values && i-- > 0;) place[values[i]] = static_cast<std::uint8_t>(i);
    for (Index group = 0; group < groups; group++, code += GROUP) {
        std::byte* unit = panel + group / 2 * part.unit_bytes();
        if (part.form == Form::int4)
            put_nibbles(unit + group % 2 * codes, lane, code);
        else if (values)
            put_places(unit + group % 2 * codes, lane, code, place);
        else
            put_bytes(unit + group % 2 * codes, lane, code);
        std::byte* beside = unit + 2 * codes + group % 2 * scales + lane * width;
        std::memcpy(beside, number(from.scales, group), static_cast<std::size_t>(width));
        if (part.minimum) std::memcpy(beside + 2 * scales, number(from.minima, group), static_cast<std::size_t>(width));
    }
}

// Whole number i of a super-block of q4_k or q5_k: the inverse of `whole_numbers`.
void put_whole(std::byte* to, Index i, unsigned number) {
    if (i < 192) {
        to[i] |= static_cast<std::byte>(number & 63);
        return;
    }
    for (Index part = 0; part < 3; part++) to[part * 64 + i - 192] |= static_cast<std::byte>((number >> (2 * part) & 3) << 6);
}

void put_block_code(std::byte* group, Index bits, Index lane, Index k, unsigned code) {
    const Index at = lane * 4 + k % 4, q = k / 4;
    const auto mix = [&](Index offset, unsigned with) { group[offset + at] |= static_cast<std::byte>(with); };
    if (bits == 6) {
        const Index half = q / 4 * 192;
        if (q % 4 < 3) return mix(half + q % 4 * 64, code & 63);
        for (Index line = 0; line < 3; line++) mix(half + line * 64, (code >> (2 * line) & 3) << 6);
        return;
    }
    mix(q / 2 * 64, (code & 15) << (q % 2 * 4));
    if (bits == 5) mix(256, (code >> 4 & 1) << q);
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
        for (Index k = 0; k < SUPER; k++, code++)
            put_block_code(unit + part.whole_bytes() + k / GROUP * part.code_bytes(), part.bits(), lane, k % GROUP, *code);
    }
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
    else if (part.in_blocks())
        put_blocks(part, panel, lane, from, row);
    else
        put_groups(part, panel, lane, from, row);
}

bool alike(const Segment& part, const Source& from) {
    return part.form == from.form && part.half == from.half && part.minimum == from.minimum;
}

}  // namespace

Matrix::Matrix(const std::vector<Source>& sources, const std::vector<float>& bias, const std::byte* mapped)
    : mapped_(mapped) {
    if (sources.empty()) throw std::invalid_argument("a matrix needs at least one part");
    for (const Source& one : sources) {
        if (one.inner != sources[0].inner) throw std::invalid_argument("parts of a matrix need one input size");
        if (parts_.empty() || !alike(parts_.back(), one))
            parts_.push_back({nullptr, nullptr, one.form, one.half, one.minimum, one.inner, 0, out_});
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
        for (Index row = 0; row < part.out; ++source)
            for (Index i = 0; i < source->out; i++, row++)
                if (source->data && !mapped_) put(part, panels_.get() + at, row, *source, i);
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
