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
constexpr int64_t kSlotsAtOnce = 1 << 14;  // looked through under one lock: about a millisecond
constexpr int64_t kKeysAtOnce = 1 << 13;   // looked up, or slots let go: as long
constexpr int kMostTimeouts = 3;
constexpr int64_t kPauseNanoseconds = 1'000'000'000;
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
    debts_.resize(groups);
    std::atomic_ref(head().users).fetch_or(bit_, std::memory_order_relaxed);
}

// ThreadSanitizer sees a clocked lock in some versions only, and in none that its last owner died: it is told.
static void tell_sanitizer([[maybe_unused]] pthread_mutex_t& mutex, [[maybe_unused]] int error) {
#ifdef __SANITIZE_THREAD__
    if (error == 0 && __interceptor_pthread_mutex_clocklock) return;
    __tsan_mutex_pre_lock(&mutex, __tsan_mutex_try_lock);
    __tsan_mutex_post_lock(&mutex, __tsan_mutex_try_lock, 0);
#endif
}

static int64_t now() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

int32_t SharedPool::lock_in_time() {
    int error = pthread_mutex_trylock(&head().mutex);
    if (error != EBUSY) return error;
    const int64_t until = now() + kLockNanoseconds;
    const timespec end{until / 1'000'000'000, until % 1'000'000'000};
    std::atomic_ref(head().waiting).fetch_add(1, std::memory_order_relaxed);
    error = pthread_mutex_clocklock(&head().mutex, CLOCK_MONOTONIC, &end);
    std::atomic_ref(head().waiting).fetch_sub(1, std::memory_order_relaxed);
    if (error == 0 || error == EOWNERDEAD) tell_sanitizer(head().mutex, error);
    return error;
}

