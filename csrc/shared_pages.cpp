// Pages to shared slots and back, each with a checksum of what arrived; and the C ABI of `shared_pool.h`.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "error.h"
#include "exclusive.h"
#include "shared_pool.h"
#include "workers.h"
#include "xxh3.h"

namespace kvc {

namespace {

constexpr size_t kPiece = 16 * Xxh3::kBlock;  // copied, then read again for the checksum while a cache has it

// Copies a page and leaves the checksum of what is at `to` now, and of the name: a page that belongs to another key, or was
// replaced on the way, has another one.
void copy_checked(uint8_t* to, const uint8_t* from, size_t bytes, const uint8_t* name, uint8_t digest[Xxh3::kDigest]) {
    Xxh3 sum;
    size_t done = 0;
    for (const size_t whole = bytes / Xxh3::kBlock * Xxh3::kBlock; done < whole;) {
        const size_t piece = std::min(kPiece, whole - done);
        std::memcpy(to + done, from + done, piece);
        sum.blocks(to + done, piece / Xxh3::kBlock);
        done += piece;
    }
    const size_t rest = bytes - done;
    std::memcpy(to + done, from + done, rest);
    alignas(64) uint8_t end[Xxh3::kBlock + sizeof(SharedName) + Xxh3::kLeast] = {};
    std::memcpy(end, to + done, rest);
    std::memcpy(end + rest, name, sizeof(SharedName));
    sum.finish(end, rest + sizeof(SharedName) + Xxh3::kLeast, digest);
}

// `one(i)` for each i < n, each page by one of the threads.
template <typename One>
void for_each_page(int64_t n, int64_t page_bytes, int32_t threads, One&& one) {
    std::atomic<int64_t> next = 0;
    work_together(threads_for(std::min(n, n * page_bytes / kCopyThreadBytes), threads), [&] {
        for (int64_t i = next++; i < n; i = next++) one(i);
    });
}

int32_t check_held(const SharedGroup& group, const int32_t* held, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
        if (held[i] < 0 || held[i] >= group.slots)
            return fail(KVC_E_ARGUMENT, "slot %d of %lld", held[i], static_cast<long long>(group.slots));
    return KVC_OK;
}

}  // namespace

int32_t SharedPool::store(int64_t group, const uint64_t* pages, const int32_t* held, const uint8_t* names, int64_t n,
                          int32_t threads) {
    const SharedGroup& g = group_of(group);
    if (const auto status = check_held(g, held, n)) return status;
    for_each_page(n, g.page_bytes, threads, [&](int64_t i) {
        copy_checked(base_ + g.pages_at + held[i] * g.page_bytes, reinterpret_cast<const uint8_t*>(pages[i]),
                     static_cast<size_t>(g.page_bytes), names + i * int64_t{sizeof(SharedName)},
                     slots(g)[held[i]].checksum);
    });
    return KVC_OK;
}

int32_t SharedPool::load(int64_t group, const uint64_t* pages, const int32_t* held, const uint8_t* names, int64_t n,
                         int32_t threads, uint8_t* ok) {
    const SharedGroup& g = group_of(group);
    if (const auto status = check_held(g, held, n)) return status;
    for_each_page(n, g.page_bytes, threads, [&](int64_t i) {
        uint8_t digest[Xxh3::kDigest];
        copy_checked(reinterpret_cast<uint8_t*>(pages[i]), base_ + g.pages_at + held[i] * g.page_bytes,
                     static_cast<size_t>(g.page_bytes), names + i * int64_t{sizeof(SharedName)}, digest);
        ok[i] = std::memcmp(digest, slots(g)[held[i]].checksum, sizeof digest) == 0;
    });
    return KVC_OK;
}

}  // namespace kvc

struct kvc_shared : kvc::SharedPool {
    using SharedPool::SharedPool;
};

