// Hashes of evicted keys in a small table, so that a lookup can tell `evicted` from `never stored`.
#pragma once

#include <algorithm>
#include <cstdint>

#include "large_vector.h"

namespace kvc {

// Buckets of four, each hash once; the oldest of a bucket falls out. A false "yes" is as likely as a collision of 64-bit hashes.
class EvictedKeys {
  public:
    // Makes the table, once, for an arena of so many pages. Without it nothing is remembered.
    void prepare(int64_t pages) {
        if (hashes_.size()) return;
        const size_t places = static_cast<size_t>(std::clamp<int64_t>(pages, 1, int64_t{1} << 40)) / 4 * 3;
        hashes_ = ZeroedArray<uint64_t>(std::clamp(places, kFewest, kMost) / kWays * kWays);
    }
    void add(uint64_t hash) {
        if (!hashes_.size()) return;
        const uint64_t own = hash | 1;
        uint64_t* b = hashes_.data() + first(hash);
        const bool at0 = b[0] == own, at1 = at0 | (b[1] == own), at2 = at1 | (b[2] == own);
        b[3] = at2 ? b[3] : b[2];  // without a branch on what most likely misses the cache
        b[2] = at1 ? b[2] : b[1];
        b[1] = at0 ? b[1] : b[0];
        b[0] = own;
    }
    [[gnu::always_inline]] void prefetch(uint64_t hash) const {  // GCC drops calls of what only prefetches
        if (hashes_.size()) __builtin_prefetch(hashes_.data() + first(hash));
    }
    bool contains(uint64_t hash) const {
        if (!hashes_.size()) return false;
        const uint64_t* bucket = hashes_.data() + first(hash);
        return std::find(bucket, bucket + kWays, hash | 1) != bucket + kWays;
    }
    void clear() { std::fill(hashes_.begin(), hashes_.end(), 0); }

  private:
    static constexpr size_t kWays = 4;
    static constexpr size_t kFewest = size_t{1} << 14;
    static constexpr size_t kMost = size_t{1} << 22;

    size_t first(uint64_t hash) const { return ((hash >> 32) * (hashes_.size() / kWays) >> 32) * kWays; }

    ZeroedArray<uint64_t> hashes_;
};

}  // namespace kvc
