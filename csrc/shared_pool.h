// Slots of several processes: tables in memory that all of them map, which outlive the death of any.
//
//   SharedHead | GroupHead x groups | of each group: Slot x slots, Place x places | pages
//
// What a slot says of itself is the truth: who holds it, whether it has a key, how old it is. The index, the free list and
// the LRU list follow from that. Whoever finds that the owner of the lock died in the middle of a change makes them anew.
//
//   held    somebody's bit is in `holders`: neither evicted nor given to anybody else, whoever asks
//   cached  a key, nobody holds it: evictable
//   free    neither
//
// Each user (an attachment) counts its own references at home, and has one bit in the slot. A dead user's bits are taken back
// by forget(). A slot gets its key when its bytes are complete, so half-written ones are never found.
//
// Nobody has the lock for much longer than a millisecond, but to repair and to check: many keys are looked up, and many slots
// let go, in pieces. Keys that are to come or go, and slots that are let go, while the lock is not to be had in time are owed,
// and paid before the next call.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "digest.h"
#include "exclusive.h"

namespace kvc {

inline constexpr int kMostUsers = 64;
inline constexpr int64_t kMostSharedGroups = 64;
inline constexpr int32_t kNone = -1;  // no slot

// The key of a page: all zeros for native keys, then the digest.
struct SharedName {
    Digest space;
    Digest digest;

    bool operator==(const SharedName& other) const { return digest == other.digest && space == other.space; }
};
static_assert(sizeof(SharedName) == 64);

struct alignas(64) Slot {
    SharedName name;
    uint8_t checksum[16];  // of the page and its name; written by who stores, while it holds the slot
    uint64_t holders;      // a bit for each user
    uint64_t age;          // clock at the last time it was let go
    int32_t previous;      // in the LRU list; free: next only
    int32_t next;
    uint32_t keyed;  // 0 or 1: set last, cleared first
};
static_assert(sizeof(Slot) == 128);

// Of an open-addressing table: linear probing, nothing deleted but moved back (Knuth, TAOCP 3, 6.4, algorithm R).
struct Place {
    uint32_t slot;  // + 1; 0: nothing here
    uint32_t tag;   // of the hash
};

struct SharedGroup {
    int64_t slots;
    int64_t page_bytes;
    int64_t places;
    int64_t slots_at, places_at, pages_at;  // from the region's beginning
    int64_t created;                        // slots that were ever used
    int64_t cached, held, keyed;
    int32_t first_free;
    int32_t first, last;  // of the LRU list, the oldest first
    uint32_t unused;
    uint64_t version;  // changes whenever a key appears or goes
};

struct SharedHead {
    uint64_t magic;
    uint32_t version;
    uint32_t mutex_bytes;
    int64_t bytes;
    int64_t groups;
    uint8_t layout[32];
    uint64_t seed;
    uint64_t clock;
    uint64_t recoveries;
    uint64_t users;      // a bit for each that came and was not forgotten
    uint64_t pid_space;  // the robust lock knows its owner by a number that is unique in one pid namespace alone
    uint64_t waiting;    // for the lock; more where some died meanwhile
    pthread_mutex_t mutex;
};

// One user of a region. Owns no memory of it.
class SharedPool {
  public:
    static int64_t tables_bytes(int64_t groups, const int64_t* slots);
    // Where the pages of each group begin; returns the bytes of all.
    static int64_t place_pages(int64_t groups, const int64_t* slots, const int64_t* page_bytes, int64_t* pages_at);
    static int32_t format(uint8_t* base, int64_t bytes, int64_t groups, const int64_t* slots, const int64_t* page_bytes,
                          const uint8_t* layout, uint64_t seed);
    static int32_t verify(const uint8_t* base, int64_t bytes, int64_t groups, const int64_t* slots,
                          const int64_t* page_bytes, const uint8_t* layout);

    SharedPool(uint8_t* base, int user);
    int64_t groups() const { return std::ssize(mine_); }
    // The region is not looked at any more: nothing is found or taken, and what is held here is let go here alone.
    void detach() { base_ = nullptr; }

