// Memory of weights: neighbours share huge pages, which most matrices would not fill alone.
#pragma once

#include <cstddef>
#include <memory>

namespace cairn {

// Given back with the last of those who share its chunk; without a chunk it is of `aligned_alloc`.
struct AlignedDelete {
    std::shared_ptr<std::byte> chunk;

    void operator()(std::byte* p) const;
};
using Aligned = std::unique_ptr<std::byte[], AlignedDelete>;

// Zeroed bytes, aligned for the widest vectors; large ones for huge pages. Throws std::bad_alloc.
Aligned allocate(std::size_t bytes);

// The same for weights, many of which are taken one after another and held as long as each other: cut from chunks, of
// which the system gives only pages that are touched.
Aligned allocate_weights(std::size_t bytes);

// Has the system read the pages of a mapped file that are not in memory, all of them at once: products that follow would
// wait for each by itself. Does nothing where the system cannot tell.
void ask_for(const std::byte* begin, std::size_t bytes);

}  // namespace cairn
