// From key to page: the index of one group. Open addressing, linear probing, at most half full.
#pragma once

#include "large_vector.h"

#include "page.h"

namespace kvc {

// The pages lie with the owner and are passed in. A page that is in the index must not change its digest or namespace.
class KeyIndex {
  public:
    explicit KeyIndex(uint64_t seed);

    int64_t count() const { return count_; }
    uint64_t hash(const Digest& digest, uint32_t ns) const { return table_hash(digest, ns, seed_); }
    // Page of a key, kNoPage if there is none.
    int32_t find(const Page* pages, const Digest& digest, uint32_t ns) const {
        return find(pages, digest, ns, tag(digest, ns));
    }
    int32_t find(const Page* pages, const Digest& digest, uint32_t ns, uint32_t tag) const {
        for (uint64_t i = tag & mask_; slots_[i].page != kNoPage; i = (i + 1) & mask_) {
            if (slots_[i].tag != tag) continue;
            const Page& candidate = pages[slots_[i].page];
            if (candidate.ns == ns && candidate.digest == digest) return slots_[i].page;
        }
        return kNoPage;
    }
    uint32_t tag(const Digest& digest, uint32_t ns) const { return static_cast<uint32_t>(hash(digest, ns)); }
    // How many keys of the run from `begin` on are visible (or pending, if allowed), up to the first that is not.
    int64_t run_length(const Page* pages, const DigestRun& run, uint32_t ns, int64_t begin, bool allow_pending) const;

    // Room for so many more keys: insert() does not allocate then.
    void reserve(int64_t more) {
        if (static_cast<size_t>(count_ + more) * 2 > slots_.size()) grow(more);
    }
    void insert(uint32_t tag, int32_t id) {
        reserve(1);
        uint64_t i = tag & mask_;
        while (slots_[i].page != kNoPage) i = (i + 1) & mask_;
        slots_[i] = {tag, id};
        ++count_;
    }
    void erase(uint32_t tag, int32_t id);
    void move(uint32_t tag, int32_t from, int32_t to);

    // Nullptr if the index is sound and names pages with a key of this group only.
    const char* check(const Page* pages, int64_t n_pages, int32_t group) const;

  private:
    struct Slot {
        uint32_t tag = 0;
        int32_t page = kNoPage;
    };

    void grow(int64_t more);

    uint64_t seed_;
    LargeVector<Slot> slots_;
    uint64_t mask_;
    int64_t count_ = 0;
};

}  // namespace kvc
