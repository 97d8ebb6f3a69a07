// Host memory made ready: page tables filled, bound to a node, kept in memory. Where the kernel cannot, it says so.
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace {

constexpr int kPreferred = 1;  // MPOL_PREFERRED: of linux/mempolicy.h
constexpr int kMostNodes = 1024;
constexpr int kMostTries = 100;  // of what the kernel has no resources for right now

int32_t check(uint64_t address, int64_t n_bytes, const int32_t* error) {
    if (!error) return kvc::fail(KVC_E_ARGUMENT, "error is NULL");
    if (!address || n_bytes < 0 || address > UINT64_MAX - static_cast<uint64_t>(n_bytes))
        return kvc::fail(KVC_E_ARGUMENT, "%lld bytes at address %llu", static_cast<long long>(n_bytes),
                         static_cast<unsigned long long>(address));
    return KVC_OK;
}

// Page by page, beside others that write there.
void touch(uint8_t* first, uint8_t* last, int64_t page) {
    for (uint8_t* at = first; at < last; at += page) std::atomic_ref(*at).fetch_or(0, std::memory_order_relaxed);
}

}  // namespace

extern "C" {

int32_t kvc_memory_populate(uint64_t address, int64_t n_bytes, int32_t* error) {
    if (const auto status = check(address, n_bytes, error)) return status;
    const int64_t page = sysconf(_SC_PAGESIZE);
    const uint64_t from = address / static_cast<uint64_t>(page) * static_cast<uint64_t>(page);
    auto* first = reinterpret_cast<uint8_t*>(from);
    auto* last = reinterpret_cast<uint8_t*>(address) + n_bytes;
    for (int busy = 0;;) {
        *error = madvise(first, static_cast<size_t>(last - first), MADV_POPULATE_WRITE) == 0 ? 0 : errno;
        if (*error == EINTR || (*error == EAGAIN && ++busy < kMostTries)) {
            sched_yield();
            continue;
        }
        if (*error != EINVAL) return KVC_OK;
        touch(first, last, page);
        *error = 0;
        return KVC_OK;
    }
}

int32_t kvc_memory_prefer_node(uint64_t address, int64_t n_bytes, int32_t node, int32_t* error) {
    if (const auto status = check(address, n_bytes, error)) return status;
    if (node < 0 || node >= kMostNodes) return kvc::fail(KVC_E_ARGUMENT, "node %d of %d", node, kMostNodes);
    unsigned long mask[kMostNodes / (8 * sizeof(unsigned long))] = {};
    const auto bits = 8 * sizeof(unsigned long);
    mask[static_cast<size_t>(node) / bits] = 1UL << static_cast<size_t>(node) % bits;
    *error = syscall(SYS_mbind, address, n_bytes, kPreferred, mask, long{kMostNodes}, 0U) == 0 ? 0 : errno;
    return KVC_OK;
}

int32_t kvc_memory_lock(uint64_t address, int64_t n_bytes, int32_t* error) {
    if (const auto status = check(address, n_bytes, error)) return status;
    *error = mlock(reinterpret_cast<void*>(address), static_cast<size_t>(n_bytes)) == 0 ? 0 : errno;
    return KVC_OK;
}

}  // extern "C"
