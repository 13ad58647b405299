// Threads that work on one job at a time. They spin briefly between jobs, then block.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "kernel.h"

namespace cairn {

class Team {
  public:
    explicit Team(int threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    // body(index, thread) for every index below `count`, on all threads; returns when all are done. A thread begins with
    // its own share of neighbouring indices, the same in every job, so that it finds in its caches what it left there;
    // one that is done helps the others.
    template <class Body>
    void run(Index count, const Body& body) {
        if (count == 1 || workers_.empty()) {
            for (Index i = 0; i < count; i++) body(i, 0);
            return;
        }
        const auto call = [](const void* with, Index index, int thread) {
            (*static_cast<const Body*>(with))(index, thread);
        };
        run(count, call, &body);
    }

  private:
    using Call = void (*)(const void* with, Index index, int thread);

    // High half: the job's number; low half: pieces not yet taken. Whoever lowers it owns a piece of that very job.
    struct alignas(64) Share {
        std::atomic<std::uint64_t> open{0};
    };

    void run(Index count, Call call, const void* with);
    Index first_of(int thread) const { return count_ * thread / size(); }
    bool take(int from, int thread);
    void take_all(int thread);
    void work(int thread);

    std::unique_ptr<Share[]> shares_;
    alignas(64) std::atomic<std::uint32_t> job_{0};  // its number, once all shares are open
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    Index count_ = 0;
    Call call_ = nullptr;
    const void* with_ = nullptr;
    alignas(64) std::atomic<Index> done_{0};
    std::vector<std::thread> workers_;
};

}  // namespace cairn
