// Weight matrices, repacked once at load into the order that the kernels stream.
#pragma once

#include <memory>
#include <vector>

#include "kernel.h"

namespace cairn {

// One [out, in] matrix in row-major order.
struct Source {
    const void* data;
    Index out, inner;
};

struct AlignedDelete {
    void operator()(std::byte* p) const;
};
using Aligned = std::unique_ptr<std::byte[], AlignedDelete>;

// Zeroed bytes, aligned for the widest vectors; large ones for huge pages. Throws std::bad_alloc.
Aligned allocate(std::size_t bytes);

// Matrices of one input, packed into one; outputs are concatenated in order. `bias` has the sum of outputs, or none.
class Matrix {
  public:
    Matrix(Dtype dtype, const std::vector<Source>& parts, const std::vector<float>& bias);

    const MatrixView& view() const { return view_; }
    std::size_t bytes() const { return bytes_; }

  private:
    void put(Index row, const Source& from, Index from_row);

    MatrixView view_;
    std::size_t bytes_;
    Aligned panels_, bias_;
};

}  // namespace cairn
