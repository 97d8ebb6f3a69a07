// References, lists and the undo log of `arena.h`.
#include "arena.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace kvc {

namespace {
constexpr int64_t kPopulated = int64_t{1} << 28;  // bytes of page records that are made with the arena
}

Arena::Arena(int64_t slabs, std::vector<int32_t> pages_per_slab, std::vector<int32_t> class_of_group, bool movable,
             uint64_t seed, KeyListener* listener)
    : movable_(movable), listener_(listener) {
    for (const int32_t k : pages_per_slab) {
        most_per_slab_ = std::max(most_per_slab_, k);
        least_per_slab_ = std::min(least_per_slab_, k);
    }
    most_slabs_ = std::min<int64_t>(slabs, kMostPages / most_per_slab_);
    classes_.resize(pages_per_slab.size());
    for (size_t c = 0; c < classes_.size(); ++c) {
        classes_[c].k = pages_per_slab[c];
        classes_[c].partial.assign(static_cast<size_t>(pages_per_slab[c]), kNoSlab);
        classes_[c].nonempty.assign((static_cast<size_t>(pages_per_slab[c]) + 63) / 64, 0);
    }
    // Equal keys of two groups must not look alike in the table of evicted ones: each group has four numbers of the seed's
    // sequence to itself (HashSeed steps by the golden ratio).
    for (size_t g = 0; g < class_of_group.size(); ++g) {
        const int64_t most = most_slabs_ * pages_per_slab[static_cast<size_t>(class_of_group[g])];
        groups_.push_back({class_of_group[g], KeyIndex(seed + 4 * g * 0x9e3779b97f4a7c15ULL, most)});
    }
    leaving_.reserve(static_cast<size_t>(most_per_slab_));
    // So that a page costs nothing the first time it is used; where classes share the slabs, most are never made.
    SizeClass& first = classes_[0];
    const int64_t bytes = most_slabs_ * first.k * static_cast<int64_t>(sizeof(Page));
    if (classes_.size() > 1 || bytes > kPopulated) return;
    first.pages.reserve(static_cast<size_t>(most_slabs_ * first.k));
    populate(first.pages.data(), static_cast<size_t>(bytes));
}

bool Arena::contains(int32_t group, int64_t page) const {
    const SizeClass& c = of(class_of(group));
    if (page < 0 || page >= static_cast<int64_t>(c.pages.size())) return false;
    return owner(slab_of(c, static_cast<int32_t>(page))) == class_of(group);
}

// All that there can be, where that is not too much: it takes memory only as it is written, and never moves. Else twice as
// much as before, so that many small calls stay cheap.
template <typename T>
static void make_room(T& items, int64_t wanted, int64_t most) {
    const auto size = static_cast<size_t>(std::min(wanted, most)), all = static_cast<size_t>(most);
    if (size <= items.capacity()) return;
    constexpr size_t at_once = (size_t{1} << 30) / sizeof(typename T::value_type);
    items.reserve(all <= at_once ? all : std::min(std::max(size, 2 * items.capacity()), all));
}

void Arena::reserve(std::span<const int64_t> pages_of_class, std::span<const int64_t> keys_of_group) {
    int64_t pages = 0, slabs = 0, keys = 0;
    for (int32_t c = 0; c < classes(); ++c) {
        pages += pages_of_class[static_cast<size_t>(c)];
        slabs += slabs_for(of(c), pages_of_class[static_cast<size_t>(c)]);
    }
    const int64_t created = std::min(created_slabs() + slabs, most_slabs_);
    if (!plain()) make_room(slabs_, created, most_slabs_);
    for (int32_t c = 0; c < classes(); ++c)
        if (pages_of_class[static_cast<size_t>(c)]) {
            make_room(of(c).pages, created * of(c).k, most_slabs_ * of(c).k);
            make_room(of(c).left, created * of(c).k / kRegion + 1, most_slabs_ * of(c).k / kRegion + 1);
        }
    for (Group& group : groups_) {  // keys may come to lie on pages that are made now
        const SizeClass& c = of(group.size_class);
        group.index.reserve(c.pages.data(), std::min(created * c.k, most_slabs_ * c.k), 0);
    }
    for (int32_t g = 0; g < static_cast<int32_t>(keys_of_group.size()); ++g) {
        reserve_keys(g, keys_of_group[static_cast<size_t>(g)]);
        keys += keys_of_group[static_cast<size_t>(g)];
    }
    if (2 * created >= most_slabs_) prepare_to_evict();  // nothing is evicted before nearly all slabs are made
    const int64_t turned_out = slabs * most_per_slab_;
    if (movable_) make_room(moves_, static_cast<int64_t>(moves_.size()) + turned_out, INT64_MAX);
    if (listener_) listener_->reserve(keys, pages + turned_out);
}

