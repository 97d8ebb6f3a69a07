// Implementation of `shared_pool.h`: the tables, and what any user may do with them.
#include "shared_pool.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <ctime>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
extern "C" int __interceptor_pthread_mutex_clocklock(pthread_mutex_t*, clockid_t, const timespec*)
    __attribute__((weak));
#endif

namespace kvc {

namespace {

constexpr auto kMagic = std::bit_cast<uint64_t>(std::array<char, 8>{'k', 'v', 'c', 'h', 'o', 's', 't', '\n'});
constexpr uint32_t kVersion = 1;
constexpr int64_t kPageAlign = 4096;
constexpr int32_t kNone = -1;
constexpr int64_t kMostCount = UINT16_MAX;
constexpr int64_t kSlotsAtOnce = 1 << 14;      // looked through under one lock: about a millisecond
constexpr long kLockNanoseconds = 50'000'000;  // a process that was stopped in the middle of a change is not waited for

using L = long long;

int64_t aligned(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }
int64_t places_for(int64_t slots) { return slots + slots / 2 + 8; }

// Offsets of the tables of each group; returns where the pages begin.
template <typename Visit>
int64_t lay_out(int64_t groups, const int64_t* slots, Visit&& visit) {
    int64_t at = aligned(int64_t{sizeof(SharedHead)} + groups * int64_t{sizeof(SharedGroup)}, 64);
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t slots_at = at;
        const int64_t places_at = slots_at + slots[g] * int64_t{sizeof(Slot)};
        at = aligned(places_at + places_for(slots[g]) * int64_t{sizeof(Place)}, 64);
        visit(g, slots_at, places_at);
    }
    return aligned(at, kPageAlign);
}

SharedName name_of(const uint8_t* space, const uint8_t* digest) {
    SharedName name;
    std::memcpy(name.space.bytes, space, 32);
    std::memcpy(name.digest.bytes, digest, 32);
    return name;
}

}  // namespace

int64_t SharedPool::tables_bytes(int64_t groups, const int64_t* slots) {
    return lay_out(groups, slots, [](int64_t, int64_t, int64_t) {});
}

// The memory is all zeros, and nobody else looks at it. The magic comes last.
int32_t SharedPool::format(uint8_t* base, int64_t bytes, int64_t groups, const int64_t* slots,
                           const int64_t* page_bytes, const uint8_t* layout, uint64_t seed) {
    auto& head = *reinterpret_cast<SharedHead*>(base);
    auto* of = reinterpret_cast<SharedGroup*>(base + sizeof(SharedHead));
    int64_t at = lay_out(groups, slots, [&](int64_t g, int64_t slots_at, int64_t places_at) {
        of[g] = {};
        of[g].slots = slots[g];
        of[g].page_bytes = page_bytes[g];
        of[g].places = places_for(slots[g]);
        of[g].slots_at = slots_at;
        of[g].places_at = places_at;
        of[g].first_free = of[g].first = of[g].last = kNone;
        of[g].version = 1;
    });
    for (int64_t g = 0; g < groups; ++g) {
        of[g].pages_at = at;
        at = aligned(at + slots[g] * page_bytes[g], kPageAlign);
    }
    if (at > bytes)
        return fail(KVC_E_ARGUMENT, "%lld bytes for a region of %lld", static_cast<L>(bytes), static_cast<L>(at));
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    const int error = pthread_mutex_init(&head.mutex, &kind);
    pthread_mutexattr_destroy(&kind);
    if (error) return fail(KVC_E_STATE, "no lock that survives its owner on this system (error %d)", error);
    head.version = kVersion;
    head.mutex_bytes = sizeof(pthread_mutex_t);
    head.bytes = bytes;
    head.groups = groups;
    head.seed = seed;
    head.clock = 1;
    std::memcpy(head.layout, layout, 32);
    std::atomic_ref(head.magic).store(kMagic, std::memory_order_release);
    return KVC_OK;
}