    // KVC_BUSY: the lock was not to be had in time. KVC_PAUSED: several times in a row, so that it is not tried for a while.
    // Then present and acquire have done nothing, take has taken less, and the others are owed.
    int32_t present(int64_t group, const uint8_t* space, const uint8_t* digests, int64_t stride, int64_t n,
                    uint8_t* out);
    int32_t acquire(int64_t group, const uint8_t* space, const uint8_t* digests, int64_t stride, int64_t n,
                    int32_t* slots);
    // As acquire, of slots that this user holds: takes no lock. Finds them fast, and surely, where both are in one order.
    int32_t acquire_held(int64_t group, const uint8_t* space, const uint8_t* digests, int64_t stride, int64_t n,
                         const int32_t* held, int64_t count, int32_t* slots);
    int32_t take(int64_t group, int64_t n, int32_t* slots, int64_t* taken);
    // published[i] = 1 also where it is owed.
    int32_t publish(int64_t group, const uint8_t* space, const uint8_t* digests, const int32_t* slots, int64_t n,
                    uint8_t* published);
    int32_t unpublish(int64_t group, int32_t slot);
    int32_t release(int64_t group, const int32_t* slots, int64_t n);
    int32_t forget(int user);
    uint64_t users() { return base_ ? std::atomic_ref(head().users).load(std::memory_order_relaxed) : 0; }
    int32_t stats(int64_t group, kvc_shared_stats* out);
    int32_t check(int64_t group);
    uint64_t version(int64_t group) const;

    // On one other thread, which may take more to help it, for slots that this user holds.
    int32_t store(int64_t group, const uint64_t* pages, const int32_t* slots, const uint8_t* names, int64_t n,
                  int32_t threads);
    int32_t load(int64_t group, const uint64_t* pages, const int32_t* slots, const uint8_t* names, int64_t n,
                 int32_t threads, uint8_t* ok);

    Exclusive entered;

  private:
    SharedHead& head() { return *reinterpret_cast<SharedHead*>(base_); }
    SharedGroup& group_of(int64_t g) { return reinterpret_cast<SharedGroup*>(base_ + sizeof(SharedHead))[g]; }
    const SharedGroup& group_of(int64_t g) const {
        return reinterpret_cast<const SharedGroup*>(base_ + sizeof(SharedHead))[g];
    }
    Slot* slots(const SharedGroup& g) { return reinterpret_cast<Slot*>(base_ + g.slots_at); }
    Place* places(const SharedGroup& g) { return reinterpret_cast<Place*>(base_ + g.places_at); }

    // What was done at home and not in the region yet, in order. The slots are held there until then.
    struct Debt {
        struct Item {
            int32_t slot;
            int32_t what;  // the name that it gets, or one of these
        };
        static constexpr int32_t kUnpublish = -1, kLetGo = -2;
        std::vector<Item> items;
        std::vector<SharedName> names;
        size_t paid = 0;
    };

    int32_t lock_in_time();
    template <typename Body>
    int32_t locked(Body&& body);
    template <typename Body>
    int32_t in_turn(Body&& body);
    void let_others();
    template <typename Visit>
    int32_t each_key(int64_t group, const uint8_t* space, const uint8_t* digests, int64_t stride, int64_t n,
                     Visit&& visit);
    int32_t pay(int64_t group);
    void pay(SharedGroup& g, int64_t group, const Debt::Item& item);
    void let_go_here(int64_t group, const int32_t* slots, int64_t n);
    int32_t check_slots(int64_t group, const int32_t* slots, int64_t n) const;
    uint64_t hash(const SharedName& name) const;
    static uint64_t home(const SharedGroup& g, uint64_t hash) {
        return (hash >> 32) * static_cast<uint64_t>(g.places) >> 32;
    }
    int32_t find(SharedGroup& g, const SharedName& name, uint64_t hash);
    void insert(SharedGroup& g, int32_t slot, uint64_t hash);
    bool give_key(SharedGroup& g, int32_t slot, const SharedName& name);
    void erase(SharedGroup& g, int32_t slot);
    void drop_key(SharedGroup& g, int32_t slot);
    void append(SharedGroup& g, int32_t slot);
    void unlink(SharedGroup& g, int32_t slot);
    void hold(SharedGroup& g, int64_t group, int32_t slot);
    void let_go(SharedGroup& g, int32_t slot, uint64_t bits);
    void rebuild();
    void rebuild(SharedGroup& g);
    const char* fault(SharedGroup& g, int64_t group);

    uint8_t* base_;  // nullptr: detached
    uint64_t bit_;
    HashSeed seed_;
    std::vector<std::vector<uint16_t>> counts_;  // of each group and slot: references of this user
    std::vector<int64_t> mine_;                  // of each group: slots that this user holds
    std::vector<int64_t> evictions_;             // ... and keys that it has evicted
    std::vector<Debt> debts_;
    int timeouts_ = 0;         // in a row
    int64_t pause_until_ = 0;  // nanoseconds of the monotonic clock
};

}  // namespace kvc
