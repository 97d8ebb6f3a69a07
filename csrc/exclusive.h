// Refuses a second thread instead of corrupting state, and small helpers that both ABI files share.
#pragma once

#include <atomic>

#include "error.h"
#include "pool.h"

namespace kvc {

struct Exclusive {
    std::atomic_flag entered = ATOMIC_FLAG_INIT;

    Exclusive() = default;
    Exclusive(Exclusive&&) noexcept {}
};

template <typename Body>
int32_t exclusively(Exclusive& exclusive, const char* what, Body&& body) noexcept {
    if (exclusive.entered.test_and_set(std::memory_order_acquire))
        return fail(KVC_E_STATE, "two threads are in one %s at once: give it to one thread, or lock around it", what);
    const int32_t status = guarded(body);
    exclusive.entered.clear(std::memory_order_release);
    return status;
}

inline void fill_stats(const Pool& pool, kvc_pool_stats* out) {
    *out = {};
    out->capacity = pool.capacity();
    out->created = pool.created();
    out->free = pool.free_count();
    out->cached = pool.cached();
    out->held = pool.created() - pool.free_count() - pool.cached();
    out->keyed = pool.keyed();
    out->evictions = pool.evictions();
}

}  // namespace kvc