int32_t SharedPool::verify(const uint8_t* base, int64_t bytes, int64_t groups, const int64_t* slots,
                           const int64_t* page_bytes, const uint8_t* layout) {
    const auto& head = *reinterpret_cast<const SharedHead*>(base);
    const auto* of = reinterpret_cast<const SharedGroup*>(base + sizeof(SharedHead));
    if (std::atomic_ref(const_cast<uint64_t&>(head.magic)).load(std::memory_order_acquire) != kMagic)
        return fail(KVC_E_ARGUMENT, "it is no region of this library");
    if (head.version != kVersion)
        return fail(KVC_E_ARGUMENT, "it has version %u of the format, this library %u", head.version, kVersion);
    if (head.mutex_bytes != sizeof(pthread_mutex_t))
        return fail(KVC_E_ARGUMENT, "its locks are of another C library (%u bytes, here %zu)", head.mutex_bytes,
                    sizeof(pthread_mutex_t));
    if (head.groups != groups)
        return fail(KVC_E_ARGUMENT, "it has %lld groups of pages, this geometry has %lld", static_cast<L>(head.groups),
                    static_cast<L>(groups));
    for (int64_t g = 0; g < groups; ++g)
        if (of[g].slots != slots[g] || of[g].page_bytes != page_bytes[g])
            return fail(KVC_E_ARGUMENT,
                        "group %lld has %lld slots of %lld bytes there, %lld of %lld are asked for: give all the same"
                        " capacity_bytes or pages",
                        static_cast<L>(g), static_cast<L>(of[g].slots), static_cast<L>(of[g].page_bytes),
                        static_cast<L>(slots[g]), static_cast<L>(page_bytes[g]));
    if (std::memcmp(head.layout, layout, 32) != 0)
        return fail(KVC_E_ARGUMENT, "its pages are of another model, KV format or layout");
    int64_t at = 0;
    bool same = true;
    at = lay_out(groups, slots, [&](int64_t g, int64_t slots_at, int64_t places_at) {
        same &= of[g].slots_at == slots_at && of[g].places_at == places_at && of[g].places == places_for(slots[g]);
    });
    for (int64_t g = 0; g < groups; ++g) {
        same &= of[g].pages_at == at && of[g].created >= 0 && of[g].created <= slots[g];
        at = aligned(at + slots[g] * page_bytes[g], kPageAlign);
    }
    if (!same || at > bytes) return fail(KVC_E_ARGUMENT, "its tables are damaged");
    if (head.bytes != bytes)
        return fail(KVC_E_ARGUMENT, "it says that it has %lld bytes and has %lld", static_cast<L>(head.bytes),
                    static_cast<L>(bytes));
    return KVC_OK;
}

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

// ---- the index ------------------------------------------------------------------------------------------------------

uint64_t SharedPool::hash(const SharedName& name) const {
    return table_hash(name.digest, static_cast<uint32_t>(table_hash(name.space, 0, seed_)), seed_);
}

static uint64_t home(const SharedGroup& g, uint64_t hash) {
    return (hash >> 32) * static_cast<uint64_t>(g.places) >> 32;
}
static uint64_t after(const SharedGroup& g, uint64_t place) {
    return place + 1 == static_cast<uint64_t>(g.places) ? 0 : place + 1;
}

int32_t SharedPool::find(SharedGroup& g, const SharedName& name, uint64_t hash) {
    const Place* all = places(g);
    for (uint64_t p = home(g, hash); all[p].slot; p = after(g, p))
        if (all[p].tag == static_cast<uint32_t>(hash) && slots(g)[all[p].slot - 1].name == name)
            return static_cast<int32_t>(all[p].slot - 1);
    return kNone;
}

void SharedPool::insert(SharedGroup& g, int32_t slot, uint64_t hash) {
    Place* all = places(g);
    uint64_t p = home(g, hash);
    while (all[p].slot) p = after(g, p);
    all[p] = {static_cast<uint32_t>(slot) + 1, static_cast<uint32_t>(hash)};
}

void SharedPool::erase(SharedGroup& g, int32_t slot) {
    Place* all = places(g);
    const auto size = static_cast<uint64_t>(g.places);
    uint64_t hole = home(g, hash(slots(g)[slot].name));
    while (all[hole].slot != static_cast<uint32_t>(slot) + 1) hole = after(g, hole);
    for (uint64_t p = after(g, hole); all[p].slot; p = after(g, p)) {
        const uint64_t from = home(g, hash(slots(g)[all[p].slot - 1].name));
        if ((p + size - from) % size < (p + size - hole) % size) continue;  // its home lies behind the hole
        all[hole] = all[p];
        hole = p;
    }
    all[hole] = {};
}

// ---- slots ----------------------------------------------------------------------------------------------------------

void SharedPool::append(SharedGroup& g, int32_t slot) {
    Slot& s = slots(g)[slot];
    s.previous = g.last;
    s.next = kNone;
    (g.last == kNone ? g.first : slots(g)[g.last].next) = slot;
    g.last = slot;
    ++g.cached;
}

