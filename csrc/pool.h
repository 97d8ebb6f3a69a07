// A pool of equal pages with reference counts, an index from key to page, and LRU eviction.
//
//   created pages:   free      no key, no reference          stack, reused first
//                    held      references                    in no list
//                    cached    visible key, no reference     victims list, then LRU list: evicted from the heads
//
// A key is visible, or pending while its bytes are being written. Pages are created as they are first needed, so a large
// pool costs nothing before it is used.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "digest.h"

namespace kvc {

inline constexpr int32_t kNoPage = -1;
inline constexpr int64_t kUnlimitedPages = INT32_MAX - 1;

// One cache line, so that verifying a key costs one miss.
struct alignas(64) Page {
    Digest digest{};
    int64_t end = 0;  // position after the block, or of the state
    uint32_t ns = 0;
    int32_t refs = 0;
    int32_t previous = kNoPage;
    int32_t next = kNoPage;
    int32_t pins = 0;  // the part of refs that readers outside hold
    enum Key : uint8_t { kNone, kPending, kVisible } key = kNone;
    bool kept = false;  // declared: keeps its place when superseded
    uint8_t hits = 0;   // adoptions, saturating
    uint8_t list = 0;   // 0: none, else 1 + List
};
static_assert(sizeof(Page) == 64);

// Every stride-th digest of a chain.
struct DigestRun {
    const uint8_t* first = nullptr;
    int64_t stride_bytes = 32;
    int64_t count = 0;

    Digest at(int64_t i) const {
        Digest digest;
        std::memcpy(digest.bytes, first + i * stride_bytes, 32);
        return digest;
    }
};

class Pool {
  public:
    enum List { kVictims = 0, kLru = 1 };

    Pool(int64_t capacity, uint64_t seed);

    // ---- counts
    int64_t capacity() const { return capacity_; }
    int64_t created() const { return static_cast<int64_t>(pages_.size()); }
    int64_t free_count() const { return static_cast<int64_t>(free_.size()); }
    int64_t cached() const { return lists_[0].count + lists_[1].count; }
    int64_t keyed() const { return keyed_; }
    int64_t pending() const { return pending_; }
    int64_t evictions() const { return evictions_; }
    // Pages that take() can give now.
    int64_t available() const { return capacity_ - created() + free_count() + cached(); }
    // Changes whenever a key becomes visible or goes.
    uint64_t version() const { return version_; }
    bool contains(int64_t page) const { return page >= 0 && page < created(); }
    const Page& page(int32_t id) const { return pages_[static_cast<size_t>(id)]; }

    // ---- keys
    // Page of a key, visible or pending; kNoPage if neither.
    int32_t find(const Digest& digest, uint32_t ns) const;
    // How many keys of the run from `begin` on are visible (or pending, if allowed), up to the first that is not.
    int64_t run_length(const DigestRun& run, uint32_t ns, int64_t begin, bool allow_pending) const;
    void present(const DigestRun& run, uint32_t ns, uint8_t* out) const;
    // False, and nothing done, where the key is on another page; only a visible key is taken over from a pending one.
    // The page must be held and without key.
    bool publish(int32_t id, const Digest& digest, uint32_t ns, int64_t end, Page::Key key);
    void confirm(int32_t id);  // pending -> visible
    void unpublish(int32_t id);
    void keep(int32_t id) { at(id).kept = true; }
    bool was_evicted(const Digest& digest, uint32_t ns) const;
    void forget_all();  // drops every key

    // Room for n more pages to be taken and keys to be given: what follows cannot run out of memory half-way.
    void reserve(int64_t pages, int64_t keys);

    // ---- references
    // A page without key and one reference, or kNoPage. Free pages first, then new ones, then the oldest cached page.
    int32_t take();
    void acquire(int32_t id);  // one more reference
    void adopt(int32_t id);    // acquire, counted as a hit
    void pin(int32_t id);
    void unpin(int32_t id);
    // Drops a reference. The last one frees the page, or caches it as the newest of `list`.
    void release(int32_t id, List list = kLru);

    // Nullptr if all is well, else what is broken. O(pages).
    const char* check() const;

  private:
    struct Head {
        int32_t first = kNoPage;
        int32_t last = kNoPage;
        int64_t count = 0;
    };
    struct Slot {
        uint32_t tag = 0;
        int32_t page = kNoPage;
    };

    Page& at(int32_t id) { return pages_[static_cast<size_t>(id)]; }
    uint32_t tag(const Digest& digest, uint32_t ns) const {
        return static_cast<uint32_t>(table_hash(digest, ns, seed_));
    }
    bool matches(const Slot& slot, uint32_t tag, const Digest& digest, uint32_t ns) const {
        if (slot.tag != tag) return false;
        const Page& candidate = page(slot.page);
        return candidate.ns == ns && candidate.digest == digest;
    }
    void append(int32_t id, List list);
    void unlink(int32_t id);
    void index_insert(uint32_t tag, int32_t id);
    void index_erase(uint32_t tag, int32_t id);
    void grow_index(size_t slots);
    void remember_evicted(const Page& page);
    uint64_t* ghost_bucket(uint64_t hash);
    const uint64_t* ghost_bucket(uint64_t hash) const;

    int64_t capacity_;
    uint64_t seed_;
    std::vector<Page> pages_;
    std::vector<int32_t> free_;
    Head lists_[2];
    std::vector<Slot> slots_;  // open addressing, linear probing, at most half full
    uint64_t mask_;
    int64_t keyed_ = 0;
    int64_t pending_ = 0;
    int64_t evictions_ = 0;
    uint64_t version_ = 1;
    std::vector<uint64_t> ghosts_;  // hashes of evicted keys, in small buckets: newer ones push older ones out
};

}  // namespace kvc
