// The kvc_pool_* functions: argument checks, one thread at a time, then Pool.
#include <algorithm>
#include <vector>

#include "error.h"
#include "exclusive.h"
#include "pool.h"

struct kvc_pool {
    kvc::Pool pool;
    kvc::Exclusive exclusive;
};

namespace {

using kvc::DigestRun;
using kvc::fail;
using kvc::kNoPage;
using kvc::Page;
using Longs = long long;

template <typename Body>
int32_t enter(kvc_pool* pool, Body&& body) {
    if (!pool) return fail(KVC_E_ARGUMENT, "pool is NULL");
    return kvc::exclusively(pool->exclusive, "pool", [&] { return body(pool->pool); });
}

int32_t check_run(int64_t stride_bytes, int64_t n) {
    if (n < 0 || stride_bytes < 32)
        return fail(KVC_E_ARGUMENT, "%lld digests with a stride of %lld bytes: count below 0 or stride below 32",
                    static_cast<Longs>(n), static_cast<Longs>(stride_bytes));
    return KVC_OK;
}

}  // namespace

extern "C" {

int64_t kvc_unlimited(void) { return kvc::kUnlimitedPages; }

int32_t kvc_pool_new(int64_t capacity, uint64_t seed, kvc_pool** out) {
    return kvc::guarded([&]() -> int32_t {
        if (capacity < 1 || capacity > kvc::kUnlimitedPages)
            return fail(KVC_E_ARGUMENT, "a pool of %lld pages: it must have 1 to %lld", static_cast<Longs>(capacity),
                        static_cast<Longs>(kvc::kUnlimitedPages));
        *out = new kvc_pool{kvc::Pool(capacity, seed), {}};
        return KVC_OK;
    });
}

void kvc_pool_free(kvc_pool* pool) { delete pool; }

int32_t kvc_pool_present(kvc_pool* pool, uint32_t ns, const uint8_t* digests, int64_t stride_bytes, int64_t n,
                         uint8_t* present) {
    return enter(pool, [&](kvc::Pool& p) -> int32_t {
        if (const auto status = check_run(stride_bytes, n)) return status;
        p.present({digests, stride_bytes, n}, ns, present);
        return KVC_OK;
    });
}

uint64_t kvc_pool_version(kvc_pool* pool) { return pool->pool.version(); }

int32_t kvc_pool_acquire(kvc_pool* pool, uint32_t ns, const uint8_t* digests, int64_t stride_bytes, int64_t n,
                         int32_t* pages) {
    return enter(pool, [&](kvc::Pool& p) -> int32_t {
        if (const auto status = check_run(stride_bytes, n)) return status;
        const DigestRun run{digests, stride_bytes, n};
        for (int64_t i = 0; i < n; ++i) {
            pages[i] = p.find(run.at(i), ns);
            if (pages[i] != kNoPage) p.adopt(pages[i]);
        }
        return KVC_OK;
    });
}

int32_t kvc_pool_take(kvc_pool* pool, int64_t n, int32_t* pages, int64_t* taken) {
    return enter(pool, [&](kvc::Pool& p) -> int32_t {
        if (n < 0) return fail(KVC_E_ARGUMENT, "%lld pages wanted", static_cast<Longs>(n));
        *taken = 0;
        p.reserve(std::min(n, p.available()), 0);
        while (*taken < n) {
            const int32_t page = p.take();
            if (page == kNoPage) break;
            pages[(*taken)++] = page;
        }
        return KVC_OK;
    });
}

int32_t kvc_pool_publish(kvc_pool* pool, uint32_t ns, const uint8_t* digests, const int32_t* pages, int64_t n,
                         uint8_t* published) {
    return enter(pool, [&](kvc::Pool& p) -> int32_t {
        if (const auto status = check_run(32, n)) return status;
        const DigestRun run{digests, 32, n};
        p.reserve(0, n);
        for (int64_t i = 0; i < n; ++i) {
            if (!p.contains(pages[i]) || p.page(pages[i]).refs == 0)
                return fail(KVC_E_STATE, "page %d is not held: take it before giving it a key", pages[i]);
            if (p.page(pages[i]).key != Page::kNone) return fail(KVC_E_STATE, "page %d has a key already", pages[i]);
            published[i] = p.publish(pages[i], run.at(i), ns, 0, Page::kVisible);
        }
        return KVC_OK;
    });
}

int32_t kvc_pool_unpublish(kvc_pool* pool, int32_t page) {
    return enter(pool, [&](kvc::Pool& p) -> int32_t {
        if (!p.contains(page)) return fail(KVC_E_ARGUMENT, "page %d does not exist", page);
        p.unpublish(page);
        return KVC_OK;
    });
}

int32_t kvc_pool_release(kvc_pool* pool, const int32_t* pages, int64_t n) {
    return enter(pool, [&](kvc::Pool& p) -> int32_t {
        if (n < 0) return fail(KVC_E_ARGUMENT, "%lld pages to release", static_cast<Longs>(n));
        std::vector<int32_t> sorted(pages, pages + n);
        std::sort(sorted.begin(), sorted.end());
        for (size_t i = 0; i < sorted.size();) {
            const size_t first = i;
            while (i < sorted.size() && sorted[i] == sorted[first]) ++i;
            const int32_t page = sorted[first];
            if (!p.contains(page) || p.page(page).refs < static_cast<int64_t>(i - first))
                return fail(KVC_E_STATE, "page %d released %zu times but held %d times: nothing was released", page,
                            i - first, p.contains(page) ? p.page(page).refs : 0);
        }
        for (int64_t i = 0; i < n; ++i) p.release(pages[i]);
        return KVC_OK;
    });
}

int32_t kvc_pool_get_stats(kvc_pool* pool, kvc_pool_stats* out) {
    return enter(pool, [&](kvc::Pool& p) -> int32_t {
        kvc::fill_stats(p, out);
        return KVC_OK;
    });
}

int32_t kvc_pool_check(kvc_pool* pool) {
    return enter(pool, [&](kvc::Pool& p) -> int32_t {
        const char* broken = p.check();
        return broken ? fail(KVC_E_INVARIANT, "page pool: %s", broken) : KVC_OK;
    });
}
}