namespace {

int32_t check_tables(int64_t groups, const int64_t* slots, const int64_t* page_bytes) {
    if (groups < 1 || groups > kvc::kMostSharedGroups)
        return kvc::fail(KVC_E_ARGUMENT, "%lld groups: 1 to %lld", static_cast<long long>(groups),
                         static_cast<long long>(kvc::kMostSharedGroups));
    if (const auto status = kvc::not_null("slots", slots, "page_bytes", page_bytes)) return status;
    for (int64_t g = 0; g < groups; ++g)
        if (slots[g] < 1 || slots[g] >= INT32_MAX || page_bytes[g] < 1 || page_bytes[g] > INT64_MAX / slots[g] / 64)
            return kvc::fail(KVC_E_ARGUMENT, "group %lld has %lld slots of %lld bytes", static_cast<long long>(g),
                             static_cast<long long>(slots[g]), static_cast<long long>(page_bytes[g]));
    return KVC_OK;
}

template <typename Body>
int32_t enter(kvc_shared* pool, Body&& body) {
    if (const auto status = kvc::not_null("pool", pool)) return status;
    return kvc::exclusively(pool->entered, "shared pool", [&] { return body(*pool); });
}

template <typename Body>
int32_t with_group(kvc_shared* pool, int64_t group, int64_t n, Body&& body) {
    return enter(pool, [&](kvc::SharedPool& p) {
        if (group < 0 || group >= p.groups() || n < 0)
            return kvc::fail(KVC_E_ARGUMENT, "group %lld, %lld slots", static_cast<long long>(group),
                             static_cast<long long>(n));
        return body(p);
    });
}

}  // namespace

