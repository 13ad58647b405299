#include "adapters_module.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"

namespace nb = nanobind;

namespace cairn {
namespace {

// (first number of the low rank, first column of the output, matrix)
using Up = std::tuple<int, int, const Matrix*>;
// (slot, down, ups)
using Adapter = std::tuple<int, const Matrix*, std::vector<Up>>;

void adapt(Program& program, const ConstFloats& x, const Ints& rows, const Ints& slots, const ConstFloats& scales,
           const std::vector<Adapter>& adapters, const Floats& out) {
    check(x.ndim() == 2 && out.ndim() == 2 && rows.ndim() == 2 && rows.shape(1) == 3,
          "x is [M, H], out [M, N] and rows [B, 3]");
    check(slots.ndim() == 2 && scales.ndim() == 2 && slots.shape(1) == scales.shape(1), "slots and scales are [B, A]");
    const auto inner = static_cast<Index>(x.shape(1)), width = static_cast<Index>(out.shape(1));
    std::vector<LowRank> found;
    for (const auto& [slot, down, ups] : adapters) {
        LowRank one = {slot, down->view(), {}};
        check(slot >= 0 && one.down.inner == inner, "a slot is not negative, and a down matrix has x's width");
        for (const auto& [first, column, matrix] : ups) {
            const MatrixView up = matrix->view();
            check(first >= 0 && first + up.inner <= one.down.out && column >= 0 && column + up.out <= width,
                  "an up matrix reads numbers of its down matrix and writes columns of the output");
            one.ups.push_back({first, column, up});
        }
        found.push_back(one);
    }
    program.adapt({rows.data(), slots.data(), scales.data(), static_cast<Index>(slots.shape(1))}, x.data(), found,
                  out.data(), width, static_cast<Index>(x.shape(0)));
}

}  // namespace

void bind_adapters(nb::class_<Program>& program) {
    const auto array = nb::arg().noconvert();
    program.def("adapt", &adapt, array, array, array, array, nb::arg(), array);
}

}  // namespace cairn
