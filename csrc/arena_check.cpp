// Invariants of `arena.h`: everything that is counted is recounted.
#include <algorithm>

#include "arena.h"

namespace kvc {

const char* Arena::check() const {
    for (int32_t i = 0; i < classes(); ++i) {
        if (const char* broken = check_slabs(i)) return broken;
        if (const char* broken = check_pages(i)) return broken;
        if (const char* broken = check_lists(i)) return broken;
    }
    for (int32_t g = 0; g < static_cast<int32_t>(groups_.size()); ++g) {
        const auto& pages = of(class_of(g)).pages;
        if (const char* broken = group_of(g).index.check(pages.data(), static_cast<int64_t>(pages.size()), g))
            return broken;
    }
    return check_totals();
}

// Each slab is empty, partial or full, and has one owner; the buckets hold exactly the partial ones.
const char* Arena::check_slabs(int32_t size_class) const {
    const SizeClass& c = of(size_class);
    int64_t owned = 0, partial = 0, listed = 0, idle = 0, pinned = 0, free = 0;
    for (int32_t i = 0; i < static_cast<int32_t>(created_slabs()); ++i) {
        if (owner(i) != size_class) continue;
        ++owned;
        if (plain()) continue;
        const Slab& s = slab(i);
        partial += s.used < c.k;
        free += c.k - s.used;
        idle += s.used > 0 && s.held == 0;
        pinned += mine_in(s) > 0;
        if (s.used < 0 || s.used > c.k) return "a slab has more pages in use than it holds";
        if (s.used == 0 && c.wanted == 0) return "a slab without a page in use has an owner";
        if (mine_in(s) < 0) return "the guaranteed request gave up more of a slab than it held";
    }
    for (size_t used = 0; used < c.partial.size(); ++used) {
        const bool bit = c.nonempty[used / 64] >> (used % 64) & 1;
        if (bit != (c.partial[used] != kNoSlab)) return "the bits of the partial slabs are wrong";
        int32_t previous = kNoSlab;
        for (int32_t s = c.partial[used]; s != kNoSlab; previous = s, s = slab(s).next, ++listed)
            if (slab(s).owner != size_class || slab(s).used != static_cast<int32_t>(used) ||
                slab(s).previous != previous || listed > partial)
                return "a list of partial slabs is broken";
    }
    if (owned != c.owned) return "the count of a class's slabs differs from the slabs";
    if (listed != partial) return "the partial slabs are not all listed";
    if (free != c.free) return "the count of free pages differs from the slabs";
    if (c.k > 1 && idle != c.idle_many) return "the count of slabs without a held page differs from the slabs";
    if (pinned != c.pinned) return "the slabs of the guaranteed request are miscounted";
    return nullptr;
}

// Recounts each slab from its pages.
const char* Arena::check_pages(int32_t size_class) const {
    const SizeClass& c = of(size_class);
    int64_t all_held = 0, all_listed = 0;
    for (int32_t s = 0; static_cast<size_t>(s + 1) * static_cast<size_t>(c.k) <= c.pages.size(); ++s) {
        const bool owned = owner(s) == size_class;
        int32_t held = 0, listed = 0;
        uint64_t sum = 0;
        for (int32_t id = s * c.k; id < (s + 1) * c.k; ++id) {
            const Page& page = page_in(c, id);
            held += page.refs > 0;
            listed += page.list != 0;
            if (page.list == 1 + kLru) sum += page.age;
            if (page.refs < 0 || static_cast<int64_t>(page.pins) > page.refs)
                return "a page has a wrong reference count";
            if ((page.list != 0) != (page.refs == 0 && page.key == Page::kVisible))
                return "the lists do not hold exactly the cached pages";
            if (page.rest && (page.refs == 0 || static_cast<int64_t>(page.pins) != page.refs))
                return "a page has a place in a list kept for it, though not only pins hold it";
            if (page.key == Page::kPending && page.refs == 0) return "a pending page has no reference";
            if (!owned && (page.refs || page.key != Page::kNone)) return "a page is in use outside its class's slabs";
        }
        all_held += held;
        all_listed += listed;
        if (owned && plain() && held + listed != 1) return "a page is neither free, held nor cached";
        if (!owned || plain()) continue;
        if (held + listed != slab(s).used) return "pages are lost: held + cached differs from the slab's count";
        if (held < mine_in(slab(s)) && held == 0) return "the guaranteed request has a slab without a held page";
        int32_t freed = 0;
        for (int32_t id = slab(s).freed; id != kNoPage; id = page_in(c, id).next, ++freed)
            if (slab_of(c, id) != s || id - s * c.k >= slab(s).fresh || page_in(c, id).refs || page_in(c, id).list ||
                freed > c.k)
                return "a page is free twice, or in use";
        if (freed + c.k - slab(s).fresh + slab(s).used != c.k) return "a slab's free pages are lost";
        if (c.k == 1) continue;
        if (held != slab(s).held) return "the held pages of a slab are miscounted";
        if (movable_ ? slab(s).heat != sum : !slab(s).stale && slab(s).heat != newest_in(c, s))
            return "the heat of a slab differs from its pages";
    }
    if (all_held != c.held()) return "the held pages of a class are miscounted";
    return all_listed == c.cached() ? nullptr : "the list counts differ from the pages";
}

const char* Arena::check_lists(int32_t size_class) const {
    const SizeClass& c = of(size_class);
    for (const int32_t list : {kVictims, kLru}) {
        int64_t walked = 0;
        int32_t previous = kNoPage;
        uint64_t age = 0;
        for (int32_t id = c.lists[list].first; id != kNoPage; previous = id, id = page_in(c, id).next, ++walked) {
            const Page& page = page_in(c, id);
            if (static_cast<int32_t>(page.list) != 1 + list || page.previous != previous || walked > c.cached())
                return "a list is broken";
            if (page.age <= age || page.age > clock_) return "ages do not increase along a list";
            age = page.age;
        }
        if (walked != c.lists[list].count || previous != c.lists[list].last) return "a list end is wrong";
    }
    return nullptr;
}

const char* Arena::check_totals() const {
    int64_t owned = 0, held = 0, class_held = 0, keys = 0, waiting = 0, visible = 0, evictions = 0, empty = 0;
    for (const SizeClass& c : classes_) {
        owned += c.owned;
        class_held += c.held();
        for (const Page& page : c.pages) {
            waiting += page.key == Page::kPending;
            visible += page.key == Page::kVisible;
        }
    }
    for (const Group& group : groups_) {
        held += group.held;
        keys += group.index.count();
        evictions += group.evictions;
    }
    for (int32_t s = first_empty_; s != kNoSlab && empty <= empty_; s = next_empty(s), ++empty)
        if (owner(s) != kNoClass) return "an empty slab has an owner";
    if (empty != empty_) return "the count of empty slabs differs from their list";
    if (owned + empty_ != created_slabs()) return "slabs are lost: owned + empty differs from created";
    if (created_slabs() > most_slabs_) return "there are more slabs than allowed";
    if (held != class_held) return "held pages of groups and classes differ";
    if (waiting + visible != keys) return "pages with a key differ from the indexes";
    if (waiting != pending_) return "the count of pending keys differs from the pages";
    if (keys != namespaces_.total()) return "keys of namespaces and groups differ";
    if (evictions != evictions_) return "evictions of groups and of all differ";
    return nullptr;
}

}  // namespace kvc
