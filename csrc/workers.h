// Threads for one call: they live as long as it, so that there is none to wake, to lose at a fork, or to end unnoticed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#include "cores.h"
#include "error.h"

namespace kvc {

constexpr int32_t kMostThreads = 256;  // that a caller may ask for

inline int32_t check_threads(int32_t threads) {
    if (threads >= 1 && threads <= kMostThreads) return KVC_OK;
    return fail(KVC_E_ARGUMENT, "threads is %d: from 1 to %d", threads, kMostThreads);
}

constexpr int64_t kCopyThreadBytes = int64_t{2} << 20;  // a thread more is not worth its start for less (docs/copy.md)

// How many threads a call takes that was allowed so many, and is worth so many: no more than there are cores.
inline int64_t threads_for(int64_t worth, int32_t threads) {
    worth = std::min<int64_t>(worth, threads);
    return worth > 1 ? std::min<int64_t>(worth, cores()) : 1;
}

// Runs `work()`, which must not throw, on so many threads, the caller's among them, and returns when all have ended. Where no
// more threads are to be had, those that there are do it, the caller alone if need be: `work` takes pieces until none is left.
template <typename Work>
void work_together(int64_t threads, const Work& work) noexcept {
    std::vector<std::jthread> others;
    try {
        for (int64_t i = 1; i < threads; ++i) others.emplace_back([&work] { work(); });
    } catch (const std::exception&) {
    }
    work();
}

}  // namespace kvc