void Arena::prepare_to_evict() {
    int64_t pages = 0;
    for (const SizeClass& c : classes_) pages += most_slabs_ * c.k;
    ghosts_.prepare(pages);
}

void Arena::reserve_keys(int32_t group, int64_t keys, size_t namespaces) {
    const SizeClass& c = of(class_of(group));
    group_of(group).index.reserve(c.pages.data(), std::ssize(c.pages), keys);
    namespaces_.reserve(namespaces);
}

// ---- lists ----------------------------------------------------------------------------------------------------------

void Arena::append(SizeClass& c, int32_t id, List list) {
    Head& head = c.lists[list];
    Page& page = page_in(c, id);
    page.list = 1u + list;
    page.age = ++clock_;
    page.previous = head.last;
    page.next = kNoPage;
    (head.last == kNoPage ? head.first : page_in(c, head.last).next) = id;
    head.last = id;
    ++head.count;
    if (c.k > 1) warm(c, id);
}

// Leaves the page's own links as they are: rollback() puts it back between them.
inline void Arena::unchain(SizeClass& c, Page& page) {
    Head& head = c.lists[page.list - 1];
    (page.previous == kNoPage ? head.first : page_in(c, page.previous).next) = page.next;
    (page.next == kNoPage ? head.last : page_in(c, page.next).previous) = page.previous;
    page.list = 0;
    --head.count;
}

void Arena::unlink(SizeClass& c, int32_t id) {
    if (c.k > 1) cool(c, id);
    unchain(c, page_in(c, id));
}

void Arena::warm(SizeClass& c, int32_t id) {
    const Page& page = page_in(c, id);
    if (page.list != 1 + kLru) return;
    Slab& s = slab(slab_of(c, id));
    if (movable_) {
        s.heat += page.age;
    } else if (page.age >= s.heat) {
        s.heat = page.age;
        s.stale = false;
    }
}

void Arena::cool(SizeClass& c, int32_t id) {
    const Page& page = page_in(c, id);
    if (page.list != 1 + kLru) return;
    Slab& s = slab(slab_of(c, id));
    if (movable_) s.heat -= page.age;
    else if (page.age == s.heat) s.stale = true;
}

void Arena::hold_in_slab(SizeClass& c, int32_t id) {
    if (slab(slab_of(c, id)).held++ == 0) --c.idle_many;
}

void Arena::unhold_in_slab(SizeClass& c, int32_t id) {
    if (--slab(slab_of(c, id)).held == 0) ++c.idle_many;
}

// ---- references -----------------------------------------------------------------------------------------------------

// With few stores: a page and its two neighbours are three cache misses, and what is stored after them waits for them.
inline void Arena::acquire_now(int32_t group, int32_t id) {
    SizeClass& c = of(class_of(group));
    Page& page = page_in(c, id);
    assert(page.refs > 0 || page.list);
    ++page.refs;
    page.rest = 0;
    if (!page.list) return;
    ++group_of(group).held;
    if (c.k == 1) return unchain(c, page);
    unlink(c, id);
    hold_in_slab(c, id);
}

void Arena::log_acquire(int32_t group, int32_t id, bool hit) {
    const Page& page = page_of(group, id);
    log_.push_back(
        {group, id, static_cast<uint8_t>(page.list), static_cast<uint8_t>(page.rest), hit && page.hits < kMostHits});
    acquire_now(group, id);
}

void Arena::acquire(int32_t group, int32_t id) {
    if (marked_) return log_acquire(group, id, false);
    acquire_now(group, id);
}