extern "C" {

int32_t kvc_shared_layout(int64_t groups, const int64_t* slots, const int64_t* page_bytes, int64_t* pages_at,
                          int64_t* bytes) {
    if (const auto status = check_tables(groups, slots, page_bytes)) return status;
    if (const auto status = kvc::not_null("pages_at", pages_at, "bytes", bytes)) return status;
    *bytes = kvc::SharedPool::place_pages(groups, slots, page_bytes, pages_at);
    return KVC_OK;
}

int32_t kvc_shared_format(uint8_t* base, int64_t bytes, int64_t groups, const int64_t* slots, const int64_t* page_bytes,
                          const uint8_t* layout, uint64_t seed) {
    if (const auto status = check_tables(groups, slots, page_bytes)) return status;
    if (const auto status = kvc::not_null("base", base, "layout", layout)) return status;
    return kvc::SharedPool::format(base, bytes, groups, slots, page_bytes, layout, seed);
}

int32_t kvc_shared_new(uint8_t* base, int64_t bytes, int64_t groups, const int64_t* slots, const int64_t* page_bytes,
                       const uint8_t* layout, int32_t user, kvc_shared** out) {
    if (const auto status = check_tables(groups, slots, page_bytes)) return status;
    if (const auto status = kvc::not_null("base", base, "layout", layout, "out", out)) return status;
    if (user < 0 || user >= kvc::kMostUsers) return kvc::fail(KVC_E_ARGUMENT, "user %d of %d", user, kvc::kMostUsers);
    if (const auto status = kvc::SharedPool::verify(base, bytes, groups, slots, page_bytes, layout)) return status;
    return kvc::guarded([&] {
        *out = new kvc_shared(base, user);
        return KVC_OK;
    });
}

void kvc_shared_free(kvc_shared* pool) { delete pool; }

int32_t kvc_shared_present(kvc_shared* pool, int64_t group, const uint8_t* space, const uint8_t* digests,
                           int64_t stride_bytes, int64_t n, uint8_t* present) {
    return with_group(pool, group, n, [&](kvc::SharedPool& p) {
        if (n == 0) return int32_t{KVC_OK};
        if (const auto status = kvc::not_null("space", space, "digests", digests, "present", present)) return status;
        return p.present(group, space, digests, stride_bytes, n, present);
    });
}

int32_t kvc_shared_acquire(kvc_shared* pool, int64_t group, const uint8_t* space, const uint8_t* digests,
                           int64_t stride_bytes, int64_t n, int32_t* slots) {
    return with_group(pool, group, n, [&](kvc::SharedPool& p) {
        if (n == 0) return int32_t{KVC_OK};
        if (const auto status = kvc::not_null("space", space, "digests", digests, "slots", slots)) return status;
        return p.acquire(group, space, digests, stride_bytes, n, slots);
    });
}

int32_t kvc_shared_acquire_held(kvc_shared* pool, int64_t group, const uint8_t* space, const uint8_t* digests,
                                int64_t stride_bytes, int64_t n, const int32_t* held, int64_t n_held, int32_t* slots) {
    return with_group(pool, group, n, [&](kvc::SharedPool& p) {
        if (n == 0) return int32_t{KVC_OK};
        if (const auto status = kvc::not_null("space", space, "digests", digests, "slots", slots)) return status;
        if (const auto status = kvc::check_array("held", held, n_held)) return status;
        return p.acquire_held(group, space, digests, stride_bytes, n, held, n_held, slots);
    });
}

int32_t kvc_shared_take(kvc_shared* pool, int64_t group, int64_t n, int32_t* slots, int64_t* taken) {
    return with_group(pool, group, n, [&](kvc::SharedPool& p) {
        if (const auto status = kvc::not_null("taken", taken)) return status;
        if (const auto status = kvc::check_array("slots", slots, n)) return status;
        return p.take(group, n, slots, taken);
    });
}

int32_t kvc_shared_publish(kvc_shared* pool, int64_t group, const uint8_t* space, const uint8_t* digests,
                           const int32_t* slots, int64_t n, uint8_t* published) {
    return with_group(pool, group, n, [&](kvc::SharedPool& p) {
        if (n == 0) return int32_t{KVC_OK};
        if (const auto status =
                kvc::not_null("space", space, "digests", digests, "slots", slots, "published", published))
            return status;
        return p.publish(group, space, digests, slots, n, published);
    });
}

int32_t kvc_shared_unpublish(kvc_shared* pool, int64_t group, int32_t slot) {
    return with_group(pool, group, 1, [&](kvc::SharedPool& p) { return p.unpublish(group, slot); });
}

int32_t kvc_shared_release(kvc_shared* pool, int64_t group, const int32_t* slots, int64_t n) {
    return with_group(pool, group, n, [&](kvc::SharedPool& p) {
        if (const auto status = kvc::check_array("slots", slots, n)) return status;
        return p.release(group, slots, n);
    });
}

int32_t kvc_shared_version(kvc_shared* pool, int64_t group, uint64_t* version) {
    return with_group(pool, group, 0, [&](kvc::SharedPool& p) {
        if (const auto status = kvc::not_null("version", version)) return status;
        *version = p.version(group);
        return int32_t{KVC_OK};
    });
}

int32_t kvc_shared_get_stats(kvc_shared* pool, int64_t group, kvc_shared_stats* out) {
    return with_group(pool, group, 0, [&](kvc::SharedPool& p) {
        const auto status = kvc::not_null("out", out);
        return status ? status : p.stats(group, out);
    });
}

int32_t kvc_shared_detach(kvc_shared* pool) {
    return enter(pool, [&](kvc::SharedPool& p) {
        p.detach();
        return int32_t{KVC_OK};
    });
}

int32_t kvc_shared_check(kvc_shared* pool, int64_t group) {
    return with_group(pool, group, 0, [&](kvc::SharedPool& p) { return p.check(group); });
}

/* Those that the copying thread calls, beside the others. */

int32_t kvc_shared_users(kvc_shared* pool, uint64_t* users) {
    if (const auto status = kvc::not_null("pool", pool, "users", users)) return status;
    *users = pool->users();
    return KVC_OK;
}

int32_t kvc_shared_forget(kvc_shared* pool, int32_t user) {
    if (const auto status = kvc::not_null("pool", pool)) return status;
    if (user < 0 || user >= kvc::kMostUsers) return kvc::fail(KVC_E_ARGUMENT, "user %d of %d", user, kvc::kMostUsers);
    return kvc::guarded([&] { return pool->forget(user); });
}

int32_t kvc_shared_store(kvc_shared* pool, int64_t group, const uint64_t* pages, const int32_t* slots,
                         const uint8_t* names, int64_t n, int32_t threads) {
    if (const auto status = kvc::not_null("pool", pool)) return status;
    if (const auto status = kvc::check_threads(threads)) return status;
    if (group < 0 || group >= pool->groups()) return kvc::fail(KVC_E_ARGUMENT, "no such group");
    if (const auto status = kvc::check_array("pages", pages, n)) return status;
    if (n && !(slots && names)) return kvc::fail(KVC_E_ARGUMENT, "slots or names is NULL");
    return kvc::guarded([&] { return pool->store(group, pages, slots, names, n, threads); });
}

int32_t kvc_shared_load(kvc_shared* pool, int64_t group, const uint64_t* pages, const int32_t* slots,
                        const uint8_t* names, int64_t n, int32_t threads, uint8_t* ok) {
    if (const auto status = kvc::not_null("pool", pool)) return status;
    if (const auto status = kvc::check_threads(threads)) return status;
    if (group < 0 || group >= pool->groups()) return kvc::fail(KVC_E_ARGUMENT, "no such group");
    if (const auto status = kvc::check_array("pages", pages, n)) return status;
    if (n && !(slots && names && ok)) return kvc::fail(KVC_E_ARGUMENT, "slots, names or ok is NULL");
    return kvc::guarded([&] { return pool->load(group, pages, slots, names, n, threads, ok); });
}

}  // extern "C"
