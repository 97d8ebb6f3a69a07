// How many keys, or records, each namespace has.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kvc {

// Open addressing. Entries that fell to zero stay until the table is made anew, so nothing is ever erased.
class NamespaceCounts {
  public:
    int64_t of(uint32_t ns) const { return slots_[place(ns)].count; }
    // Room for so many more namespaces, so that add() does not allocate.
    void reserve(size_t more) {
        if ((taken_ + more) * 8 > slots_.size() * 7) rebuild(more);
    }
    void add(uint32_t ns) {
        size_t i = place(ns);
        if (!slots_[i].taken) {
            reserve(1);
            i = place(ns);
            slots_[i] = {ns, true, 0};
            ++taken_;
        }
        ++slots_[i].count;
        ++total_;
    }
    void remove(uint32_t ns) {
        --slots_[place(ns)].count;
        --total_;
    }
    void clear(uint32_t ns) {
        int64_t& count = slots_[place(ns)].count;
        total_ -= count;
        count = 0;
    }
    void clear() {
        std::fill(slots_.begin(), slots_.end(), Slot{});
        taken_ = 0;
        total_ = 0;
    }
    int64_t total() const { return total_; }

  private:
    struct Slot {
        uint32_t ns = 0;
        bool taken = false;
        int64_t count = 0;
    };

    size_t place(uint32_t ns) const {
        const size_t mask = slots_.size() - 1;
        size_t i = (ns * uint64_t{0x9e3779b97f4a7c15}) >> 32 & mask;  // Fibonacci hashing
        while (slots_[i].taken && slots_[i].ns != ns) i = (i + 1) & mask;
        return i;
    }
    void rebuild(size_t more) {
        size_t live = 0, size = 64;
        for (const Slot& slot : slots_) live += slot.count > 0;
        while ((live + more) * 4 > size) size *= 2;
        std::vector<Slot> old(size);
        old.swap(slots_);
        taken_ = live;
        for (const Slot& slot : old)
            if (slot.count > 0) slots_[place(slot.ns)] = slot;
    }

    std::vector<Slot> slots_ = std::vector<Slot>(64);
    size_t taken_ = 0;
    int64_t total_ = 0;
};

}  // namespace kvc
