#include "dequant_row.h"

#include <cstring>

namespace cairn {
namespace {

// 16-bit floats of one lane: `pair` neighbours along k stand together.
void halves(const std::byte* panel, Index lane, Index inner, Index pair, std::uint16_t* out) {
    const auto* from = reinterpret_cast<const std::uint16_t*>(panel);
    for (Index k = 0; k < inner; k++) out[k] = from[(k / pair * LANES + lane) * pair + k % pair];
}

// One number a group, `offset` bytes into each group's sixteen.
void numbers(const Segment& part, const std::byte* panel, Index offset, Index lane, const Variant& kernels,
             std::uint16_t* scratch, float* out) {
    const Index groups = part.inner / GROUP, width = part.half ? 2 : 4;
    for (Index group = 0; group < groups; group++) {
        const std::byte* at = panel + group / 2 * part.unit_bytes() + offset + (group % 2 * LANES + lane) * width;
        if (part.half)
            std::memcpy(scratch + group, at, 2);
        else
            std::memcpy(out + group, at, 4);
    }
    if (part.half) kernels.embed(scratch, Dtype::f16, groups, out);
}

int code_of(const std::byte* codes, Index lane, Index k, Form form) {
    if (form == Form::int8) return static_cast<std::int8_t>(static_cast<std::uint8_t>(codes[k / 4 * 64 + lane * 4 + k % 4]) ^ 0x80);
    const auto both = static_cast<std::uint8_t>(codes[k / 8 * 64 + lane * 4 + k % 4]);
    const int code = k % 8 < 4 ? both & 15 : both >> 4;
    const std::uint8_t* values = values_of(form);
    return values ? values[code] - 128 : code;
}

void codes(const Segment& part, const std::byte* panel, Index lane, const Variant& kernels, float* scratch, float* out) {
    const Index groups = part.inner / GROUP, size = part.group_codes() * LANES;
    const Index beside = 2 * (part.half ? 2 : 4) * LANES;
    const int middle = part.form == Form::int4 && !part.minimum ? 8 : 0;
    float *scale = scratch, *minimum = scratch + groups;
    auto* raw = reinterpret_cast<std::uint16_t*>(scratch + 2 * groups);
    numbers(part, panel, 2 * size, lane, kernels, raw, scale);
    if (part.minimum) numbers(part, panel, 2 * size + beside, lane, kernels, raw, minimum);
    for (Index group = 0; group < groups; group++) {
        const std::byte* from = panel + group / 2 * part.unit_bytes() + group % 2 * size;
        for (Index k = 0; k < GROUP; k++) {
            const float value = scale[group] * static_cast<float>(code_of(from, lane, k, part.form) - middle);
            out[group * GROUP + k] = part.minimum ? value + minimum[group] : value;
        }
    }
}

// Halves of one lane, one a super-block; `offset` of them into each super-block's.
void block_numbers(const Segment& part, const std::byte* panel, Index offset, Index lane, const Variant& kernels,
                   std::uint16_t* scratch, float* out) {
    const Index blocks = part.inner / SUPER, step = LANES * (part.minimum ? 2 : 1);
    for (Index block = 0; block < blocks; block++)
        std::memcpy(scratch + block, panel + (block * step + offset + lane) * 2, 2);
    kernels.embed(scratch, Dtype::f16, blocks, out);
}

void block_codes(const Segment& part, const std::byte* panel, Index lane, const Variant& kernels, float* scratch,
                 float* out) {
    const Index blocks = part.inner / SUPER, share = part.form == Form::q6_k ? GROUP / 2 : GROUP;
    const int middle = part.form == Form::q6_k ? 32 : 0;
    float *scale = scratch, *minimum = scratch + blocks;
    auto* raw = reinterpret_cast<std::uint16_t*>(scratch + 2 * blocks);
    block_numbers(part, panel, 0, lane, kernels, raw, scale);
    if (part.minimum) block_numbers(part, panel, LANES, lane, kernels, raw, minimum);
    const std::byte* unit = panel + part.front_bytes();
    for (Index block = 0; block < blocks; block++, unit += part.block_bytes()) {
        std::uint8_t whole[2 * 8 * LANES];
        if (part.minimum)
            whole_numbers(unit, whole);
        else
            std::memcpy(whole, unit, sizeof whole);
        for (Index k = 0; k < SUPER; k++) {
            const std::uint8_t number = whole[k / share * LANES + lane];
            const int factor = part.minimum ? number : static_cast<std::int8_t>(number);
            const std::byte* group = unit + part.whole_bytes() + k / GROUP * part.code_bytes();
            const int code = block_code(group, part.bits(), lane, k % GROUP) - middle;
            const float value = scale[block] * static_cast<float>(factor) * static_cast<float>(code);
            const int lowest = whole[(k / GROUP + 8) % 16 * LANES + lane];
            *out++ = part.minimum ? value + minimum[block] * static_cast<float>(lowest) : value;
        }
    }
}

void row_blocks(const Segment& part, const std::byte* panel, Index lane, const Variant& kernels, float* out) {
    const Index bytes = row_block_bytes(part.form);
    RowBlock found;
    for (Index block = 0; block < part.inner / SUPER; block++) {
        kernels.decode_block(part.form, panel + block * bytes * LANES, *part.codebook, found);
        float scale;
        kernels.embed(found.scale + lane, Dtype::f16, 1, &scale);
        for (Index k = 0; k < SUPER; k++) {
            const Index half = k / (GROUP / 2), at = k / 4 * 64 + lane * 4 + k % 4;
            const Index own = in_halves(part.form) ? half : half / 2 * 2;
            const float share = scale * static_cast<float>(found.whole[own * LANES + lane]) * row_step(part.form);
            *out++ = share * static_cast<float>(static_cast<int>(found.codes[at]) - 128);
        }
    }
}

void table_blocks(const Segment& part, const std::byte* panel, Index lane, const Variant& kernels, float* out) {
    const std::byte* codes = panel + part.front_bytes();
    for (Index block = 0; block < part.inner / SUPER; block++) {
        const std::byte* front = panel + block * 128;
        std::uint8_t whole[8 * LANES];
        whole_numbers<8 * LANES>(front + 2 * LANES, whole);
        std::uint16_t half;
        std::memcpy(&half, front + 2 * lane, 2);
        float scale;
        kernels.embed(&half, Dtype::f16, 1, &scale);
        for (Index group = 0; group < SUPER / GROUP; group++, codes += part.code_bytes()) {
            const float share = scale * static_cast<float>(whole[group * LANES + lane] - 32);
            for (Index k = 0; k < GROUP; k++) *out++ = share * static_cast<float>(code_of(codes, lane, k, part.form));
        }
    }
}

}  // namespace

void look_up(const MatrixView& matrix, Index row, const Variant& kernels, float* scratch, float* out) {
    const Segment* part = matrix.parts;
    while (row >= part->column + part->out) part++;
    const std::byte* panel = part->panels + (row - part->column) / LANES * part->panel_bytes();
    const Index lane = (row - part->column) % LANES, inner = part->inner;
    if (part->in_rows()) return row_blocks(*part, panel, lane, kernels, out);
    if (part->form == Form::iq4_xs) return table_blocks(*part, panel, lane, kernels, out);
    if (part->in_blocks()) return block_codes(*part, panel, lane, kernels, scratch, out);
    if (part->quantised()) return codes(*part, panel, lane, kernels, scratch, out);
    if (part->form == Form::f32) {
        const auto* from = reinterpret_cast<const float*>(panel);
        for (Index k = 0; k < inner; k++) out[k] = from[k * LANES + lane];
        return;
    }
    auto* raw = reinterpret_cast<std::uint16_t*>(scratch);
    halves(panel, lane, inner, part->form == Form::bf16 ? 2 : 1, raw);
    kernels.embed(raw, part->form == Form::bf16 ? Dtype::bf16 : Dtype::f16, inner, out);
}

}  // namespace cairn
