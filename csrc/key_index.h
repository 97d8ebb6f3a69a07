// From key to page: the index of one group. Open addressing, linear probing, at most half full.
#pragma once

#include <algorithm>

#include "large_vector.h"
#include "page.h"

namespace kvc {

// The pages lie with the owner and are passed in. A page that is in the index must not change its digest or namespace.
class KeyIndex {
  public:
    // At most so many keys at a time.
    KeyIndex(uint64_t seed, int64_t most);

    int64_t count() const { return count_; }
    uint64_t hash(const Digest& digest, uint32_t ns) const { return table_hash(digest, ns, seed_); }
    // Page of a key, kNoPage if there is none.
    int32_t find(const Page* pages, const Digest& digest, uint32_t ns) const {
        return find(pages, digest, ns, tag(digest, ns));
    }
    int32_t find(const Page* pages, const Digest& digest, uint32_t ns, uint32_t tag) const {
        return slots_[place(pages, digest, ns, tag)].page();
    }
    uint32_t tag(const Digest& digest, uint32_t ns) const { return static_cast<uint32_t>(hash(digest, ns)); }
    // Brings closer what find() and insert() with this tag read first.
    [[gnu::always_inline]] void prefetch(uint32_t tag) const {  // GCC drops calls of what only prefetches
        __builtin_prefetch(&slots_[tag & mask_]);
    }
    [[gnu::always_inline]] void prefetch(const Page* pages, uint32_t tag) const {
        const int32_t page = slots_[tag & mask_].page();
        if (page != kNoPage) __builtin_prefetch(pages + page);
    }
    // How many keys of the run from `begin` on are visible (or pending, if allowed), up to the first that is not.
    int64_t run_length(const Page* pages, const DigestRun& run, uint32_t ns, int64_t begin, bool allow_pending) const;

    // Room for so many more keys: none of what follows allocates then.
    void reserve(int64_t more) {
        if (!has_room(more)) grow(static_cast<size_t>(std::min(count_ + more, most_)));
    }
    bool has_room(int64_t more) const {
        return static_cast<size_t>(std::min(count_ + more, most_)) * 2 <= slots_.size();
    }
    // The page that has the key already, or kNoPage: the key leads to `id` from now on. After reserve().
    int32_t find_or_insert(const Page* pages, const Digest& digest, uint32_t ns, uint32_t tag, int32_t id) {
        Slot& slot = slots_[place(pages, digest, ns, tag)];
        if (!slot.empty()) return slot.page();
        slot = Slot(tag, id);
        ++count_;
        return kNoPage;
    }
    void erase(uint32_t tag, int32_t id);
    void move(uint32_t tag, int32_t from, int32_t to);

    // Nullptr if the index is sound and names pages with a key of this group only.
    const char* check(const Page* pages, int64_t n_pages, int32_t group) const;

  private:
    // All zero: empty.
    struct Slot {
        uint32_t tag = 0;
        int32_t after = 0;  // the page's number plus one

        Slot() = default;
        Slot(uint32_t of, int32_t page) : tag(of), after(page + 1) {}
        bool empty() const { return after == 0; }
        int32_t page() const { return after - 1; }
    };
    static_assert(kNoPage == -1);

    // Of the key, or the empty one where it would come.
    uint64_t place(const Page* pages, const Digest& digest, uint32_t ns, uint32_t tag) const {
        uint64_t i = tag & mask_;
        for (; !slots_[i].empty(); i = (i + 1) & mask_) {
            if (slots_[i].tag != tag) continue;
            const Page& candidate = pages[slots_[i].page()];
            if (candidate.ns == ns && candidate.digest == digest) break;
        }
        return i;
    }
    uint64_t place_of(uint32_t tag, int32_t id) const {
        uint64_t i = tag & mask_;
        while (slots_[i].page() != id) i = (i + 1) & mask_;
        return i;
    }
    void grow(size_t keys);

    uint64_t seed_;
    int64_t most_;
    ZeroedArray<Slot> slots_;
    uint64_t mask_;
    int64_t count_ = 0;
};

}  // namespace kvc
