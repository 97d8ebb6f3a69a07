// The kvc_pool_* functions: argument checks, one thread at a time, then an Arena of one class with one page a slab.
#include <algorithm>
#include <vector>

#include "arena.h"
#include "error.h"
#include "exclusive.h"
#include "pool_journal.h"

struct kvc_pool {
    kvc::PoolJournal journal;
    kvc::Arena arena;
    kvc::Exclusive exclusive;

    kvc_pool(int64_t capacity, uint64_t seed) : journal(&arena), arena(capacity, {1}, {0}, false, seed, &journal) {}
};

namespace {

using kvc::Arena;
using kvc::check_array;
using kvc::Digest;
using kvc::DigestRun;
using kvc::fail;
using kvc::kNoPage;
using kvc::not_null;
using kvc::Page;
using Longs = long long;

constexpr int32_t kGroup = 0;  // the only one, of the only class

template <typename Body>
int32_t enter(kvc_pool* pool, Body&& body) {
    if (const auto status = not_null("pool", pool)) return status;
    return kvc::exclusively(pool->exclusive, "pool", [&] { return body(pool->arena); });
}

// Free pages belong to no class, so Arena::contains() knows only those in use.
bool exists(const Arena& arena, int64_t page) { return page >= 0 && page < arena.created_slabs(); }

int64_t free_pages(const Arena& arena) { return arena.empty_slabs() + arena.free_pages(0); }

int32_t check_run(const uint8_t* digests, int64_t stride_bytes, int64_t n) {
    if (stride_bytes < 32)
        return fail(KVC_E_ARGUMENT, "%lld digests with a stride of %lld bytes: it must be 32 or more",
                    static_cast<Longs>(n), static_cast<Longs>(stride_bytes));
    return check_array("digests", digests, n);
}

}  // namespace

