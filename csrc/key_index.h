// From key to page: the index of one group. Buckets of one cache line with 15 places of four bytes, at most four fifths full.
#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <bit>

#include "large_vector.h"
#include "page.h"

namespace kvc {

// A place has the page's number and, in the bits that are left, a part of the key's hash: what is compared before the page is
// looked at. A key lies in the bucket that its hash names, or in one of the next where those before were full; each bucket
// counts the keys that have passed it, so that a search knows where to end and nothing has to move when a key goes. (Buckets
// with a count instead of marks for what was deleted: F14, Bronson and Shi, 2019.)
//
// The pages lie with the owner and are passed in. A page that is in the index must not change its digest or namespace.
class KeyIndex {
  public:
    // At most so many keys at a time, of pages with numbers below that.
    KeyIndex(uint64_t seed, int64_t most);

    int64_t count() const { return count_; }
    uint64_t hash(const Digest& digest, uint32_t ns) const { return table_hash(digest, ns, seed_); }
    // Page of a key, kNoPage if there is none.
    int32_t find(const Page* pages, const Digest& digest, uint32_t ns, uint64_t hash) const {
        const uint32_t wanted = mark(hash);
        uint64_t left = buckets_.size();  // where there are few, keys may have passed all of them
        for (uint64_t b = home(hash);; b = next(b)) {
            const Bucket& bucket = buckets_[b];
            for (uint32_t found = bucket.marked(~page_bits_, wanted); found; found &= found - 1) {
                const int32_t id = page(bucket.places[std::countr_zero(found)]);
                if (pages[id].ns == ns && pages[id].digest == digest) return id;
            }
            if (!bucket.passed || !--left) return kNoPage;
        }
    }
    // Brings closer what find() with this hash reads first.
    [[gnu::always_inline]] void prefetch(uint64_t hash) const {  // GCC drops calls of what only prefetches
        __builtin_prefetch(&buckets_[home(hash)]);
    }
    // ... and next.
    [[gnu::always_inline]] void prefetch(const Page* pages, uint64_t hash) const {
        const Bucket& bucket = buckets_[home(hash)];
        if (const uint32_t found = bucket.marked(~page_bits_, mark(hash)))
            __builtin_prefetch(pages + page(bucket.places[std::countr_zero(found)]));
    }
    // How many keys of the run from `begin` on are visible (or pending, if allowed), up to the first that is not.
    int64_t run_length(const Page* pages, const DigestRun& run, uint32_t ns, int64_t begin, bool allow_pending) const;

    // Room for so many more keys, of pages with numbers below n_pages: none of what follows allocates then.
    void reserve(const Page* pages, int64_t n_pages, int64_t more) {
        if (!has_room(n_pages, more)) rebuild(pages, n_pages, buckets_for(std::min(count_ + more, most_)));
    }
    bool has_room(int64_t n_pages, int64_t more) const {
        return n_pages <= int64_t{page_bits_} && buckets_for(std::min(count_ + more, most_)) <= buckets_.size();
    }
    // The key, which is not there, leads to `id` from now on. After reserve().
    void insert(uint64_t hash, int32_t id);
    void erase(uint64_t hash, int32_t id);
    void move(uint64_t hash, int32_t from, int32_t to);

    // Nullptr if the index is sound and names pages with a key of this group only.
    const char* check(const Page* pages, int64_t n_pages, int32_t group) const;

  private:
    static constexpr int kPlaces = 15;

    // All zero: empty.
    struct alignas(64) Bucket {
        uint32_t places[kPlaces];  // 0: nothing here
        uint32_t passed;           // keys that lie further on, though their home is here or before

        // A bit for each place that is `wanted` in the bits of `mask`.
        uint32_t marked(uint32_t mask, uint32_t wanted) const {
#ifdef __SSE2__
            const __m128i all = _mm_set1_epi32(static_cast<int32_t>(mask));
            const __m128i one = _mm_set1_epi32(static_cast<int32_t>(wanted));
            const auto* lines = reinterpret_cast<const __m128i*>(places);
            const auto equal = [&](int i) {
                return _mm_cmpeq_epi32(_mm_and_si128(_mm_load_si128(lines + i), all), one);
            };
            const __m128i low = _mm_packs_epi32(equal(0), equal(1)), high = _mm_packs_epi32(equal(2), equal(3));
            const int bits = _mm_movemask_epi8(_mm_packs_epi16(low, high));
            return static_cast<uint32_t>(bits) & ((1u << kPlaces) - 1);
#else
            uint32_t found = 0;
            for (int i = 0; i < kPlaces; ++i) found |= uint32_t{(places[i] & mask) == wanted} << i;
            return found;
#endif
        }
        uint32_t empty() const { return marked(UINT32_MAX, 0); }
    };
    static_assert(sizeof(Bucket) == 64);

    static size_t buckets_for(int64_t keys) { return static_cast<size_t>(keys) / 12 + 1; }
    uint64_t home(uint64_t hash) const { return (hash >> 32) * buckets_.size() >> 32; }
    uint64_t next(uint64_t bucket) const { return bucket + 1 == buckets_.size() ? 0 : bucket + 1; }
    // Never zero, so that an empty place has no mark.
    uint32_t mark(uint64_t hash) const {
        const uint32_t bits = static_cast<uint32_t>(hash) & ~page_bits_;
        return bits ? bits : page_bits_ + 1;
    }
    int32_t page(uint32_t place) const { return static_cast<int32_t>(place & page_bits_) - 1; }
    uint32_t of_page(int32_t id) const { return static_cast<uint32_t>(id) + 1; }
    void rebuild(const Page* pages, int64_t n_pages, size_t buckets);

    HashSeed seed_;
    int64_t most_;
    uint32_t page_bits_;  // of a place: the page's number plus one
    ZeroedArray<Bucket> buckets_;
    int64_t count_ = 0;
};

}  // namespace kvc
