// Emptying a slab for another class: its cached pages move to better places, or are evicted.
#include <algorithm>

#include "arena.h"

namespace kvc {

uint64_t Arena::newest_in(const SizeClass& c, int32_t s) const {
    uint64_t newest = 0;
    const int32_t first = s * c.k;
    for (int32_t id = first; id < first + slab(s).fresh; ++id)
        if (page_in(c, id).list == 1 + kLru) newest = std::max<uint64_t>(newest, page_in(c, id).age);
    return newest;
}

// Of the slabs without a held page the one with the lowest heat; of equal ones the one with the fewest pages. With moves
// the heat is the sum of ages, as only the coldest pages of the class will go; without it is the newest page's age, as
// all go. k = 1: the coldest page. O(slabs), and O(k) for each slab whose newest page has gone since.
int32_t Arena::slab_to_reclaim(int32_t size_class) {
    const SizeClass& c = of(size_class);
    if (c.k == 1) return coldest(c);
    int32_t best = kNoSlab;
    for (int32_t s = 0; s < static_cast<int32_t>(created_slabs()); ++s) {
        Slab& candidate = slab(s);
        if (slab(s).owner != size_class || candidate.held || !candidate.used) continue;
        if (candidate.stale) {
            candidate.heat = newest_in(c, s);
            candidate.stale = false;
        }
        if (best == kNoSlab || candidate.heat < slab(best).heat ||
            (candidate.heat == slab(best).heat && candidate.used < slab(best).used))
            best = s;
    }
    return best;
}

// The class must have a slab without a held page. Ends with one more empty slab. Hottest page first: into holes of the
// class, then in place of the coldest page elsewhere; as soon as that one is hotter, this page and what follows go.
void Arena::reclaim(int32_t size_class) {
    SizeClass& c = of(size_class);
    const int32_t s = slab_to_reclaim(size_class);
    const int32_t used = slab(s).used;
    if (used < c.k) unlist_partial(c, s);
    leaving_.clear();
    for (int32_t id = s * c.k; id < s * c.k + slab(s).fresh; ++id)
        if (page_in(c, id).list) leaving_.push_back(id);
    std::sort(leaving_.begin(), leaving_.end(),
              [&c](int32_t a, int32_t b) { return rank(page_in(c, a)) > rank(page_in(c, b)); });
    int32_t elsewhere = coldest(c);
    const auto skip = [&] {  // never rests on a page of this slab: that one may move away
        while (elsewhere != kNoPage && slab_of(c, elsewhere) == s) elsewhere = after(c, elsewhere);
    };
    if (movable_) skip();
    for (const int32_t id : leaving_) {
        if (!movable_) {
            evict(c, id);
        } else if (const int32_t partial = fullest(c); partial != kNoSlab) {
            move_page(size_class, id, take_from(c, partial));
        } else if (elsewhere != kNoPage && rank(page_in(c, elsewhere)) < rank(page_in(c, id))) {
            const int32_t to = elsewhere;
            elsewhere = after(c, elsewhere);
            skip();
            evict(c, to);
            move_page(size_class, id, to);
        } else {
            evict(c, id);
        }
    }
    c.free -= c.k - used;
    --c.owned;
    if (c.k > 1) --c.idle_many;
    slab(s).used = 0;
    push_empty(s);
    ++reclaimed_;
}

// The page keeps its age and its place in the list. The heat of the slab that it leaves matters no more.
void Arena::move_page(int32_t size_class, int32_t from, int32_t to) {
    SizeClass& c = of(size_class);
    Page& old = page_in(c, from);
    Page& page = page_in(c, to);
    page = old;
    old.key = Page::kNone;
    old.list = 0;
    Head& head = c.lists[page.list - 1];
    (page.previous == kNoPage ? head.first : page_in(c, page.previous).next) = to;
    (page.next == kNoPage ? head.last : page_in(c, page.next).previous) = to;
    warm(c, to);
    KeyIndex& index = group_of(static_cast<int32_t>(page.group)).index;
    index.move(index.hash(page.digest, page.ns), from, to);
    moves_.push_back({size_class, from, to});
    ++moved_;
    leave(c, from, ++version_);
}

}  // namespace kvc
