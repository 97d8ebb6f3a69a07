// Implementation of `shared_pool.h`: what a user does with the slots, under the lock of the region.
#include "shared_pool.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <ctime>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
extern "C" int __interceptor_pthread_mutex_clocklock(pthread_mutex_t*, clockid_t, const timespec*)
    __attribute__((weak));
#endif

namespace kvc {

namespace {

constexpr int64_t kMostCount = UINT16_MAX;
constexpr int64_t kSlotsAtOnce = 1 << 14;      // looked through under one lock: about a millisecond
constexpr long kLockNanoseconds = 50'000'000;  // a process that was stopped in the middle of a change is not waited for

using L = long long;

SharedName name_of(const uint8_t* space, const uint8_t* digest) {
    SharedName name;
    std::memcpy(name.space.bytes, space, 32);
    std::memcpy(name.digest.bytes, digest, 32);
    return name;
}

}  // namespace

SharedPool::SharedPool(uint8_t* base, int user)
    : base_(base), bit_(uint64_t{1} << user), seed_(reinterpret_cast<SharedHead*>(base)->seed) {
    const auto groups = static_cast<size_t>(head().groups);
    for (size_t g = 0; g < groups; ++g)
        counts_.emplace_back(static_cast<size_t>(group_of(static_cast<int64_t>(g)).slots));
    mine_.resize(groups);
    evictions_.resize(groups);
}

// ThreadSanitizer sees a clocked lock in some versions only, and in none that its last owner died: it is told.
static void tell_sanitizer([[maybe_unused]] pthread_mutex_t& mutex, [[maybe_unused]] int error) {
#ifdef __SANITIZE_THREAD__
    if (error == 0 && __interceptor_pthread_mutex_clocklock) return;
    __tsan_mutex_pre_lock(&mutex, __tsan_mutex_try_lock);
    __tsan_mutex_post_lock(&mutex, __tsan_mutex_try_lock, 0);
#endif
}

template <typename Body>
int32_t SharedPool::locked(Body&& body) {
    if (!base_) return KVC_BUSY;
    timespec until{};
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += kLockNanoseconds;
    until.tv_sec += until.tv_nsec / 1'000'000'000;
    until.tv_nsec %= 1'000'000'000;
    const int error = pthread_mutex_clocklock(&head().mutex, CLOCK_MONOTONIC, &until);
    if (error == ETIMEDOUT) return KVC_BUSY;
    if (error == 0 || error == EOWNERDEAD) tell_sanitizer(head().mutex, error);
    if (error == EOWNERDEAD) {
        rebuild();
        ++head().recoveries;
        pthread_mutex_consistent(&head().mutex);
    } else if (error) {
        return fail(KVC_E_STATE, "the lock of the shared region is broken (error %d): let all its users end", error);
    }
    const int32_t status = body();
    pthread_mutex_unlock(&head().mutex);
    return status;
}
// In parts, so that nobody has to wait for all of them. KVC_BUSY: some parts are done, and done again the next time.
int32_t SharedPool::forget(int user) {
    const uint64_t bit = uint64_t{1} << user;
    for (int64_t group = 0; base_ && group < groups(); ++group)
        for (int64_t end = group_of(group).slots; end > 0; end -= kSlotsAtOnce) {
            const auto status = locked([&] {
                SharedGroup& g = group_of(group);
                for (auto i = static_cast<int32_t>(std::min(end, g.created));
                     i-- > std::max<int64_t>(end - kSlotsAtOnce, 0);)
                    let_go(g, i, bit);
                return KVC_OK;
            });
            if (status) return status;
        }
    return KVC_OK;
}

// ---- calls ----------------------------------------------------------------------------------------------------------

int32_t SharedPool::check_slots(int64_t group, const int32_t* slots, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) {
        const auto& counts = counts_[static_cast<size_t>(group)];
        const bool there = slots[i] >= 0 && static_cast<size_t>(slots[i]) < counts.size();
        if (!there || !counts[static_cast<size_t>(slots[i])])
            return fail(KVC_E_STATE, "slot %d of group %lld is not held here", slots[i], static_cast<L>(group));
    }
    return KVC_OK;
}

uint64_t SharedPool::version(int64_t group) const {
    if (!base_) return 0;
    return std::atomic_ref(const_cast<uint64_t&>(group_of(group).version)).load(std::memory_order_relaxed);
}

// visit(i, slot or kNone), in order. What the next keys read is on its way meanwhile.
template <typename Visit>
void SharedPool::each_key(SharedGroup& g, const uint8_t* space, const uint8_t* digests, int64_t stride, int64_t n,
                          Visit&& visit) {
    constexpr int64_t kInFlight = 16;
    SharedName names[kInFlight];
    uint64_t hashes[kInFlight];
    for (int64_t first = 0; first < n; first += kInFlight) {
        const int64_t some = std::min(kInFlight, n - first);
        for (int64_t i = 0; i < some; ++i) {
            names[i] = name_of(space, digests + (first + i) * stride);
            hashes[i] = hash(names[i]);
            __builtin_prefetch(&places(g)[home(g, hashes[i])]);
        }
        for (int64_t i = 0; i < some; ++i)
            if (const uint32_t slot = places(g)[home(g, hashes[i])].slot) {
                const auto* line = reinterpret_cast<const uint8_t*>(&slots(g)[slot - 1]);
                __builtin_prefetch(line);
                __builtin_prefetch(line + 64);
            }
        for (int64_t i = 0; i < some; ++i) visit(first + i, find(g, names[i], hashes[i]));
    }
}

