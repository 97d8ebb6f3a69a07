// Implementation of `key_index.h`: lookups in flight side by side, deletion by backward shift.
#include "key_index.h"

#include <algorithm>

namespace kvc {

namespace {
constexpr size_t kFirstSlots = 64;
constexpr int64_t kBatch = 16;  // lookups in flight: enough to hide a DRAM miss behind 15 others
}  // namespace

KeyIndex::KeyIndex(uint64_t seed, int64_t most)
    : seed_(seed), most_(most), slots_(kFirstSlots), mask_(kFirstSlots - 1) {}

int64_t KeyIndex::run_length(const Page* pages, const DigestRun& run, uint32_t ns, int64_t begin,
                             bool allow_pending) const {
    uint32_t tags[kBatch];
    for (int64_t base = begin; base < run.count; base += kBatch) {
        const int64_t n = std::min(kBatch, run.count - base);
        for (int64_t i = 0; i < n; ++i) {
            tags[i] = tag(run.at(base + i), ns);
            prefetch(tags[i]);
        }
        for (int64_t i = 0; i < n; ++i) prefetch(pages, tags[i]);
        for (int64_t i = 0; i < n; ++i) {
            const int32_t id = find(pages, run.at(base + i), ns, tags[i]);
            if (id == kNoPage || (pages[id].key == Page::kPending && !allow_pending)) return base + i - begin;
        }
    }
    return std::max<int64_t>(run.count - begin, 0);
}

void KeyIndex::grow(size_t keys) {
    size_t slots = slots_.size();
    while (keys * 2 > slots) slots *= 2;
    ZeroedArray<Slot> old(slots);
    old.swap(slots_);
    mask_ = slots_.size() - 1;
    for (const Slot& slot : old) {
        if (slot.empty()) continue;
        uint64_t i = slot.tag & mask_;
        while (!slots_[i].empty()) i = (i + 1) & mask_;
        slots_[i] = slot;
    }
}

// Backward shift: each later slot of the cluster moves into the hole unless its home lies after the hole.
void KeyIndex::erase(uint32_t tag, int32_t id) {
    uint64_t hole = place_of(tag, id);
    for (uint64_t i = (hole + 1) & mask_; !slots_[i].empty(); i = (i + 1) & mask_) {
        const uint64_t home = slots_[i].tag & mask_;
        if (((i - home) & mask_) < ((i - hole) & mask_)) continue;
        slots_[hole] = slots_[i];
        hole = i;
    }
    slots_[hole] = {};
    --count_;
}

void KeyIndex::move(uint32_t tag, int32_t from, int32_t to) { slots_[place_of(tag, from)] = Slot(tag, to); }

const char* KeyIndex::check(const Page* pages, int64_t n_pages, int32_t group) const {
    int64_t indexed = 0;
    for (const Slot& slot : slots_) {
        if (slot.empty()) continue;
        ++indexed;
        if (slot.page() < 0 || slot.page() >= n_pages) return "the index names a page that does not exist";
        const Page& owner = pages[slot.page()];
        if (owner.key == Page::kNone) return "the index names a page without key";
        if (static_cast<int32_t>(owner.group) != group) return "the index names a page of another group";
        if (find(pages, owner.digest, owner.ns) != slot.page()) return "a key is indexed twice, or out of reach";
    }
    return indexed == count_ ? nullptr : "the count of keys differs from the index";
}

}  // namespace kvc