template <typename Body>
int32_t SharedPool::locked(Body&& body) {
    const int error = lock_in_time();
    if (error == ETIMEDOUT) return KVC_BUSY;
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

// As locked(), for the thread that must not wait again and again: its owner was stopped in the middle of a change.
template <typename Body>
int32_t SharedPool::in_turn(Body&& body) {
    if (timeouts_ >= kMostTimeouts && now() < pause_until_) return KVC_PAUSED;
    const int32_t status = locked(body);
    if (status != KVC_BUSY) {
        timeouts_ = 0;
        return status;
    }
    if (++timeouts_ < kMostTimeouts) return KVC_BUSY;
    timeouts_ = kMostTimeouts;
    pause_until_ = now() + kPauseNanoseconds;
    return KVC_PAUSED;
}

// Between two pieces: who is woken finds the lock taken again otherwise.
void SharedPool::let_others() {
    if (!std::atomic_ref(head().waiting).load(std::memory_order_relaxed)) return;
    const timespec least{0, 1};
    nanosleep(&least, nullptr);
}

// In parts, so that nobody has to wait for all of them. KVC_BUSY: some parts are done, and done again the next time.
int32_t SharedPool::forget(int user) {
    const uint64_t bit = uint64_t{1} << user;
    for (int64_t group = 0; base_ && group < groups(); ++group)
        for (int64_t end = group_of(group).slots; end > 0; end -= kSlotsAtOnce) {
            let_others();
            const auto status = locked([&] {
                SharedGroup& g = group_of(group);
                for (auto i = static_cast<int32_t>(std::min(end, g.created));
                     i-- > std::max<int64_t>(end - kSlotsAtOnce, 0);)
                    let_go(g, i, bit);
                return KVC_OK;
            });
            if (status) return status;
        }
    if (base_ && bit != bit_) std::atomic_ref(head().users).fetch_and(~bit, std::memory_order_relaxed);
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

// visit(g, i, slot or kNone), in order. What the next keys read is on its way meanwhile.
template <typename Visit>
int32_t SharedPool::each_key(int64_t group, const uint8_t* space, const uint8_t* digests, int64_t stride, int64_t n,
                             Visit&& visit) {
    constexpr int64_t kInFlight = 16;
    uint64_t hashes[kKeysAtOnce];
    for (int64_t first = 0; first < n; first += kKeysAtOnce) {
        const int64_t piece = std::min(kKeysAtOnce, n - first);
        const uint8_t* from = digests + first * stride;
        for (int64_t i = 0; i < piece; ++i) hashes[i] = hash(name_of(space, from + i * stride));
        if (first) let_others();
        const auto status = in_turn([&] {
            SharedGroup& g = group_of(group);
            for (int64_t begin = 0; begin < piece; begin += kInFlight) {
                const int64_t end = std::min(begin + kInFlight, piece);
                for (int64_t i = begin; i < end; ++i) __builtin_prefetch(&places(g)[home(g, hashes[i])]);
                for (int64_t i = begin; i < end; ++i)
                    if (const uint32_t slot = places(g)[home(g, hashes[i])].slot) {
                        const auto* line = reinterpret_cast<const uint8_t*>(&slots(g)[slot - 1]);
                        __builtin_prefetch(line);
                        __builtin_prefetch(line + 64);
                    }
                for (int64_t i = begin; i < end; ++i)
                    visit(g, first + i, find(g, name_of(space, from + i * stride), hashes[i]));
            }
            return KVC_OK;
        });
        if (status) return status;
    }
    return KVC_OK;
}

int32_t SharedPool::present(int64_t group, const uint8_t* space, const uint8_t* digests, int64_t stride, int64_t n,
                            uint8_t* out) {
    std::fill_n(out, n, uint8_t{0});
    if (!base_) return KVC_OK;
    if (const auto status = pay(group)) return status;
    return each_key(group, space, digests, stride, n,
                    [&](SharedGroup&, int64_t i, int32_t slot) { out[i] = slot != kNone; });
}

int32_t SharedPool::acquire(int64_t group, const uint8_t* space, const uint8_t* digests, int64_t stride, int64_t n,
                            int32_t* out) {
    std::fill_n(out, n, kNone);
    if (!base_) return KVC_OK;
    if (const auto status = pay(group)) return status;
    auto& items = debts_[static_cast<size_t>(group)].items;
    items.reserve(items.size() + static_cast<size_t>(n));  // to give all back needs no memory
    const auto& counts = counts_[static_cast<size_t>(group)];
    const auto status = each_key(group, space, digests, stride, n, [&](SharedGroup& g, int64_t i, int32_t slot) {
        if (slot == kNone || counts[static_cast<size_t>(slot)] == kMostCount) return;
        hold(g, group, slot);
        out[i] = slot;
    });
    if (status) {
        const auto end = std::remove(out, out + n, kNone);
        let_go_here(group, out, end - out);
        std::fill_n(out, n, kNone);
    }
    return status;
}

int32_t SharedPool::acquire_held(int64_t group, const uint8_t* space, const uint8_t* digests, int64_t stride, int64_t n,
                                 const int32_t* held, int64_t count, int32_t* out) {
    std::fill_n(out, n, kNone);
    if (const auto status = check_slots(group, held, count)) return status;
    if (!base_) return KVC_OK;
    constexpr int kMostMisses = 16;  // each looks through all
    SharedGroup& g = group_of(group);
    auto& counts = counts_[static_cast<size_t>(group)];
    for (int64_t i = 0, at = 0, misses = 0; i < n && misses < kMostMisses; ++i) {
        const SharedName name = name_of(space, digests + i * stride);
        int64_t tried = 0;
        for (; tried < count; ++tried, at = at + 1 == count ? 0 : at + 1)
            if (slots(g)[held[at]].name == name) break;
        misses += tried == count;
        if (tried == count || counts[static_cast<size_t>(held[at])] == kMostCount) continue;
        Slot& s = slots(g)[held[at]];
        if (!std::atomic_ref(s.keyed).load(std::memory_order_acquire)) continue;
        ++counts[static_cast<size_t>(held[at])];
        out[i] = held[at];
    }
    return KVC_OK;
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
    if (const auto status = pay(group)) return status;
    for (bool more = true; more && *taken < n;) {
        if (*taken) let_others();
        const auto status = in_turn([&] {
            SharedGroup& g = group_of(group);
            for (const int64_t end = std::min(*taken + kKeysAtOnce, n); more && *taken < end;) {
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
                    more = false;
                    break;
                }
                hold(g, group, slot);
                out[(*taken)++] = slot;
            }
            return KVC_OK;
        });
        if (status) return status;
    }
    return KVC_OK;
}

int32_t SharedPool::publish(int64_t group, const uint8_t* space, const uint8_t* digests, const int32_t* held, int64_t n,
                            uint8_t* published) {
    if (const auto status = check_slots(group, held, n)) return status;
    std::fill_n(published, n, uint8_t{0});
    if (!base_) return KVC_OK;
    int64_t done = 0;
    auto status = pay(group);
    while (!status && done < n) {
        if (done) let_others();
        status = in_turn([&] {
            SharedGroup& g = group_of(group);
            for (const int64_t end = std::min(done + kKeysAtOnce, n); done < end; ++done)
                published[done] = give_key(g, held[done], name_of(space, digests + done * 32));
            return KVC_OK;
        });
    }
    if (status < 0) return status;
    Debt& debt = debts_[static_cast<size_t>(group)];
    debt.items.reserve(debt.items.size() + static_cast<size_t>(n - done));
    debt.names.reserve(debt.names.size() + static_cast<size_t>(n - done));
    for (; done < n; ++done) {
        debt.items.push_back({held[done], static_cast<int32_t>(debt.names.size())});
        debt.names.push_back(name_of(space, digests + done * 32));
        published[done] = 1;
    }
    return status;
}

int32_t SharedPool::unpublish(int64_t group, int32_t slot) {
    if (const auto status = check_slots(group, &slot, 1)) return status;
    debts_[static_cast<size_t>(group)].items.push_back({slot, Debt::kUnpublish});
    return pay(group);
}

int32_t SharedPool::release(int64_t group, const int32_t* held, int64_t n) {
    if (const auto status = check_slots(group, held, n)) return status;
    auto& counts = counts_[static_cast<size_t>(group)];
    for (int64_t i = 0; i < n; ++i) {
        uint16_t& count = counts[static_cast<size_t>(held[i])];
        if (count--) continue;
        for (int64_t back = i; back >= 0; --back) ++counts[static_cast<size_t>(held[back])];
        return fail(KVC_E_STATE, "slot %d is let go more often than it was held", held[i]);
    }
    for (int64_t i = 0; i < n; ++i) ++counts[static_cast<size_t>(held[i])];
    auto& items = debts_[static_cast<size_t>(group)].items;
    items.reserve(items.size() + static_cast<size_t>(n));
    let_go_here(group, held, n);
    return pay(group);
}

// There is room for them among what is owed.
void SharedPool::let_go_here(int64_t group, const int32_t* held, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        if (--counts_[static_cast<size_t>(group)][static_cast<size_t>(held[i])]) continue;
        --mine_[static_cast<size_t>(group)];
        debts_[static_cast<size_t>(group)].items.push_back({held[i], Debt::kLetGo});
    }
}