extern "C" {

int64_t kvc_unlimited(void) { return kvc::kMostPages; }

int32_t kvc_pool_new(int64_t capacity, uint64_t seed, kvc_pool** out) {
    return kvc::guarded([&]() -> int32_t {
        if (capacity < 1 || capacity > kvc::kMostPages)
            return fail(KVC_E_ARGUMENT, "a pool of %lld pages: it must have 1 to %lld", static_cast<Longs>(capacity),
                        static_cast<Longs>(kvc::kMostPages));
        if (const auto status = not_null("out", out)) return status;
        *out = new kvc_pool(capacity, seed);
        return KVC_OK;
    });
}

void kvc_pool_free(kvc_pool* pool) { delete pool; }

int32_t kvc_pool_present(kvc_pool* pool, uint32_t ns, const uint8_t* digests, int64_t stride_bytes, int64_t n,
                         uint8_t* present) {
    return enter(pool, [&](Arena& a) -> int32_t {
        if (const auto status = check_run(digests, stride_bytes, n)) return status;
        if (const auto status = check_array("present", present, n)) return status;
        a.present(kGroup, {digests, stride_bytes, n}, ns, present);
        return KVC_OK;
    });
}

uint64_t kvc_pool_version(kvc_pool* pool) {
    uint64_t version = 0;  // none has it: it says that the call was refused
    enter(pool, [&](Arena& a) -> int32_t {
        version = a.version();
        return KVC_OK;
    });
    return version;
}

int32_t kvc_pool_acquire(kvc_pool* pool, uint32_t ns, const uint8_t* digests, int64_t stride_bytes, int64_t n,
                         int32_t* pages) {
    return enter(pool, [&](Arena& a) -> int32_t {
        if (const auto status = check_run(digests, stride_bytes, n)) return status;
        if (const auto status = check_array("pages", pages, n)) return status;
        const DigestRun run{digests, stride_bytes, n};
        for (int64_t i = 0; i < n; ++i) {
            pages[i] = a.find(kGroup, run.at(i), ns);
            if (pages[i] != kNoPage) a.adopt(kGroup, pages[i]);
        }
        return KVC_OK;
    });
}

int32_t kvc_pool_take(kvc_pool* pool, int64_t n, int32_t* pages, int64_t* taken) {
    return enter(pool, [&](Arena& a) -> int32_t {
        if (const auto status = check_array("pages", pages, n)) return status;
        if (const auto status = not_null("taken", taken)) return status;
        *taken = 0;
        const int64_t count = std::min(n, a.slabs() - a.held_pages(0));
        a.reserve({&count, 1}, {});
        while (*taken < count) pages[(*taken)++] = a.take(kGroup);
        return KVC_OK;
    });
}

int32_t kvc_pool_publish(kvc_pool* pool, uint32_t ns, const uint8_t* digests, const int32_t* pages, int64_t n,
                         uint8_t* published) {
    return enter(pool, [&](Arena& a) -> int32_t {
        if (const auto status = check_run(digests, 32, n)) return status;
        if (const auto status = check_array("pages", pages, n)) return status;
        if (const auto status = check_array("published", published, n)) return status;
        const DigestRun run{digests, 32, n};
        a.reserve_keys(kGroup, n);
        for (int64_t i = 0; i < n; ++i) {
            if (!exists(a, pages[i]) || a.page(kGroup, pages[i]).refs == 0)
                return fail(KVC_E_STATE, "page %d is not held: take it before giving it a key", pages[i]);
            if (a.page(kGroup, pages[i]).key != Page::kNone)
                return fail(KVC_E_STATE, "page %d has a key already", pages[i]);
            const Digest key = run.at(i);
            published[i] =
                a.find(kGroup, key, ns) == kNoPage && a.publish(kGroup, pages[i], key, ns, 0, Page::kVisible);
        }
        return KVC_OK;
    });
}

int32_t kvc_pool_unpublish(kvc_pool* pool, int32_t page) {
    return enter(pool, [&](Arena& a) -> int32_t {
        if (!exists(a, page)) return fail(KVC_E_ARGUMENT, "page %d does not exist", page);
        a.unpublish(kGroup, page);
        return KVC_OK;
    });
}

int32_t kvc_pool_release(kvc_pool* pool, const int32_t* pages, int64_t n) {
    return enter(pool, [&](Arena& a) -> int32_t {
        if (const auto status = check_array("pages", pages, n)) return status;
        std::vector<int32_t> sorted;
        if (n) sorted.assign(pages, pages + n);
        std::sort(sorted.begin(), sorted.end());
        for (size_t i = 0; i < sorted.size();) {
            const size_t first = i;
            while (i < sorted.size() && sorted[i] == sorted[first]) ++i;
            const int32_t page = sorted[first];
            if (!exists(a, page) || a.page(kGroup, page).refs < static_cast<int64_t>(i - first))
                return fail(KVC_E_STATE, "page %d released %zu times but held %d times: nothing was released", page,
                            i - first, exists(a, page) ? a.page(kGroup, page).refs : 0);
        }
        for (int64_t i = 0; i < n; ++i) a.release(kGroup, pages[i]);
        return KVC_OK;
    });
}

int32_t kvc_pool_journal(kvc_pool* pool, int64_t most) {
    return enter(pool, [&](Arena&) -> int32_t {
        if (most < 0) return fail(KVC_E_ARGUMENT, "a journal of %lld events", static_cast<Longs>(most));
        pool->journal.start(most);
        return KVC_OK;
    });
}

int32_t kvc_pool_take_events(kvc_pool* pool, kvc_pool_event* events, int64_t cap, int64_t* n) {
    return enter(pool, [&](Arena&) -> int32_t {
        if (const auto status = check_array("events", events, cap)) return status;
        if (const auto status = not_null("n", n)) return status;
        *n = pool->journal.count();
        if (*n && *n <= cap) pool->journal.take(events);
        return KVC_OK;
    });
}

int32_t kvc_pool_spaces(kvc_pool* pool, uint32_t* spaces, int64_t cap, int64_t* n) {
    return enter(pool, [&](Arena& a) -> int32_t {
        if (const auto status = check_array("spaces", spaces, cap)) return status;
        if (const auto status = not_null("n", n)) return status;
        std::vector<uint32_t> used;
        for (int32_t i = 0; i < static_cast<int32_t>(a.created_slabs()); ++i)
            if (const Page& page = a.page(kGroup, i); page.key != Page::kNone) used.push_back(page.ns);
        pool->journal.each_space([&](uint32_t ns) { used.push_back(ns); });
        std::ranges::sort(used);
        used.erase(std::ranges::unique(used).begin(), used.end());
        *n = std::ssize(used);
        if (*n <= cap) std::ranges::copy(used, spaces);
        return KVC_OK;
    });
}

int32_t kvc_pool_get_stats(kvc_pool* pool, kvc_pool_stats* out) {
    return enter(pool, [&](Arena& a) -> int32_t {
        if (const auto status = not_null("out", out)) return status;
        *out = {};
        out->capacity = a.slabs();
        out->created = a.created_slabs();
        out->free = free_pages(a);
        out->cached = a.cached_pages(0);
        out->held = a.held_pages(0);
        out->keyed = a.keyed(kGroup);
        out->evictions = a.evictions();
        return KVC_OK;
    });
}

int32_t kvc_pool_check(kvc_pool* pool) {
    return enter(pool, [&](Arena& a) -> int32_t {
        const char* broken = a.check();
        return broken ? fail(KVC_E_INVARIANT, "page pool: %s", broken) : KVC_OK;
    });
}
}
