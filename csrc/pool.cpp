#include "pool.h"

#include <algorithm>
#include <bit>
#include <cassert>

namespace kvc {

namespace {
constexpr size_t kFirstSlots = 64;
constexpr int64_t kBatch = 16;  // lookups in flight: enough to hide a DRAM miss behind 15 others
constexpr size_t kGhostWays = 4;
constexpr size_t kMinGhosts = size_t{1} << 14;
constexpr size_t kMaxGhosts = size_t{1} << 22;
}  // namespace

Pool::Pool(int64_t capacity, uint64_t seed)
    : capacity_(capacity), seed_(seed), slots_(kFirstSlots), mask_(kFirstSlots - 1) {}

// ---- index ----------------------------------------------------------------------------------------------------------

int32_t Pool::find(const Digest& digest, uint32_t ns) const {
    const uint32_t wanted = tag(digest, ns);
    for (uint64_t i = wanted & mask_; slots_[i].page != kNoPage; i = (i + 1) & mask_)
        if (matches(slots_[i], wanted, digest, ns)) return slots_[i].page;
    return kNoPage;
}

int64_t Pool::run_length(const DigestRun& run, uint32_t ns, int64_t begin, bool allow_pending) const {
    uint32_t tags[kBatch];
    for (int64_t base = begin; base < run.count; base += kBatch) {
        const int64_t n = std::min(kBatch, run.count - base);
        for (int64_t i = 0; i < n; ++i) {
            tags[i] = tag(run.at(base + i), ns);
            __builtin_prefetch(&slots_[tags[i] & mask_]);
        }
        for (int64_t i = 0; i < n; ++i) {
            const int32_t page = slots_[tags[i] & mask_].page;
            if (page != kNoPage) __builtin_prefetch(&pages_[static_cast<size_t>(page)]);
        }
        for (int64_t i = 0; i < n; ++i) {
            const int32_t id = find(run.at(base + i), ns);
            if (id == kNoPage || (page(id).key == Page::kPending && !allow_pending)) return base + i - begin;
        }
    }
    return std::max<int64_t>(run.count - begin, 0);
}

void Pool::present(const DigestRun& run, uint32_t ns, uint8_t* out) const {
    for (int64_t begin = 0; begin < run.count;) {
        const int64_t length = run_length(run, ns, begin, false);
        std::fill_n(out + begin, length, uint8_t{1});
        begin += length;
        if (begin < run.count) out[begin++] = 0;
    }
}

void Pool::index_insert(uint32_t tag, int32_t id) {
    if (static_cast<uint64_t>(keyed_ + 1) * 2 > slots_.size()) grow_index(slots_.size() * 2);
    uint64_t i = tag & mask_;
    while (slots_[i].page != kNoPage) i = (i + 1) & mask_;
    slots_[i] = {tag, id};
    ++keyed_;
}

void Pool::grow_index(size_t slots) {
    std::vector<Slot> old(slots);
    old.swap(slots_);
    mask_ = slots_.size() - 1;
    for (const Slot& slot : old) {
        if (slot.page == kNoPage) continue;
        uint64_t i = slot.tag & mask_;
        while (slots_[i].page != kNoPage) i = (i + 1) & mask_;
        slots_[i] = slot;
    }
}

// Backward shift: each later slot of the cluster moves into the hole unless its home lies after the hole.
void Pool::index_erase(uint32_t tag, int32_t id) {
    uint64_t hole = tag & mask_;
    while (slots_[hole].page != id) hole = (hole + 1) & mask_;
    for (uint64_t i = (hole + 1) & mask_; slots_[i].page != kNoPage; i = (i + 1) & mask_) {
        const uint64_t home = slots_[i].tag & mask_;
        if (((i - home) & mask_) < ((i - hole) & mask_)) continue;
        slots_[hole] = slots_[i];
        hole = i;
    }
    slots_[hole] = {};
    --keyed_;
}

bool Pool::publish(int32_t id, const Digest& digest, uint32_t ns, int64_t end, Page::Key key) {
    assert(page(id).key == Page::kNone && page(id).refs > 0);
    if (const int32_t other = find(digest, ns); other != kNoPage) {
        if (key == Page::kPending || this->page(other).key == Page::kVisible) return false;
        unpublish(other);  // bytes that are there win over bytes that are still being written
    }
    index_insert(tag(digest, ns), id);
    Page& page = at(id);
    page.digest = digest;
    page.ns = ns;
    page.end = end;
    page.key = key;
    page.kept = false;
    page.hits = 0;
    if (key == Page::kVisible) ++version_;
    else ++pending_;
    return true;
}

void Pool::confirm(int32_t id) {
    assert(page(id).key == Page::kPending);
    at(id).key = Page::kVisible;
    --pending_;
    ++version_;
}

void Pool::unpublish(int32_t id) {
    Page& page = at(id);
    if (page.key == Page::kNone) return;
    index_erase(tag(page.digest, page.ns), id);
    if (page.key == Page::kVisible) ++version_;
    else --pending_;
    page.key = Page::kNone;
    if (page.refs == 0) {
        unlink(id);
        free_.push_back(id);
    }
}

void Pool::forget_all() {
    for (int32_t id = 0; id < created(); ++id) unpublish(id);
    ghosts_.clear();
}

// ---- lists ----------------------------------------------------------------------------------------------------------

void Pool::append(int32_t id, List list) {
    Head& head = lists_[list];
    Page& page = at(id);
    page.list = static_cast<uint8_t>(1 + list);
    page.previous = head.last;
    page.next = kNoPage;
    (head.last == kNoPage ? head.first : at(head.last).next) = id;
    head.last = id;
    ++head.count;
}

void Pool::unlink(int32_t id) {
    Page& page = at(id);
    Head& head = lists_[page.list - 1];
    (page.previous == kNoPage ? head.first : at(page.previous).next) = page.next;
    (page.next == kNoPage ? head.last : at(page.next).previous) = page.previous;
    page.list = 0;
    --head.count;
}

// ---- references -----------------------------------------------------------------------------------------------------

int32_t Pool::take() {
    int32_t id;
    if (!free_.empty()) {
        id = free_.back();
        free_.pop_back();
    } else if (created() < capacity_) {
        id = static_cast<int32_t>(created());
        reserve(1, 0);
        pages_.emplace_back();
    } else {
        id = lists_[kVictims].first != kNoPage ? lists_[kVictims].first : lists_[kLru].first;
        if (id == kNoPage) return kNoPage;
        reserve(1, 0);
        remember_evicted(page(id));
        unlink(id);
        Page& victim = at(id);
        index_erase(tag(victim.digest, victim.ns), id);
        victim.key = Page::kNone;
        ++version_;
        ++evictions_;
    }
    at(id).refs = 1;
    return id;
}

void Pool::reserve(int64_t pages, int64_t keys) {
    const int64_t fresh = std::clamp<int64_t>(pages - free_count(), 0, capacity_ - created());
    const size_t wanted = pages_.size() + static_cast<size_t>(fresh);
    if (wanted > pages_.capacity()) {
        const size_t most = static_cast<size_t>(capacity_);
        pages_.reserve(std::min(std::max(wanted, 2 * pages_.capacity()), most));
    }
    free_.reserve(pages_.capacity());  // so that a release never has to allocate
    if (pages > free_count() + fresh && ghosts_.empty()) {
        const auto places = std::bit_ceil(static_cast<size_t>(capacity_) * 4);
        ghosts_.assign(std::clamp<size_t>(places, kMinGhosts, kMaxGhosts), 0);
    }
    size_t slots = slots_.size();
    while (static_cast<size_t>(keyed_ + keys) * 2 > slots) slots *= 2;
    if (slots > slots_.size()) grow_index(slots);
}

void Pool::acquire(int32_t id) {
    Page& page = at(id);
    if (page.list) unlink(id);
    ++page.refs;
}

void Pool::adopt(int32_t id) {
    acquire(id);
    Page& page = at(id);
    if (page.hits < UINT8_MAX) ++page.hits;
}

void Pool::pin(int32_t id) {
    acquire(id);
    ++at(id).pins;
}

void Pool::unpin(int32_t id) {
    --at(id).pins;
    release(id);
}

void Pool::release(int32_t id, List list) {
    Page& page = at(id);
    assert(page.refs > 0);
    if (--page.refs) return;
    if (page.key == Page::kVisible) {
        append(id, list);
        return;
    }
    if (page.key == Page::kPending) unpublish(id);  // frees it
    else free_.push_back(id);
}

// ---- ghosts ---------------------------------------------------------------------------------------------------------

uint64_t* Pool::ghost_bucket(uint64_t hash) {
    return ghosts_.data() + ((hash >> 32) & (ghosts_.size() / kGhostWays - 1)) * kGhostWays;
}

const uint64_t* Pool::ghost_bucket(uint64_t hash) const { return const_cast<Pool*>(this)->ghost_bucket(hash); }

void Pool::remember_evicted(const Page& page) {
    const uint64_t hash = table_hash(page.digest, page.ns, seed_);
    uint64_t* bucket = ghost_bucket(hash);
    std::copy_backward(bucket, bucket + kGhostWays - 1, bucket + kGhostWays);  // the oldest of the bucket falls out
    bucket[0] = hash | 1;
}

bool Pool::was_evicted(const Digest& digest, uint32_t ns) const {
    if (ghosts_.empty()) return false;
    const uint64_t hash = table_hash(digest, ns, seed_);
    const uint64_t* bucket = ghost_bucket(hash);
    return std::find(bucket, bucket + kGhostWays, hash | 1) != bucket + kGhostWays;
}

// ---- invariants -----------------------------------------------------------------------------------------------------

const char* Pool::check() const {
    int64_t indexed = 0;
    for (size_t i = 0; i < slots_.size(); ++i) {
        if (slots_[i].page == kNoPage) continue;
        ++indexed;
        const Page& owner = page(slots_[i].page);
        if (owner.key == Page::kNone) return "the index names a page without key";
        if (find(owner.digest, owner.ns) != slots_[i].page) return "a key is indexed twice, or out of reach";
    }
    if (indexed != keyed_) return "the count of keys differs from the index";
    int64_t with_key = 0, waiting = 0, listed = 0, held = 0;
    for (const Page& page : pages_) {
        with_key += page.key != Page::kNone;
        waiting += page.key == Page::kPending;
        listed += page.list != 0;
        held += page.refs > 0;
        if (page.refs < 0 || page.pins < 0 || page.pins > page.refs) return "a page has a wrong reference count";
        if ((page.list != 0) != (page.refs == 0 && page.key == Page::kVisible))
            return "the lists do not hold exactly the cached pages";
        if (page.key == Page::kPending && page.refs == 0) return "a pending page has no reference";
    }
    if (with_key != keyed_) return "pages with a key differ from the index";
    if (waiting != pending_) return "the count of pending keys differs from the pages";
    if (listed != cached()) return "the list counts differ from the pages";
    if (held + cached() + free_count() != created()) return "pages are lost: held + cached + free differs from created";
    for (const int list : {kVictims, kLru}) {
        int64_t walked = 0;
        int32_t previous = kNoPage;
        for (int32_t id = lists_[list].first; id != kNoPage; previous = id, id = page(id).next, ++walked)
            if (page(id).list != 1 + list || page(id).previous != previous || walked > created())
                return "a list is broken";
        if (walked != lists_[list].count || previous != lists_[list].last) return "a list end is wrong";
    }
    std::vector<bool> seen(pages_.size());
    for (const int32_t id : free_) {
        if (!contains(id) || seen[static_cast<size_t>(id)]) return "a page is free twice";
        seen[static_cast<size_t>(id)] = true;
        if (page(id).refs || page(id).key != Page::kNone) return "a free page has a key or a reference";
    }
    return nullptr;
}

}  // namespace kvc
