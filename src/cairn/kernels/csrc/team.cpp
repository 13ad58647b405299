#include "team.h"

#include <system_error>

namespace cairn {
namespace {

constexpr std::uint64_t PIECES = 0xffffffff;
constexpr int SPINS = 4000;  // some tens of microseconds: longer than from one kernel to the next

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Team::Team(int threads) {
    workers_.reserve(static_cast<std::size_t>(threads));
    try {
        for (int thread = 1; thread < threads; thread++) workers_.emplace_back([this, thread] { work(thread); });
    } catch (const std::system_error&) {
        // As many as the system gives: fewer threads are slower, not wrong.
    }
}

Team::~Team() {
    stop_ = true;
    open_ += PIECES + 1;
    open_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Team::run(Index count, Call call, const void* with) {
    if (count == 0) return;
    // Every piece of the last job is done, so nobody reads these now.
    count_ = count, call_ = call, with_ = with;
    done_.store(0, std::memory_order_relaxed);
    const std::uint64_t number = (open_.load(std::memory_order_relaxed) & ~PIECES) + PIECES + 1;
    open_.store(number | static_cast<std::uint64_t>(count));
    if (sleeping_.load()) open_.notify_all();
    while (take(0)) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) != count; spins++) {
        if (spins < SPINS)
            pause();
        else
            std::this_thread::yield();
    }
}

bool Team::take(int thread) {
    std::uint64_t open = open_.load(std::memory_order_acquire);
    do {
        if (!(open & PIECES)) return false;
    } while (!open_.compare_exchange_weak(open, open - 1, std::memory_order_acq_rel, std::memory_order_acquire));
    call_(with_, count_ - static_cast<Index>(open & PIECES), thread);
    done_.fetch_add(1, std::memory_order_acq_rel);
    return true;
}

void Team::work(int thread) {
    int idle = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
        if (take(thread)) {
            idle = 0;
        } else if (++idle < SPINS) {
            pause();
        } else {
            sleeping_++;
            const std::uint64_t open = open_.load();
            if (!(open & PIECES) && !stop_.load()) open_.wait(open);
            sleeping_--;
            idle = 0;
        }
    }
}

}  // namespace cairn
