// Hashes of evicted keys in a small table, so that a lookup can tell `evicted` from `never stored`, and who took their pages.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "large_vector.h"

namespace kvc {

// Buckets of four, each key once; the oldest of a bucket falls out. An entry has 40 bits of the hash beside those that name
// the bucket, and the number of the episode in which the key went: a false "yes" for a key that is asked for is as likely as
// four collisions of 40 bits.
//
// An episode is what was evicted for one allocate call. The newest are remembered, in a ring.
class EvictedKeys {
  public:
    struct Episode {
        int64_t ns = 0;         // of the steady clock, when it began
        int64_t evictions = 0;  // of all keys before it
        double slabs = 0;       // ... and the memory of their pages
        int64_t handle = 0;     // of the request that took the pages
        uint64_t session = 0;
    };

    // Makes the table, once, for an arena of so many pages. Without it nothing is remembered.
    void prepare(int64_t pages) {
        if (entries_.size()) return;
        const size_t places = static_cast<size_t>(std::clamp<int64_t>(pages, 1, int64_t{1} << 40)) / 4 * 3;
        const size_t entries = std::clamp(places, kFewest, kMost) / kWays * kWays;
        ZeroedArray<Episode> ring(std::min(std::bit_ceil(entries / 4), kMostEpisodes));
        entries_ = ZeroedArray<uint64_t>(entries);
        ring_ = std::move(ring);
    }
    // What is added from now on belongs to a new episode.
    void begin(const Episode& episode) {
        if (!ring_.size()) return;
        ++episodes_;
        ring_[episodes_ & (ring_.size() - 1)] = episode;
    }
    void add(uint64_t hash) {
        if (!entries_.size()) return;
        const uint64_t own = tag(hash) | (episodes_ & kEpisodeMask);
        uint64_t* b = entries_.data() + first(hash);
        const auto same = [own](uint64_t entry) { return (entry ^ own) <= kEpisodeMask; };
        const bool at0 = same(b[0]), at1 = at0 | same(b[1]), at2 = at1 | same(b[2]);
        b[3] = at2 ? b[3] : b[2];  // without a branch on what most likely misses the cache
        b[2] = at1 ? b[2] : b[1];
        b[1] = at0 ? b[1] : b[0];
        b[0] = own;
    }
    [[gnu::always_inline]] void prefetch(uint64_t hash) const {  // GCC drops calls of what only prefetches
        if (entries_.size()) __builtin_prefetch(entries_.data() + first(hash));
    }
    // Number of the episode in which the key went last, at least 1; 0: it did not, or is not remembered.
    uint64_t find(uint64_t hash) const {
        if (!entries_.size()) return 0;
        const uint64_t own = tag(hash);
        const uint64_t* bucket = entries_.data() + first(hash);
        for (size_t i = 0; i < kWays; ++i)
            if (bucket[i] && (bucket[i] & ~kEpisodeMask) == own)
                return episodes_ - ((episodes_ - bucket[i]) & kEpisodeMask);  // its upper bits are those of the newest
        return 0;
    }
    uint64_t episodes() const { return episodes_; }  // so far: the number of the newest one
    // Nullptr: forgotten. Valid until begin().
    const Episode* episode(uint64_t number) const {
        const bool kept = number >= 1 && number <= episodes_ && episodes_ - number < ring_.size();
        return kept ? &ring_.data()[number & (ring_.size() - 1)] : nullptr;
    }
    void clear() { std::fill(entries_.begin(), entries_.end(), 0); }

  private:
    static constexpr size_t kWays = 4;
    static constexpr size_t kFewest = size_t{1} << 14;
    static constexpr size_t kMost = size_t{1} << 22;
    static constexpr size_t kMostEpisodes = size_t{1} << 16;
    static constexpr uint64_t kEpisodeMask = (uint64_t{1} << 24) - 1;

    static uint64_t tag(uint64_t hash) { return hash << 24; }
    size_t first(uint64_t hash) const { return ((hash >> 32) * (entries_.size() / kWays) >> 32) * kWays; }

    ZeroedArray<uint64_t> entries_;
    ZeroedArray<Episode> ring_;
    uint64_t episodes_ = 0;
};

}  // namespace kvc
