// Weight matrices, repacked once at load into the order that the kernels stream.
#pragma once

#include <vector>

#include "kernel.h"
#include "memory.h"

namespace cairn {

// One [out, in] matrix in row-major order. With a quantised form `data` holds a byte a code (int4: 0 to 15, others: signed),
// scales and minima are [out, in / 32], halves or floats. In super-blocks `data` holds a byte a code from 0 on, scales and
// minima are bytes ([out, in / 32], of q6_k [out, in / 16]), and block_ ones are halves [out, in / 256]; codes of iq4_xs are
// signed. With rows of a codebook `data` holds blocks [out, in / 256, row_block_bytes], and nothing is beside them. Without
// `data` the rows stay zero until memory() is filled.
struct Source {
    Form form;
    bool half, minimum;
    const void *data, *scales, *minima;
    Index out, inner;
    const void *block_scales, *block_minima;
};

// Keep what the blocks of a form name: rows of whole numbers in bytes, four of iq3 and eight of iq2, by their number. Every
// process does so before it makes a matrix of them; a second time nothing happens.
void set_codebook(Form form, const std::byte* rows, std::size_t size);

// Matrices of one input, packed into one; outputs are concatenated in order, neighbours that are stored alike in the same
// panels. `bias` has the sum of outputs, or none.
class Matrix {
  public:
    // `mapped`: panels of the same parts, aligned for the widest vectors, which are not copied and have to outlive it.
    Matrix(const std::vector<Source>& sources, const std::vector<float>& bias, const std::byte* mapped = nullptr);

    MatrixView view() const {
        return {parts_.data(), static_cast<Index>(parts_.size()), parts_[0].inner, out_,
                ends_.data(),  static_cast<Index>(ends_.size()), mapped_, mapped_ ? bytes_ : 0};
    }
    // Of the panels.
    std::size_t bytes() const { return bytes_; }
    // All panels: what another matrix of the same parts may be filled with. Null where they are mapped.
    std::byte* memory() { return panels_.get(); }

  private:
    void add_bias(const std::vector<float>& bias);

    std::vector<Segment> parts_;
    std::vector<Index> ends_;
    Index out_ = 0;
    std::size_t bytes_ = 0;
    const std::byte* mapped_ = nullptr;
    Aligned panels_, bias_;
};

}  // namespace cairn
