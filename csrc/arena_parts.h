// What `arena.h` is made of: size classes with their pages, slabs, groups with their keys, steps to undo.
#pragma once

#include <cstdint>
#include <vector>

#include "key_index.h"
#include "page.h"

namespace kvc::arena_parts {

inline constexpr int16_t kNoClass = -1;
inline constexpr int32_t kNoSlab = -1;

struct Head {
    int32_t first = kNoPage;
    int32_t last = kNoPage;
    int64_t count = 0;
};

struct SizeClass {
    int32_t k = 1;
    LargeVector<Page> pages;     // by number; reaches to the last slab that the class owned
    LargeVector<uint64_t> left;  // for every kRegion pages: version at which a visible key last left one of them
    Head lists[2];
    int64_t free = 0;
    int64_t owned = 0;      // slabs
    int64_t idle_many = 0;  // k > 1: slabs with cached pages and none held, see idle()
    int64_t wanted = 0;     // pages still to be taken since secure()
    int64_t asked = 0;      // pages of the last secure() that wanted some
    uint64_t price = 0;     // see price_of(), when so many pages were to go
    int64_t price_pages = 0;
    int64_t price_evictions = -1;    // ... and so many of all had gone
    int64_t needed = 0;              // N, slabs
    int64_t pinned = 0;              // P, slabs
    std::vector<int32_t> partial;    // [used pages] -> first slab with so many, and a free page
    std::vector<uint64_t> nonempty;  // a bit for each of these lists
    int32_t mine_slab = 0;           // take_mine: no slab of its before this one has a free page
    int32_t mine_page = kNoPage;     // take_mine: no page before this one in eviction order lies in a slab of its
    int32_t put_back = kNoPage;      // the last page that came back to its place in a list

    int64_t cached() const { return lists[0].count + lists[1].count; }
    int64_t own() const { return free + cached(); }
    int64_t held() const { return owned * k - own(); }
    // Slabs that can be reclaimed.
    int64_t idle() const { return k == 1 ? cached() : idle_many; }
};

// An arena of single pages of one class has none: pages take no memory from each other, so there is nothing to know. A
// class with k = 1 has no use for held, heat and stale: its pages tell all, and are one cache line each.
struct Slab {
    uint64_t heat = 0;  // movable: sum of the ages of its LRU-list pages; else the highest of them
    int32_t used = 0;   // held and cached pages
    int32_t held = 0;
    int32_t fresh = 0;           // slots from this one on were not given out since the class got the slab
    int32_t freed = kNoPage;     // the free ones before it: a stack through Page::next
    int32_t previous = kNoSlab;  // slabs, in the list of equally full ones
    int32_t next = kNoSlab;      // or in the stack of empty ones
    int32_t mine = 0;            // pages of the guaranteed request, if the epoch is its
    uint32_t epoch = 0;
    int16_t owner = kNoClass;  // class
    bool stale = false;        // not movable: the page that made the heat has gone
};
static_assert(sizeof(Slab) == 48);

struct Group {
    int32_t size_class;
    KeyIndex index;
    bool watched = false;
    int64_t held = 0;
    int64_t evictions = 0;
};

struct Undo {
    int32_t group;
    int32_t id;
    uint8_t list;
    uint8_t rest;
    bool hit;
};

}  // namespace kvc::arena_parts