int32_t SharedPool::pay(int64_t group) {
    Debt& debt = debts_[static_cast<size_t>(group)];
    while (base_ && debt.paid < debt.items.size()) {
        if (debt.paid) let_others();
        const auto status = in_turn([&] {
            SharedGroup& g = group_of(group);
            const size_t end = std::min(debt.paid + static_cast<size_t>(kKeysAtOnce), debt.items.size());
            for (; debt.paid < end; ++debt.paid) pay(g, group, debt.items[debt.paid]);
            return KVC_OK;
        });
        if (status) return status;
    }
    debt.items.clear();
    debt.names.clear();
    debt.paid = 0;
    return KVC_OK;
}

void SharedPool::pay(SharedGroup& g, int64_t group, const Debt::Item& item) {
    if (item.what >= 0)
        give_key(g, item.slot, debts_[static_cast<size_t>(group)].names[static_cast<size_t>(item.what)]);
    else if (item.what == Debt::kLetGo) {
        if (!counts_[static_cast<size_t>(group)][static_cast<size_t>(item.slot)]) let_go(g, item.slot, bit_);
    } else if (slots(g)[item.slot].keyed) drop_key(g, item.slot);
}

int32_t SharedPool::stats(int64_t group, kvc_shared_stats* out) {
    *out = {};
    out->mine = out->used = out->held = mine_[static_cast<size_t>(group)];
    out->capacity = std::ssize(counts_[static_cast<size_t>(group)]);
    out->evictions = evictions_[static_cast<size_t>(group)];
    if (!base_) return KVC_OK;
    if (const auto status = pay(group)) return status;
    return in_turn([&] {
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
    if (!base_) return KVC_OK;
    if (const auto status = pay(group)) return status;
    return in_turn([&] {
        const char* broken = fault(group_of(group), group);
        return broken ? fail(KVC_E_INVARIANT, "group %lld of the shared region: %s", static_cast<L>(group), broken)
                      : KVC_OK;
    });
}

}  // namespace kvc
