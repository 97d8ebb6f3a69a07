// Hashes of evicted keys in a small table, so that a lookup can tell `evicted` from `never stored`.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace kvc {

// Buckets of four; the oldest of a bucket falls out. A false "yes" is as likely as a collision of 64-bit hashes.
class EvictedKeys {
  public:
    // Makes the table, once, for an arena of so many pages. Without it nothing is remembered.
    void prepare(int64_t pages) {
        if (!hashes_.empty()) return;
        const size_t places = static_cast<size_t>(std::clamp<int64_t>(pages, 1, int64_t{1} << 40)) * kWays;
        hashes_.assign(std::clamp(std::bit_ceil(places), kFewest, kMost), 0);
    }
    void add(uint64_t hash) {
        if (hashes_.empty()) return;
        uint64_t* bucket = hashes_.data() + first(hash);
        uint64_t* last = std::find(bucket, bucket + kWays - 1, hash | 1);  // its own old place, or that of the oldest
        std::copy_backward(bucket, last, last + 1);
        bucket[0] = hash | 1;
    }
    bool contains(uint64_t hash) const {
        if (hashes_.empty()) return false;
        const uint64_t* bucket = hashes_.data() + first(hash);
        return std::find(bucket, bucket + kWays, hash | 1) != bucket + kWays;
    }
    void clear() { std::fill(hashes_.begin(), hashes_.end(), 0); }

  private:
    static constexpr size_t kWays = 4;
    static constexpr size_t kFewest = size_t{1} << 14;
    static constexpr size_t kMost = size_t{1} << 22;

    size_t first(uint64_t hash) const { return ((hash >> 32) & (hashes_.size() / kWays - 1)) * kWays; }

    std::vector<uint64_t> hashes_;
};

}  // namespace kvc