void Arena::adopt(int32_t group, int32_t id) {
    if (marked_) log_acquire(group, id, true);
    else acquire_now(group, id);
    Page& page = page_of(group, id);
    if (page.hits < kMostHits) page.hits = page.hits + 1u;
}

bool Arena::pin(int32_t group, int32_t id) {
    Page& page = page_of(group, id);
    if (page.pins == kMostPins) return false;
    const uint32_t place = page.list ? page.list : page.rest;
    acquire(group, id);
    page.pins = page.pins + 1u;
    if (page.refs == static_cast<int32_t>(page.pins)) page.rest = place & 3u;
    return true;
}

void Arena::unpin(int32_t group, int32_t id) {
    SizeClass& c = of(class_of(group));
    Page& page = page_in(c, id);
    assert(page.pins > 0);
    page.pins = page.pins - 1u;
    if (page.key != Page::kVisible || !page.rest || page.refs > 1) return release(group, id);
    page.refs = 0;
    --group_of(group).held;
    if (c.k > 1) unhold_in_slab(c, id);
    put_back(c, id, static_cast<List>(page.rest - 1));
    page.rest = 0;
}

// The last page of the list that is older than this one, which has its place there. It is beside the page that came back last,
// or at an end, or where its own neighbours are (those that are pinned too lead on to theirs); else it is looked for from both
// sides, from what lies nearest of these.
int32_t Arena::last_older(const SizeClass& c, List list, const Page& page) const {
    int32_t low = kNoPage, high = kNoPage;  // in the list; older, and not
    auto age = [&](int32_t id) { return page_in(c, id).age; };
    auto older = [&](int32_t id) { return id != kNoPage && age(id) < page.age; };
    auto newer = [&](int32_t id) { return id != kNoPage && age(id) > page.age; };
    auto in_list = [&](int32_t id) { return page_in(c, id).list == 1u + list; };
    auto consider = [&](int32_t id) {  // whether the place is beside it: then `low` is what is looked for
        int32_t& side = older(id) ? low : high;
        const bool nearer = side == kNoPage || (age(id) > age(side)) == (&side == &low);
        if (nearer) side = id;
        if (&side == &low) return !older(page_in(c, id).next);
        const int32_t before = page_in(c, id).previous;
        if (before != kNoPage && !older(before)) return false;
        low = before;
        return true;
    };
    for (const int32_t id : {c.put_back, c.lists[list].last, c.lists[list].first})
        if (id != kNoPage && in_list(id) && consider(id)) return low;
    auto step = [&](int32_t& id, int32_t next) {  // along those that are pinned; whether the place is found
        if (in_list(id)) {
            const bool found = consider(id);
            id = kNoPage;
            return found;
        }
        id = page_in(c, id).rest == 1u + list ? next : kNoPage;
        return false;
    };
    int32_t back = page.previous, on = page.next;
    while (older(back) || newer(on)) {
        if (older(back) && step(back, page_in(c, back).previous)) return low;
        if (newer(on) && step(on, page_in(c, on).next)) return low;
    }
    if (low == kNoPage) return kNoPage;
    for (; high != kNoPage; high = page_in(c, high).previous) {
        if (older(high)) return high;
        const int32_t next = page_in(c, low).next;
        if (!older(next)) return low;
        low = next;
    }
    return low;
}

void Arena::put_back(SizeClass& c, int32_t id, List list) {
    Head& head = c.lists[list];
    Page& page = page_in(c, id);
    const int32_t before = last_older(c, list, page);
    page.list = (1u + list) & 3u;
    page.previous = before;
    page.next = before == kNoPage ? head.first : page_in(c, before).next;
    (before == kNoPage ? head.first : page_in(c, before).next) = id;
    (page.next == kNoPage ? head.last : page_in(c, page.next).previous) = id;
    ++head.count;
    if (c.k > 1) warm(c, id);
    c.put_back = id;
}