void SharedPool::unlink(SharedGroup& g, int32_t slot) {
    const Slot& s = slots(g)[slot];
    (s.previous == kNone ? g.first : slots(g)[s.previous].next) = s.next;
    (s.next == kNone ? g.last : slots(g)[s.next].previous) = s.previous;
    --g.cached;
}

void SharedPool::drop_key(SharedGroup& g, int32_t slot) {
    erase(g, slot);
    slots(g)[slot].keyed = 0;
    --g.keyed;
    ++g.version;
}

// One more reference of this user.
void SharedPool::hold(SharedGroup& g, int64_t group, int32_t slot) {
    Slot& s = slots(g)[slot];
    if (!s.holders) {
        if (s.keyed) unlink(g, slot);
        ++g.held;
    }
    s.holders |= bit_;
    uint16_t& count = counts_[static_cast<size_t>(group)][static_cast<size_t>(slot)];
    if (!count++) ++mine_[static_cast<size_t>(group)];
}

// Users that hold the slot no more.
void SharedPool::let_go(SharedGroup& g, int32_t slot, uint64_t bits) {
    Slot& s = slots(g)[slot];
    if (!(s.holders & bits)) return;
    s.age = ++head().clock;
    s.holders &= ~bits;
    if (s.holders) return;
    --g.held;
    if (s.keyed) {
        append(g, slot);
    } else {
        s.next = g.first_free;
        g.first_free = slot;
    }
}

// ---- after a death --------------------------------------------------------------------------------------------------

void SharedPool::rebuild() {
    for (int64_t g = 0; g < head().groups; ++g) rebuild(group_of(g));
}

void SharedPool::rebuild(SharedGroup& g) {
    std::memset(static_cast<void*>(places(g)), 0, static_cast<size_t>(g.places) * sizeof(Place));
    g.cached = g.held = g.keyed = 0;
    g.first_free = g.first = g.last = kNone;
    ++g.version;
    std::vector<int32_t> cached;
    bool room = true;
    try {
        cached.reserve(static_cast<size_t>(g.created));
    } catch (const std::bad_alloc&) {
        room = false;  // they keep their keys in another order of age
    }
    for (int32_t i = 0; i < g.created; ++i) {
        Slot& s = slots(g)[i];
        if (s.keyed) {
            insert(g, i, hash(s.name));
            ++g.keyed;
        }
        if (s.holders) {
            ++g.held;
        } else if (!s.keyed) {
            s.next = g.first_free;
            g.first_free = i;
        } else if (room) {
            cached.push_back(i);
        } else {
            append(g, i);
        }
    }
    std::ranges::sort(cached, {}, [&](int32_t i) { return slots(g)[i].age; });
    for (const int32_t i : cached) append(g, i);
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

const char* SharedPool::fault(SharedGroup& g, int64_t group) {
    int64_t held = 0, keyed = 0, cached = 0, free = 0, mine = 0, found = 0;
    const auto& counts = counts_[static_cast<size_t>(group)];
    for (int32_t i = 0; i < g.created; ++i) {
        const Slot& s = slots(g)[i];
        held += s.holders != 0;
        keyed += s.keyed;
        mine += (s.holders & bit_) != 0;
        if (((s.holders & bit_) != 0) != (counts[static_cast<size_t>(i)] > 0))
            return "a slot's holder does not count it";
        if (s.keyed && find(g, s.name, hash(s.name)) != i) return "a key is not found on its slot";
    }
    int32_t before = kNone;
    for (int32_t i = g.first; i != kNone; before = i, i = slots(g)[i].next) {
        const Slot& s = slots(g)[i];
        if (s.previous != before || s.holders || !s.keyed) return "the LRU list is broken";
        if (before != kNone && slots(g)[before].age > s.age) return "the LRU list is not in order of age";
        if (++cached > g.created) return "the LRU list has a circle";
    }
    for (int32_t i = g.first_free; i != kNone; i = slots(g)[i].next) {
        if (slots(g)[i].holders || slots(g)[i].keyed) return "a free slot is in use";
        if (++free > g.created) return "the free list has a circle";
    }
    for (int64_t p = 0; p < g.places; ++p) found += places(g)[p].slot != 0;
    if (before != g.last || cached != g.cached) return "the LRU list has lost its end";
    if (held != g.held || keyed != g.keyed || found != keyed) return "counts disagree";
    if (mine != mine_[static_cast<size_t>(group)]) return "what this user holds was miscounted";
    if (held + cached + free != g.created) return "a slot is lost";
    return nullptr;
}

}  // namespace kvc
