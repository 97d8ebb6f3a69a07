// Implementation of `key_index.h`: lookups in flight side by side; what changes the index.
#include "key_index.h"

#include <algorithm>

namespace kvc {

namespace {
constexpr size_t kFirstBuckets = 4;
constexpr int64_t kAtOnce = int64_t{1} << 20;  // keys: for no more, all room is made at first (5.6 MB as it is written)
constexpr int64_t kFirstPages = (int64_t{1} << 20) - 1;
constexpr int64_t kBatch = 16;  // lookups in flight: enough to hide a DRAM miss behind 15 others

// All bits up to the highest of n.
uint32_t bits_for(int64_t n) { return static_cast<uint32_t>(std::bit_ceil(static_cast<uint64_t>(n) + 1) - 1); }
}  // namespace

KeyIndex::KeyIndex(uint64_t seed, int64_t most)
    : seed_(seed),
      most_(most),
      page_bits_(bits_for(std::min(most, kFirstPages))),
      buckets_(most <= kAtOnce ? buckets_for(most) : kFirstBuckets) {}

int64_t KeyIndex::run_length(const Page* pages, const DigestRun& run, uint32_t ns, int64_t begin,
                             bool allow_pending) const {
    uint64_t hashes[kBatch];
    for (int64_t base = begin; base < run.count; base += kBatch) {
        const int64_t n = std::min(kBatch, run.count - base);
        for (int64_t i = 0; i < n; ++i) prefetch(hashes[i] = hash(run.at(base + i), ns));
        for (int64_t i = 0; i < n; ++i) prefetch(pages, hashes[i]);
        for (int64_t i = 0; i < n; ++i) {
            const int32_t id = find(pages, run.at(base + i), ns, hashes[i]);
            if (id == kNoPage || (pages[id].key == Page::kPending && !allow_pending)) return base + i - begin;
        }
    }
    return std::max<int64_t>(run.count - begin, 0);
}

void KeyIndex::insert(uint64_t hash, int32_t id) {
    uint64_t b = home(hash);
    uint32_t empty;
    for (; !(empty = buckets_[b].empty()); b = next(b)) ++buckets_[b].passed;
    buckets_[b].places[std::countr_zero(empty)] = mark(hash) | of_page(id);
    ++count_;
}

void KeyIndex::erase(uint64_t hash, int32_t id) {
    uint64_t b = home(hash);
    uint32_t found;
    for (; !(found = buckets_[b].marked(page_bits_, of_page(id))); b = next(b)) --buckets_[b].passed;
    buckets_[b].places[std::countr_zero(found)] = 0;
    --count_;
}

void KeyIndex::move(uint64_t hash, int32_t from, int32_t to) {
    uint64_t b = home(hash);
    uint32_t found;
    for (; !(found = buckets_[b].marked(page_bits_, of_page(from))); b = next(b)) {
    }
    buckets_[b].places[std::countr_zero(found)] = mark(hash) | of_page(to);
}

// With at least so many buckets, twice as many as there were where they were too few, but for what can never be needed; and
// twice as many page numbers. The hashes are made anew: a place has a part of one only.
void KeyIndex::rebuild(const Page* pages, int64_t n_pages, size_t buckets) {
    if (buckets > buckets_.size()) buckets = std::max(buckets, std::min(2 * buckets_.size(), buckets_for(most_)));
    ZeroedArray<Bucket> old(std::max(buckets, buckets_.size()));
    old.swap(buckets_);
    const uint32_t old_bits = page_bits_;
    if (n_pages > int64_t{page_bits_}) page_bits_ = bits_for(std::min(most_, 2 * n_pages));
    count_ = 0;
    auto page_in = [old_bits](uint32_t place) { return static_cast<int32_t>(place & old_bits) - 1; };
    constexpr size_t ahead = 2;  // buckets whose pages are on their way
    for (size_t b = 0; b < old.size() + ahead; ++b) {
        if (b < old.size())
            for (const uint32_t place : old[b].places)
                if (place) __builtin_prefetch(pages + page_in(place));
        if (b < ahead) continue;
        for (const uint32_t place : old[b - ahead].places) {
            if (!place) continue;
            const Page& owner = pages[page_in(place)];
            insert(hash(owner.digest, owner.ns), page_in(place));
        }
    }
}

const char* KeyIndex::check(const Page* pages, int64_t n_pages, int32_t group) const {
    int64_t indexed = 0, passed = 0, beyond = 0;
    for (uint64_t b = 0; b < buckets_.size(); ++b) {
        passed += buckets_[b].passed;
        for (const uint32_t place : buckets_[b].places) {
            if (!place) continue;
            ++indexed;
            const int32_t id = page(place);
            if (id < 0 || id >= n_pages) return "the index names a page that does not exist";
            const Page& owner = pages[id];
            if (owner.key == Page::kNone) return "the index names a page without key";
            if (static_cast<int32_t>(owner.group) != group) return "the index names a page of another group";
            const uint64_t own = hash(owner.digest, owner.ns), at = home(own);
            if (find(pages, owner.digest, owner.ns, own) != id) return "a key is indexed twice, or out of reach";
            beyond += static_cast<int64_t>(b >= at ? b - at : b + buckets_.size() - at);
        }
    }
    if (passed != beyond) return "the counts of passed keys differ from where keys lie";
    return indexed == count_ ? nullptr : "the count of keys differs from the index";
}

}  // namespace kvc
