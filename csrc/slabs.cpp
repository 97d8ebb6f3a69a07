// Slabs of `arena.h`: which are partly free, which change their class, and where the next page comes from.
#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "arena.h"

namespace kvc {

// ---- partial slabs, by used pages -----------------------------------------------------------------------------------

void Arena::list_partial(SizeClass& c, int32_t s) {
    const auto used = static_cast<size_t>(slab(s).used);
    int32_t& first = c.partial[used];
    slab(s).previous = kNoSlab;
    slab(s).next = first;
    if (first != kNoSlab) slab(first).previous = s;
    first = s;
    c.nonempty[used / 64] |= uint64_t{1} << (used % 64);
}

void Arena::unlist_partial(SizeClass& c, int32_t s) {
    const auto used = static_cast<size_t>(slab(s).used);
    const int32_t previous = slab(s).previous, next = slab(s).next;
    if (next != kNoSlab) slab(next).previous = previous;
    if (previous != kNoSlab) {
        slab(previous).next = next;
        return;
    }
    c.partial[used] = next;
    if (next == kNoSlab) c.nonempty[used / 64] &= ~(uint64_t{1} << (used % 64));
}

int32_t Arena::fullest(const SizeClass& c) const {
    for (size_t word = c.nonempty.size(); word-- > 0;)
        if (const uint64_t bits = c.nonempty[word])
            return c.partial[word * 64 + 63 - static_cast<size_t>(std::countl_zero(bits))];
    return kNoSlab;
}

// A free page of the slab is used from now on. The caller gives it a reference or a cached page's content.
int32_t Arena::take_from(SizeClass& c, int32_t s) {
    unlist_partial(c, s);
    Slab& from = slab(s);
    int32_t id = from.freed;
    if (id != kNoPage) from.freed = page_in(c, id).next;
    else id = s * c.k + from.fresh++;
    if (from.used++ == 0 && c.k > 1) ++c.idle_many;
    --c.free;
    if (from.used < c.k) list_partial(c, s);
    return id;
}

// The page has no key, no reference, and is in no list.
void Arena::free_page(SizeClass& c, int32_t id) {
    const int32_t s = slab_of(c, id);
    if (c.k == 1) {
        if (!plain()) slab(s).used = 0;
        --c.owned;
        push_empty(s);
        return;
    }
    Slab& from = slab(s);
    if (from.used < c.k) unlist_partial(c, s);
    page_in(c, id).next = from.freed;
    from.freed = id;
    ++c.free;
    if (--from.used) {
        list_partial(c, s);
        return;
    }
    --c.idle_many;
    c.free -= c.k;
    --c.owned;
    push_empty(s);
}

// ---- slabs between classes ------------------------------------------------------------------------------------------

// An empty or a new slab; in no list yet.
inline int32_t Arena::own_slab(int32_t size_class) {
    int32_t s = first_empty_;
    if (s != kNoSlab) {
        first_empty_ = next_empty(s);
        --empty_;
    } else {
        s = static_cast<int32_t>(created_slabs());
        if (!plain()) slabs_.emplace_back();
    }
    SizeClass& c = of(size_class);
    const auto pages = (static_cast<size_t>(s) + 1) * static_cast<size_t>(c.k);
    if (c.pages.size() < pages) {
        c.pages.resize(pages);
        c.left.resize(region_of(static_cast<int32_t>(pages - 1)) + 1);
    }
    ++c.owned;
    return s;
}

// All its pages are free.
int32_t Arena::give_slab(int32_t size_class) {
    const int32_t s = own_slab(size_class);
    slab(s) = Slab{.owner = static_cast<int16_t>(size_class)};
    of(size_class).free += of(size_class).k;
    list_partial(of(size_class), s);
    return s;
}

// As take_from(give_slab()).
int32_t Arena::take_new(int32_t size_class) {
    SizeClass& c = of(size_class);
    if (c.k > 1) return take_from(c, give_slab(size_class));
    const int32_t s = own_slab(size_class);
    if (plain()) return s;
    Slab& only = slab(s);  // of one page: what else it says stays unread, but for `mine`, which is 0
    only.owner = static_cast<int16_t>(size_class);
    only.used = only.fresh = 1;
    only.freed = kNoPage;
    return s;
}

// What an abandoned secure() has left: slabs of a class without a used page.
void Arena::give_back_unused() {
    for (SizeClass& c : classes_) {
        c.wanted = 0;
        while (c.partial[0] != kNoSlab) {
            const int32_t s = c.partial[0];
            unlist_partial(c, s);
            c.free -= c.k;
            --c.owned;
            push_empty(s);
        }
    }
}

// Slabs that the class can give away and still have n pages.
int64_t Arena::can_spare(const SizeClass& c, int64_t n) const {
    return c.own() < n ? 0 : std::min(c.idle(), (c.own() - n) / c.k);
}

bool Arena::can_secure(std::span<const int64_t> n) const {
    int64_t lacking = 0, to_give = empty_ + uncreated();
    for (int32_t i = 0; i < classes(); ++i) {
        const SizeClass& c = of(i);
        const int64_t wanted = n[static_cast<size_t>(i)];
        lacking += slabs_for(c, std::max<int64_t>(wanted - c.own(), 0));
        to_give += can_spare(c, wanted);
    }
    return lacking <= to_give;
}

bool Arena::secure(std::span<const int64_t> n) {
    give_back_unused();
    tight_ = false;
    if (!can_secure(n)) return false;
    if (plain()) return true;  // nobody else takes what is empty
    for (int32_t i = 0; i < classes(); ++i) {
        of(i).wanted = n[static_cast<size_t>(i)];
        if (of(i).wanted) of(i).asked = of(i).wanted;
    }
    for (int32_t i = 0; i < classes(); ++i)
        while (of(i).own() < of(i).wanted) {
            if (empty_ + uncreated() == 0) reclaim(cheapest_that_spares(UINT64_MAX));
            give_slab(i);
        }
    for (SizeClass& c : classes_) reverse_unused(c);
    return true;
}

// So that the slab that was given first is taken first: pages of one take then tend to lie side by side.
void Arena::reverse_unused(SizeClass& c) {
    for (int32_t s = c.partial[0]; s != kNoSlab; s = slab(s).previous) {
        std::swap(slab(s).previous, slab(s).next);
        c.partial[0] = s;
    }
}

// ---- eviction order -------------------------------------------------------------------------------------------------

// Victims before the rest, then by age. Of cached pages only; no two are equal.
uint64_t Arena::rank(const Page& page) { return uint64_t{page.list == 1 + kLru} << 48 | page.age; }

int32_t Arena::coldest(const SizeClass& c) {
    return c.lists[kVictims].first != kNoPage ? c.lists[kVictims].first : c.lists[kLru].first;
}

// The next in the class's eviction order.
int32_t Arena::after(const SizeClass& c, int32_t id) {
    const Page& page = page_in(c, id);
    return page.next == kNoPage && page.list == 1 + kVictims ? c.lists[kLru].first : page.next;
}

// Cached pages that the class counts as lost with a slab. It has a use for the free pages that its last grant took (up to
// a slab's): the next one takes as many, and they would be won back at once.
int64_t Arena::pages_to_go(const SizeClass& c) const {
    return std::clamp<int64_t>(c.k - c.free + std::min<int64_t>(c.k - 1, c.asked), 0, c.k);
}

// What a slab of the class is worth: the rank of the warmest of its coldest pages that go with one. Not of the coldest: a
// slab costs its class all of them. Walking there is O(k), so the answer holds until an eighth of a slab was evicted.
uint64_t Arena::price_of(SizeClass& c, bool fresh) {
    const int64_t pages = pages_to_go(c);
    if (pages == 0) return 0;
    if (!fresh && c.price_evictions >= 0 && pages >= c.price_pages && evictions_ - c.price_evictions < c.k / 8)
        return c.price;
    int32_t id = coldest(c);
    uint64_t found = id == kNoPage ? UINT64_MAX : 0;
    for (int64_t n = 0; n < pages && id != kNoPage; ++n, id = after(c, id)) found = rank(page_in(c, id));
    c.price = found;
    c.price_pages = pages;
    c.price_evictions = evictions_;
    return found;
}

// The class whose slab is the cheapest, and below that rank, of those that can spare one.
int32_t Arena::cheapest_that_spares(uint64_t below) {
    int32_t found = kNoClass;
    for (int32_t i = 0; i < classes(); ++i) {
        SizeClass& c = of(i);
        if (can_spare(c, c.wanted) == 0) continue;
        if (const int32_t first = coldest(c); pages_to_go(c) && first != kNoPage && rank(page_in(c, first)) >= below)
            continue;
        if (price_of(c, below == UINT64_MAX) >= below) continue;
        const uint64_t price = price_of(c, true);
        if (price >= below) continue;
        below = price;
        found = i;
    }
    return found;
}

// ---- taking ---------------------------------------------------------------------------------------------------------

// Slabs that the class leaves for classes of larger pages as long as it has a page of its own to give up. They soon want
// them back (a state at every step that starts a request), and to win one back costs up to k moves.
int64_t Arena::left_alone(const SizeClass& c) const {
    return c.k == least_per_slab_ || c.cached() == 0 ? 0 : std::min<int64_t>(kLeftAlone, most_slabs_ / 64);
}

// Brings closer what is read when the next n pages of the class are evicted.
void Arena::foresee(const SizeClass& c, int64_t n) const {
    if (c.free || empty_ + uncreated() > left_alone(c)) return;
    int32_t id = coldest(c);
    for (int64_t i = 0; i < n && id != kNoPage; ++i, id = after(c, id)) {
        const Page& page = page_in(c, id);
        const KeyIndex& index = group_of(static_cast<int32_t>(page.group)).index;
        const uint64_t hash = index.hash(page.digest, page.ns);
        index.prefetch(hash);
        ghosts_.prefetch(hash);
    }
}

// Pages that nobody had before, where slabs need no care; none where older ones are empty. Returns how many.
int64_t Arena::take_unused(int32_t group, int64_t n, int32_t* ids) {
    if (!plain() || empty_) return 0;
    n = std::min(n, uncreated());
    SizeClass& c = classes_[0];
    const auto first = static_cast<int32_t>(c.pages.size());
    Page held;
    held.refs = 1;
    c.pages.resize(c.pages.size() + static_cast<size_t>(n), held);
    c.left.resize((c.pages.size() + kRegion - 1) / kRegion);
    std::iota(ids, ids + n, first);
    c.owned += n;
    group_of(group).held += n;
    return n;
}

void Arena::take_run(int32_t group, int64_t n, bool mine, int32_t* ids) {
    const int64_t unused = take_unused(group, n, ids);
    n -= unused;
    ids += unused;
    for (int64_t i = 0; i < n; ++i) {
        constexpr int64_t ahead = kInFlight;
        if (i % ahead == 0) foresee(of(class_of(group)), std::min(n - i, ahead));
        ids[i] = mine ? take_mine(group) : take(group);
    }
}

int32_t Arena::take(int32_t group) {
    const int32_t size_class = class_of(group);
    SizeClass& c = of(size_class);
    if (c.free) return held_now(group, take_from(c, fullest(c)));
    if (empty_ + uncreated() > left_alone(c)) return held_now(group, take_new(size_class));
    const int32_t victim = coldest(c);
    const uint64_t below = victim == kNoPage ? UINT64_MAX : rank(page_in(c, victim));
    if (const int32_t other = cheapest_that_spares(below); other != kNoClass) {
        reclaim(other);
        return held_now(group, take_new(size_class));
    }
    if (victim == kNoPage) return kNoPage;
    evict(c, victim);
    return held_now(group, victim);
}

}  // namespace kvc
