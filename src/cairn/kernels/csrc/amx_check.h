// Whether a tile unit computes the bits of the model: what is stored under the name of these kernels depends on it.
#pragma once

#include <vector>

#include "amx_product.h"

namespace cairn::CAIRN_VARIANT {

// Numbers for a check: mostly near 1, with zeros, subnormal numbers, and magnitudes whose products and sums overflow,
// vanish or cancel.
class CheckNumbers {
  public:
    std::uint16_t next() {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        const auto random = static_cast<std::uint32_t>(state_ >> 33);
        const std::uint32_t sign = random & 0x8000, fraction = random & 0x7f, kind = random >> 16 & 31;
        if (kind == 0) return static_cast<std::uint16_t>(sign);
        if (kind == 1) return static_cast<std::uint16_t>(sign | fraction);                    // subnormal
        if (kind == 2) return static_cast<std::uint16_t>(sign | (1 + (random >> 8 & 63)) << 7 | fraction);  // tiny
        if (kind == 3) return static_cast<std::uint16_t>(sign | (191 + (random >> 8 & 63)) << 7 | fraction);  // huge
        return static_cast<std::uint16_t>(sign | (120 + (random >> 8 & 15)) << 7 | fraction);
    }
    float next_float() {
        const std::uint32_t bits = static_cast<std::uint32_t>(next()) << 16;
        float number;
        std::memcpy(&number, &bits, 4);
        return number;
    }

  private:
    std::uint64_t state_ = 7;
};

// A product of `rows` rows of odd sizes; which NaN comes out is not asked.
template <class Unit>
bool product_agrees(Index rows, Index inner, Index out, CheckNumbers& numbers) {
    Segment part = {nullptr, nullptr, Form::bf16, false, false, inner, out, 0};
    std::vector<std::uint16_t> panels(static_cast<std::size_t>(part.panel_count() * part.panel_bytes() / 2));
    for (auto& one : panels) one = numbers.next();
    part.panels = reinterpret_cast<const std::byte*>(panels.data());
    std::vector<float> x(static_cast<std::size_t>(rows * inner));
    for (auto& one : x) one = numbers.next_float();
    std::vector<std::byte> pairs(static_cast<std::size_t>(rows * Activations::pair_bytes(inner)));
    const Activations in = {x.data(), inner, rows, inner, pairs.data(), nullptr};
    for (Index row = 0; row < rows; row++) put_tile_rows(in, row, 0, inner);
    std::vector<float> found(static_cast<std::size_t>(rows * out)), wanted(found.size());
    const MatrixView matrix = {&part, 1, inner, out, &out, 1};
    tile_product<Unit>({matrix, in, found.data(), out, false}, part, 0, part.panel_count());
    tile_product<TileModel>({matrix, in, wanted.data(), out, false}, part, 0, part.panel_count());
    for (std::size_t i = 0; i < found.size(); i++) {
        const bool nan = found[i] != found[i];
        if (nan != (wanted[i] != wanted[i]) || (!nan && std::memcmp(&found[i], &wanted[i], 4))) return false;
    }
    return true;
}

template <class Unit>
bool unit_agrees() {
    CheckNumbers numbers;
    for (const Index rows : {1, 2, 16, 17, 32, 35})
        for (const Index inner : {1, 32, 77, 256})
            if (!product_agrees<Unit>(rows, inner, 40, numbers)) return false;
    return true;
}

}  // namespace cairn::CAIRN_VARIANT