void Arena::adopt_run(int32_t group, std::span<const int32_t> ids) {
    const Page* pages = of(class_of(group)).pages.data();
    for (size_t i = 0; i < ids.size(); ++i) {
        if (i + kInFlight < ids.size() && ids[i + kInFlight] >= 0) __builtin_prefetch(pages + ids[i + kInFlight], 1);
        if (ids[i] >= 0) adopt(group, ids[i]);
    }
}

void Arena::release_run(int32_t group, std::span<const int32_t> ids, List list) {
    while (!ids.empty()) {
        if (of(class_of(group)).k == 1) ids = ids.first(ids.size() - append_last(group, ids, list));
        if (ids.empty()) return;
        if (ids.size() > kInFlight) prefetch(group, ids[ids.size() - 1 - kInFlight]);
        release_now(group, ids.back(), list);
        ids = ids.first(ids.size() - 1);
    }
}

// The last of the run, the very last first, as long as nobody else holds them and their keys are visible: release_now() of
// each, with the counts that all share kept out of memory, and one store for the marks of a page. Returns how many.
size_t Arena::append_last(int32_t group, std::span<const int32_t> ids, List list) {
    SizeClass& c = of(class_of(group));
    Page* pages = c.pages.data();
    Head& head = c.lists[list];
    int32_t last = head.last;
    uint64_t clock = clock_;
    size_t i = ids.size();
    for (; i > 0; --i) {
        if (i > kInFlight) __builtin_prefetch(pages + ids[i - 1 - kInFlight], 1);
        const int32_t id = ids[i - 1];
        Page& page = pages[id];
        if (page.refs != 1 || page.key != Page::kVisible) break;
        PageMarks marks = page;
        marks.rest = 0;
        marks.list = 1u + list;
        static_cast<PageMarks&>(page) = marks;
        page.age = ++clock;
        page.refs = 0;
        page.previous = last;
        page.next = kNoPage;
        (last == kNoPage ? head.first : pages[last].next) = id;
        last = id;
    }
    const auto appended = static_cast<int64_t>(ids.size() - i);
    head.last = last;
    head.count += appended;
    group_of(group).held -= appended;
    clock_ = clock;
    return ids.size() - i;
}

void Arena::release(int32_t group, int32_t id, List list) { release_now(group, id, list); }

inline void Arena::release_now(int32_t group, int32_t id, List list) {
    SizeClass& c = of(class_of(group));
    Page& page = page_in(c, id);
    assert(page.refs > 0);
    if (--page.refs) {  // readers outside do not change its place
        if (page.refs != static_cast<int32_t>(page.pins) || page.key != Page::kVisible || page.rest) return;
        page.rest = (1u + list) & 3u;
        page.age = ++clock_;
        page.previous = c.lists[list].last;
        page.next = kNoPage;
        return;
    }
    page.rest = 0;
    --group_of(group).held;
    if (c.k > 1) unhold_in_slab(c, id);
    if (page.key == Page::kVisible) {
        append(c, id, list);
        return;
    }
    if (page.key == Page::kPending) drop_key(c, id);
    free_page(c, id);
}

// ---- undo log -------------------------------------------------------------------------------------------------------

void Arena::mark(int64_t acquires) {
    log_.clear();
    log_.reserve(static_cast<size_t>(acquires));
    marked_ = true;
}

void Arena::commit_mark() {
    log_.clear();
    marked_ = false;
}

// Backwards, so that each page finds the neighbours that it left.
void Arena::rollback() {
    marked_ = false;
    for (; !log_.empty(); log_.pop_back()) {
        const Undo& undo = log_.back();
        SizeClass& c = of(class_of(undo.group));
        Page& page = page_in(c, undo.id);
        --page.refs;
        page.rest = undo.rest & 3u;
        if (undo.hit) page.hits = page.hits - 1u;
        if (!undo.list) continue;
        --group_of(undo.group).held;
        Head& head = c.lists[undo.list - 1];
        (page.previous == kNoPage ? head.first : page_in(c, page.previous).next) = undo.id;
        (page.next == kNoPage ? head.last : page_in(c, page.next).previous) = undo.id;
        page.list = undo.list;
        ++head.count;
        if (c.k == 1) continue;
        warm(c, undo.id);
        unhold_in_slab(c, undo.id);
    }
}

}  // namespace kvc
