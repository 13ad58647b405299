#include "memory.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace cairn {
namespace {

constexpr std::size_t LINE = 64, HUGE_PAGE = std::size_t{2} << 20, CHUNK = std::size_t{64} << 20;

std::size_t whole(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Memory that is not zeroed, in huge pages as far as `bytes` fill them: the rest of the last one would be memory that
// nobody uses.
std::byte* take(std::size_t bytes) {
    const std::size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : LINE, all = whole(bytes, align);
    // aligned_alloc wants a multiple of the alignment.
    void* memory = std::aligned_alloc(align, all);
    if (!memory) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (const std::size_t full = bytes / HUGE_PAGE * HUGE_PAGE) {
        madvise(memory, full, MADV_HUGEPAGE);
        if (all > full) madvise(static_cast<std::byte*>(memory) + full, all - full, MADV_NOHUGEPAGE);
    }
#endif
    return static_cast<std::byte*>(memory);
}

}  // namespace

void AlignedDelete::operator()(std::byte* p) const {
    if (!chunk) std::free(p);
}

Aligned allocate(std::size_t bytes) {
    const std::size_t size = whole(bytes ? bytes : 1, LINE);
    std::byte* memory = take(size);
    std::memset(memory, 0, size);
    return Aligned(memory, {});
}

Aligned allocate_weights(std::size_t bytes) {
    static std::mutex mutex;
    static std::weak_ptr<std::byte> current;
    static std::size_t used;
    const std::size_t size = whole(bytes ? bytes : 1, LINE);
    if (size > CHUNK / 2) return allocate(bytes);
    const std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<std::byte> chunk = current.lock();
    if (!chunk || used + size > CHUNK) {
        chunk.reset(take(CHUNK), std::free);
        current = chunk, used = 0;
    }
    std::byte* memory = chunk.get() + used;
    used += size;
    std::memset(memory, 0, size);
    return Aligned(memory, {chunk});
}

void ask_for(const std::byte* begin, std::size_t bytes) {
#if defined(__linux__)
    constexpr std::size_t MOST = 1024;
    static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    unsigned char there[MOST];
    const auto first = reinterpret_cast<std::uintptr_t>(begin) / page * page;
    const auto end = reinterpret_cast<std::uintptr_t>(begin) + bytes;
    for (std::uintptr_t at = first; at < end; at += MOST * page) {
        const std::size_t size = std::min(MOST * page, whole(end - at, page)), count = size / page;
        void* pages = reinterpret_cast<void*>(at);
        // To ask for what is there costs more than to look.
        if (mincore(pages, size, there) != 0) return;
        if (std::any_of(there, there + count, [](unsigned char one) { return !(one & 1); }))
            madvise(pages, size, MADV_WILLNEED);
    }
#else
    (void)begin, (void)bytes;
#endif
}

}  // namespace cairn
