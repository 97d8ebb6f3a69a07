// Error texts of the C ABI: one per thread, and the wrapper that keeps C++ exceptions inside.
#pragma once

#include <cstdint>
#include <new>
#include <stdexcept>

#include "kvcache_core.h"

namespace kvc {

// Stores the text for kvc_last_error() and returns `status`, so that a check reads `return fail(...)`.
[[gnu::format(printf, 2, 3)]] int32_t fail(int32_t status, const char* format, ...);

// Runs `body`, which returns a status; turns what it throws into a status.
template <typename Body>
int32_t guarded(Body&& body) noexcept {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return fail(KVC_E_MEMORY,
                    "out of memory: lower slabs (Manager) or capacity (PagePool), or the tokens of open requests");
    } catch (const std::exception& error) {
        return fail(KVC_E_INVARIANT, "unexpected: %s", error.what());
    } catch (...) {
        return fail(KVC_E_INVARIANT, "unexpected exception");
    }
}

}  // namespace kvc
