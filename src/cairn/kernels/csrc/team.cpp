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

Team::Team(int threads) : shares_(new Share[static_cast<std::size_t>(threads)]) {
    workers_.reserve(static_cast<std::size_t>(threads));
    try {
        for (int thread = 1; thread < threads; thread++) workers_.emplace_back([this, thread] { work(thread); });
    } catch (const std::system_error&) {
        // As many as the system gives: fewer threads are slower, not wrong.
    }
}

Team::~Team() {
    stop_ = true;
    job_++;
    job_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Team::run(Index count, Call call, const void* with) {
    if (count == 0) return;
    // Every piece of the last job is done, so nobody reads these now.
    count_ = count, call_ = call, with_ = with;
    done_.store(0, std::memory_order_relaxed);
    const std::uint32_t number = job_.load(std::memory_order_relaxed) + 1;
    for (int thread = 0; thread < size(); thread++) {
        const auto pieces = static_cast<std::uint64_t>(first_of(thread + 1) - first_of(thread));
        shares_[static_cast<std::size_t>(thread)].open.store(std::uint64_t{number} << 32 | pieces, std::memory_order_release);
    }
    job_.store(number);
    if (sleeping_.load()) job_.notify_all();
    take_all(0);
    for (int spins = 0; done_.load(std::memory_order_acquire) != count; spins++) {
        if (spins < SPINS)
            pause();
        else
            std::this_thread::yield();
    }
}

bool Team::take(int from, int thread) {
    auto& share = shares_[static_cast<std::size_t>(from)].open;
    std::uint64_t open = share.load(std::memory_order_acquire);
    do {
        if (!(open & PIECES)) return false;
    } while (!share.compare_exchange_weak(open, open - 1, std::memory_order_acq_rel, std::memory_order_acquire));
    call_(with_, first_of(from + 1) - static_cast<Index>(open & PIECES), thread);
    return true;
}

// No next job begins before these pieces are told of.
void Team::take_all(int thread) {
    Index done = 0;
    for (int i = 0; i < size(); i++)
        while (take((thread + i) % size(), thread)) done++;
    if (done) done_.fetch_add(done, std::memory_order_acq_rel);
}

void Team::work(int thread) {
    std::uint32_t seen = 0;
    int idle = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
        const std::uint32_t job = job_.load(std::memory_order_acquire);
        if (job != seen) {
            seen = job, idle = 0;
            take_all(thread);
        } else if (++idle < SPINS) {
            pause();
        } else {
            sleeping_++;
            if (job_.load() == seen && !stop_.load()) job_.wait(seen);
            sleeping_--;
            idle = 0;
        }
    }
}

}  // namespace cairn
