// Implementation of `shared_pool.h`: the tables of a region are made, and looked at by who attaches.
#include <sys/stat.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <vector>

#include "error.h"
#include "shared_pool.h"

namespace kvc {

namespace {

constexpr auto kMagic = std::bit_cast<uint64_t>(std::array<char, 8>{'k', 'v', 'c', 'h', 'o', 's', 't', '\n'});
constexpr uint32_t kVersion = 2;
constexpr int64_t kPageAlign = 4096;

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

// Of this process; 0: a system that does not tell.
uint64_t pid_space() {
    struct stat about{};
    return stat("/proc/self/ns/pid", &about) ? 0 : about.st_ino;
}

int32_t too_small(int64_t bytes, int64_t needed) {
    return fail(KVC_E_ARGUMENT, "%lld bytes for a region of %lld", static_cast<L>(bytes), static_cast<L>(needed));
}

}  // namespace

int64_t SharedPool::tables_bytes(int64_t groups, const int64_t* slots) {
    return lay_out(groups, slots, [](int64_t, int64_t, int64_t) {});
}

int64_t SharedPool::place_pages(int64_t groups, const int64_t* slots, const int64_t* page_bytes, int64_t* pages_at) {
    int64_t at = tables_bytes(groups, slots);
    for (int64_t g = 0; g < groups; ++g) {
        pages_at[g] = at;
        at = aligned(at + slots[g] * page_bytes[g], kPageAlign);
    }
    return at;
}

// The memory is all zeros, and nobody else looks at it. The magic comes last.
int32_t SharedPool::format(uint8_t* base, int64_t bytes, int64_t groups, const int64_t* slots,
                           const int64_t* page_bytes, const uint8_t* layout, uint64_t seed) {
    std::vector<int64_t> pages_at(static_cast<size_t>(groups));
    if (const int64_t all = place_pages(groups, slots, page_bytes, pages_at.data()); all > bytes)
        return too_small(bytes, all);
    auto& head = *reinterpret_cast<SharedHead*>(base);
    auto* of = reinterpret_cast<SharedGroup*>(base + sizeof(SharedHead));
    lay_out(groups, slots, [&](int64_t g, int64_t slots_at, int64_t places_at) {
        of[g] = {};
        of[g].slots = slots[g];
        of[g].page_bytes = page_bytes[g];
        of[g].places = places_for(slots[g]);
        of[g].slots_at = slots_at;
        of[g].places_at = places_at;
        of[g].pages_at = pages_at[static_cast<size_t>(g)];
        of[g].first_free = of[g].first = of[g].last = kNone;
        of[g].version = 1;
    });
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
    head.pid_space = pid_space();
    std::memcpy(head.layout, layout, 32);
    std::atomic_ref(head.magic).store(kMagic, std::memory_order_release);
    return KVC_OK;
}

int32_t SharedPool::verify(const uint8_t* base, int64_t bytes, int64_t groups, const int64_t* slots,
                           const int64_t* page_bytes, const uint8_t* layout) {
    if (const int64_t least = tables_bytes(groups, slots); bytes < least) return too_small(bytes, least);
    const auto& head = *reinterpret_cast<const SharedHead*>(base);
    const auto* of = reinterpret_cast<const SharedGroup*>(base + sizeof(SharedHead));
    if (std::atomic_ref(const_cast<uint64_t&>(head.magic)).load(std::memory_order_acquire) != kMagic)
        return fail(KVC_E_ARGUMENT, "it is no region of this library");
    if (head.version != kVersion)
        return fail(KVC_E_ARGUMENT, "it has version %u of the format, this library %u", head.version, kVersion);
    if (head.mutex_bytes != sizeof(pthread_mutex_t))
        return fail(KVC_E_ARGUMENT, "its locks are of another C library (%u bytes, here %zu)", head.mutex_bytes,
                    sizeof(pthread_mutex_t));
    if (head.pid_space != pid_space())
        return fail(KVC_E_ARGUMENT,
                    "its users are in another pid namespace (another container), where the lock cannot tell who died:"
                    " give all its users one (docker --pid, Kubernetes shareProcessNamespace), or each container a"
                    " region of its own");
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
    std::vector<int64_t> pages_at(static_cast<size_t>(groups));
    const int64_t all = place_pages(groups, slots, page_bytes, pages_at.data());
    bool same = true;
    lay_out(groups, slots, [&](int64_t g, int64_t slots_at, int64_t places_at) {
        same &= of[g].slots_at == slots_at && of[g].places_at == places_at && of[g].places == places_for(slots[g]);
    });
    for (int64_t g = 0; g < groups; ++g)
        same &= of[g].pages_at == pages_at[static_cast<size_t>(g)] && of[g].created >= 0 && of[g].created <= slots[g];
    if (!same || all > bytes) return fail(KVC_E_ARGUMENT, "its tables are damaged");
    if (head.bytes != bytes)
        return fail(KVC_E_ARGUMENT, "it says that it has %lld bytes and has %lld", static_cast<L>(head.bytes),
                    static_cast<L>(bytes));
    return KVC_OK;
}

}  // namespace kvc
