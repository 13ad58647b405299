// Threads that work on one job at a time. They spin briefly between jobs, then block.
#pragma once

#include <atomic>
#include <cstdint>
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

    // body(index, thread) for every index below `count`, on all threads; returns when all are done.
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

    void run(Index count, Call call, const void* with);
    bool take(int thread);
    void work(int thread);

    // High half: the job's number; low half: pieces not yet taken. Whoever lowers it owns a piece of that very job.
    std::atomic<std::uint64_t> open_{0};
    std::atomic<Index> done_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    Index count_ = 0;
    Call call_ = nullptr;
    const void* with_ = nullptr;
    std::vector<std::thread> workers_;
};

}  // namespace cairn
