#include "matrix.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace cairn {
namespace {

constexpr std::size_t LINE = 64, HUGE_PAGE = std::size_t{2} << 20;

template <class T>
void put_row(std::byte* panels, Index panel_bytes, Index row, const T* from, Index inner, Index pair) {
    T* to = reinterpret_cast<T*>(panels + row / LANES * panel_bytes);
    const Index lane = row % LANES;
    for (Index k = 0; k < inner; k++) to[(k / pair * LANES + lane) * pair + k % pair] = from[k];
}

}  // namespace

void AlignedDelete::operator()(std::byte* p) const { std::free(p); }

Aligned allocate(std::size_t bytes) {
    const std::size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : LINE;
    const std::size_t size = (bytes + LINE - 1) / LINE * LINE;
    // aligned_alloc wants a multiple of the alignment.
    const std::size_t whole = (size + align - 1) / align * align;
    void* memory = std::aligned_alloc(align, whole ? whole : align);
    if (!memory) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (align == HUGE_PAGE) madvise(memory, whole, MADV_HUGEPAGE);
#endif
    std::memset(memory, 0, size);
    return Aligned(static_cast<std::byte*>(memory));
}

Matrix::Matrix(Dtype dtype, const std::vector<Source>& parts, const std::vector<float>& bias) {
    if (parts.empty()) throw std::invalid_argument("a matrix needs at least one part");
    Index out = 0;
    for (const Source& part : parts) {
        if (part.inner != parts[0].inner) throw std::invalid_argument("parts of a matrix need one input size");
        out += part.out;
    }
    if (!bias.empty() && static_cast<Index>(bias.size()) != out)
        throw std::invalid_argument("a bias needs one number an output");
    view_ = {nullptr, nullptr, dtype, parts[0].inner, out};
    bytes_ = static_cast<std::size_t>(view_.panel_count() * view_.panel_bytes());
    panels_ = allocate(bytes_);
    view_.panels = panels_.get();
    Index row = 0;
    for (const Source& part : parts)
        for (Index i = 0; i < part.out; i++) put(row++, part, i);
    if (!bias.empty()) {
        bias_ = allocate(static_cast<std::size_t>(padded(out)) * sizeof(float));
        std::memcpy(bias_.get(), bias.data(), bias.size() * sizeof(float));
        view_.bias = reinterpret_cast<const float*>(bias_.get());
    }
}

void Matrix::put(Index row, const Source& from, Index from_row) {
    const Index inner = view_.inner, at = from_row * inner;
    if (view_.dtype == Dtype::f32)
        put_row(panels_.get(), view_.panel_bytes(), row, static_cast<const float*>(from.data) + at, inner, 1);
    else
        put_row(panels_.get(), view_.panel_bytes(), row, static_cast<const std::uint16_t*>(from.data) + at, inner,
                view_.dtype == Dtype::bf16 ? 2 : 1);
}

}  // namespace cairn