int32_t SharedPool::present(int64_t group, const uint8_t* space, const uint8_t* digests, int64_t stride, int64_t n,
                            uint8_t* out) {
    return locked([&] {
        each_key(group_of(group), space, digests, stride, n, [&](int64_t i, int32_t slot) { out[i] = slot != kNone; });
        return KVC_OK;
    });
}

int32_t SharedPool::acquire(int64_t group, const uint8_t* space, const uint8_t* digests, int64_t stride, int64_t n,
                            int32_t* out) {
    return locked([&] {
        SharedGroup& g = group_of(group);
        const auto& counts = counts_[static_cast<size_t>(group)];
        each_key(g, space, digests, stride, n, [&](int64_t i, int32_t slot) {
            out[i] = kNone;
            if (slot == kNone || counts[static_cast<size_t>(slot)] == kMostCount) return;
            hold(g, group, slot);
            out[i] = slot;
        });
        return KVC_OK;
    });
}

int32_t SharedPool::take(int64_t group, int64_t n, int32_t* out, int64_t* taken) {
    *taken = 0;
    if (!base_) {  // what is planned now fails, as everything after the end
        auto& counts = counts_[static_cast<size_t>(group)];
        for (size_t i = 0; i < counts.size() && *taken < n; ++i) {
            if (counts[i]) continue;
            counts[i] = 1;
            ++mine_[static_cast<size_t>(group)];
            out[(*taken)++] = static_cast<int32_t>(i);
        }
        return KVC_OK;
    }
    return locked([&] {
        SharedGroup& g = group_of(group);
        for (; *taken < n; ++*taken) {
            int32_t slot = g.first_free;
            if (slot != kNone) {
                g.first_free = slots(g)[slot].next;
            } else if (g.created < g.slots) {
                slot = static_cast<int32_t>(g.created++);
            } else if (g.first != kNone) {
                slot = g.first;
                unlink(g, slot);
                drop_key(g, slot);
                ++evictions_[static_cast<size_t>(group)];
            } else {
                break;
            }
            hold(g, group, slot);
            out[*taken] = slot;
        }
        return KVC_OK;
    });
}

int32_t SharedPool::publish(int64_t group, const uint8_t* space, const uint8_t* digests, const int32_t* held, int64_t n,
                            uint8_t* published) {
    if (const auto status = check_slots(group, held, n)) return status;
    return locked([&] {
        SharedGroup& g = group_of(group);
        for (int64_t i = 0; i < n; ++i) {
            Slot& s = slots(g)[held[i]];
            const SharedName name = name_of(space, digests + i * 32);
            const uint64_t h = hash(name);
            published[i] = !s.keyed && find(g, name, h) == kNone;
            if (!published[i]) continue;
            s.name = name;
            std::atomic_ref(s.keyed).store(1, std::memory_order_release);
            insert(g, held[i], h);
            ++g.keyed;
            ++g.version;
        }
        return KVC_OK;
    });
}

int32_t SharedPool::unpublish(int64_t group, int32_t slot) {
    if (const auto status = check_slots(group, &slot, 1)) return status;
    return locked([&] {
        SharedGroup& g = group_of(group);
        if (slots(g)[slot].keyed) drop_key(g, slot);
        return KVC_OK;
    });
}

int32_t SharedPool::release(int64_t group, const int32_t* held, int64_t n) {
    if (const auto status = check_slots(group, held, n)) return status;
    const auto let = [&]() -> int32_t {
        auto& counts = counts_[static_cast<size_t>(group)];
        for (int64_t i = 0; i < n; ++i) {
            uint16_t& count = counts[static_cast<size_t>(held[i])];
            if (!count) return fail(KVC_E_STATE, "slot %d is let go more often than it was held", held[i]);
            if (--count) continue;
            --mine_[static_cast<size_t>(group)];
            if (base_) let_go(group_of(group), held[i], bit_);
        }
        return KVC_OK;
    };
    return base_ ? locked(let) : let();
}

int32_t SharedPool::stats(int64_t group, kvc_shared_stats* out) {
    *out = {};
    out->mine = out->used = out->held = mine_[static_cast<size_t>(group)];
    out->capacity = std::ssize(counts_[static_cast<size_t>(group)]);
    out->evictions = evictions_[static_cast<size_t>(group)];
    if (!base_) return KVC_OK;
    return locked([&] {
        const SharedGroup& g = group_of(group);
        out->created = g.created;
        out->used = g.cached + g.held;
        out->held = g.held;
        out->keyed = g.keyed;
        out->recoveries = static_cast<int64_t>(head().recoveries);
        return KVC_OK;
    });
}

int32_t SharedPool::check(int64_t group) {
    return locked([&] {
        const char* broken = fault(group_of(group), group);
        return broken ? fail(KVC_E_INVARIANT, "group %lld of the shared region: %s", static_cast<L>(group), broken)
                      : KVC_OK;
    });
}

}  // namespace kvc
