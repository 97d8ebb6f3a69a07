// Refuses a second thread instead of corrupting state; refuses NULL where the ABI wants an address.
#pragma once

#include <atomic>

#include "error.h"

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

// For `if (const auto status = not_null("out", out, "n", n)) return status;`
inline int32_t not_null() { return KVC_OK; }
template <typename... Rest>
int32_t not_null(const char* name, const void* address, Rest... rest) {
    if (!address) return fail(KVC_E_ARGUMENT, "%s is NULL", name);
    return not_null(rest...);
}

// An array of n entries, or of room for n.
inline int32_t check_array(const char* name, const void* address, int64_t n) {
    if (n < 0) return fail(KVC_E_ARGUMENT, "%s has %lld entries", name, static_cast<long long>(n));
    return n ? not_null(name, address) : KVC_OK;
}

}  // namespace kvc
