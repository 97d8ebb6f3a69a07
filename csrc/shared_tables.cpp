// Implementation of `shared_pool.h`: index, lists and slots of a group, made anew after a death, and checked.
#include <algorithm>
#include <cstring>
#include <new>

#include "shared_pool.h"

namespace kvc {

// ---- the index ------------------------------------------------------------------------------------------------------

uint64_t SharedPool::hash(const SharedName& name) const {
    return table_hash(name.digest, static_cast<uint32_t>(table_hash(name.space, 0, seed_)), seed_);
}

static uint64_t after(const SharedGroup& g, uint64_t place) {
    return place + 1 == static_cast<uint64_t>(g.places) ? 0 : place + 1;
}

int32_t SharedPool::find(SharedGroup& g, const SharedName& name, uint64_t hash) {
    const Place* all = places(g);
    for (uint64_t p = home(g, hash); all[p].slot; p = after(g, p))
        if (all[p].tag == static_cast<uint32_t>(hash) && slots(g)[all[p].slot - 1].name == name)
            return static_cast<int32_t>(all[p].slot - 1);
    return kNone;
}

void SharedPool::insert(SharedGroup& g, int32_t slot, uint64_t hash) {
    Place* all = places(g);
    uint64_t p = home(g, hash);
    while (all[p].slot) p = after(g, p);
    all[p] = {static_cast<uint32_t>(slot) + 1, static_cast<uint32_t>(hash)};
}

void SharedPool::erase(SharedGroup& g, int32_t slot) {
    Place* all = places(g);
    const auto size = static_cast<uint64_t>(g.places);
    uint64_t hole = home(g, hash(slots(g)[slot].name));
    while (all[hole].slot != static_cast<uint32_t>(slot) + 1) hole = after(g, hole);
    for (uint64_t p = after(g, hole); all[p].slot; p = after(g, p)) {
        const uint64_t from = home(g, hash(slots(g)[all[p].slot - 1].name));
        if ((p + size - from) % size < (p + size - hole) % size) continue;  // its home lies behind the hole
        all[hole] = all[p];
        hole = p;
    }
    all[hole] = {};
}

// ---- slots ----------------------------------------------------------------------------------------------------------

void SharedPool::append(SharedGroup& g, int32_t slot) {
    Slot& s = slots(g)[slot];
    s.previous = g.last;
    s.next = kNone;
    (g.last == kNone ? g.first : slots(g)[g.last].next) = slot;
    g.last = slot;
    ++g.cached;
}

void SharedPool::unlink(SharedGroup& g, int32_t slot) {
    const Slot& s = slots(g)[slot];
    (s.previous == kNone ? g.first : slots(g)[s.previous].next) = s.next;
    (s.next == kNone ? g.last : slots(g)[s.next].previous) = s.previous;
    --g.cached;
}

// False: it has one, or another slot has this one.
bool SharedPool::give_key(SharedGroup& g, int32_t slot, const SharedName& name) {
    Slot& s = slots(g)[slot];
    const uint64_t h = hash(name);
    if (s.keyed || find(g, name, h) != kNone) return false;
    s.name = name;
    std::atomic_ref(s.keyed).store(1, std::memory_order_release);
    insert(g, slot, h);
    ++g.keyed;
    std::atomic_ref(g.version).fetch_add(1, std::memory_order_relaxed);
    return true;
}

void SharedPool::drop_key(SharedGroup& g, int32_t slot) {
    erase(g, slot);
    std::atomic_ref(slots(g)[slot].keyed).store(0, std::memory_order_relaxed);
    --g.keyed;
    std::atomic_ref(g.version).fetch_add(1, std::memory_order_relaxed);
}

// One more reference of this user.
void SharedPool::hold(SharedGroup& g, int64_t group, int32_t slot) {
    Slot& s = slots(g)[slot];
    if (!s.holders) {
        if (s.keyed) unlink(g, slot);
        ++g.held;
    }
    s.holders |= bit_;
    uint16_t& count = counts_[static_cast<size_t>(group)][static_cast<size_t>(slot)];
    if (!count++) ++mine_[static_cast<size_t>(group)];
}

// Users that hold the slot no more.
void SharedPool::let_go(SharedGroup& g, int32_t slot, uint64_t bits) {
    Slot& s = slots(g)[slot];
    if (!(s.holders & bits)) return;
    s.age = ++head().clock;
    s.holders &= ~bits;
    if (s.holders) return;
    --g.held;
    if (s.keyed) {
        append(g, slot);
    } else {
        s.next = g.first_free;
        g.first_free = slot;
    }
}

// ---- after a death --------------------------------------------------------------------------------------------------

void SharedPool::rebuild() {
    for (int64_t g = 0; g < head().groups; ++g) rebuild(group_of(g));
}

void SharedPool::rebuild(SharedGroup& g) {
    std::memset(static_cast<void*>(places(g)), 0, static_cast<size_t>(g.places) * sizeof(Place));
    g.cached = g.held = g.keyed = 0;
    g.first_free = g.first = g.last = kNone;
    std::atomic_ref(g.version).fetch_add(1, std::memory_order_relaxed);
    std::vector<int32_t> cached;
    bool room = true;
    try {
        cached.reserve(static_cast<size_t>(g.created));
    } catch (const std::bad_alloc&) {
        room = false;  // they keep their keys in another order of age
    }
    for (int32_t i = 0; i < g.created; ++i) {
        Slot& s = slots(g)[i];
        if (s.keyed) {
            insert(g, i, hash(s.name));
            ++g.keyed;
        }
        if (s.holders) {
            ++g.held;
        } else if (!s.keyed) {
            s.next = g.first_free;
            g.first_free = i;
        } else if (room) {
            cached.push_back(i);
        } else {
            append(g, i);
        }
    }
    std::ranges::sort(cached, {}, [&](int32_t i) { return slots(g)[i].age; });
    for (const int32_t i : cached) append(g, i);
}

// ---- invariants ----------------------------------------------------------------------------------------------------

const char* SharedPool::fault(SharedGroup& g, int64_t group) {
    int64_t held = 0, keyed = 0, cached = 0, free = 0, mine = 0, found = 0;
    const auto& counts = counts_[static_cast<size_t>(group)];
    for (int32_t i = 0; i < g.created; ++i) {
        const Slot& s = slots(g)[i];
        held += s.holders != 0;
        keyed += s.keyed;
        mine += (s.holders & bit_) != 0;
        if (((s.holders & bit_) != 0) != (counts[static_cast<size_t>(i)] > 0))
            return "a slot's holder does not count it";
        if (s.keyed && find(g, s.name, hash(s.name)) != i) return "a key is not found on its slot";
    }
    int32_t before = kNone;
    for (int32_t i = g.first; i != kNone; before = i, i = slots(g)[i].next) {
        const Slot& s = slots(g)[i];
        if (s.previous != before || s.holders || !s.keyed) return "the LRU list is broken";
        if (before != kNone && slots(g)[before].age > s.age) return "the LRU list is not in order of age";
        if (++cached > g.created) return "the LRU list has a circle";
    }
    for (int32_t i = g.first_free; i != kNone; i = slots(g)[i].next) {
        if (slots(g)[i].holders || slots(g)[i].keyed) return "a free slot is in use";
        if (++free > g.created) return "the free list has a circle";
    }
    for (int64_t p = 0; p < g.places; ++p) found += places(g)[p].slot != 0;
    if (before != g.last || cached != g.cached) return "the LRU list has lost its end";
    if (held != g.held || keyed != g.keyed || found != keyed) return "counts disagree";
    if (mine != mine_[static_cast<size_t>(group)]) return "what this user holds was miscounted";
    if (held + cached + free != g.created) return "a slot is lost";
    return nullptr;
}

}  // namespace kvc
