// A naive arena: every used page in a map, everything else recomputed from it. Where the arena may choose (which of
// equally full slabs, which empty one) the model looks at the choice, checks that it was allowed, and follows.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <vector>

#include "arena.h"

namespace model {

[[noreturn, gnu::format(printf, 1, 2)]] inline void fail(const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::vfprintf(stderr, format, args);
    va_end(args);
    std::fputc('\n', stderr);
    std::exit(1);
}

struct Cell {
    int refs = 0, pins = 0, group = 0, key = 0, number = 0, hits = 0, list = 0, rest = 0;
    uint32_t ns = 0;
    int64_t end = 0;
    uint64_t age = 0;
    bool kept = false;

    std::pair<int, uint64_t> rank() const { return {list, age}; }
};

struct Event {
    bool stored;
    int group, page_or_number;
    uint32_t ns;
    bool operator==(const Event&) const = default;
};

using Counts = std::vector<int64_t>;
using Moves = std::vector<kvc::Move>;
constexpr int kNone = -1;

class Model {
  public:
    Model(int slabs, std::vector<int> pages_per_slab, std::vector<int> class_of_group, bool movable)
        : T(slabs),
          k(pages_per_slab),
          class_of(class_of_group),
          movable(movable),
          pages(k.size()),
          needed(k.size()),
          asked(k.size()),
          prices(k.size()),
          evicted_of(class_of.size()) {}

    int T;
    std::vector<int> k, class_of;
    bool movable;
    std::vector<int> owner;                   // of each created slab
    std::vector<std::map<int, Cell>> pages;   // of each class: the held and cached ones
    std::map<std::pair<int, int>, int> mine;  // (class, page) -> marks
    Counts needed;                            // slabs
    Counts asked;                             // pages of the last secure() that wanted some
    struct Price {
        std::pair<int, uint64_t> rank;
        int64_t pages = 0, evictions = -1;
    };
    std::vector<Price> prices;  // what a slab was worth, and when
    Counts evicted_of;
    std::set<std::tuple<int, uint32_t, int>> ghosts;
    std::vector<Event> events;
    uint64_t clock = 0;
    int64_t moved = 0, reclaimed = 0, taken_over = 0;

    int classes() const { return static_cast<int>(k.size()); }
    Cell& cell(int group, int id) { return pages[class_of[group]].at(id); }
    int used(int c, int s) const {
        return static_cast<int>(std::distance(pages[c].lower_bound(s * k[c]), pages[c].lower_bound((s + 1) * k[c])));
    }
    int held(int c, int s) const {
        return count(c, s, [](const Cell& x) { return x.refs > 0; });
    }
    bool own_slab(int c, int s) const {
        const auto first = mine.lower_bound({c, s * k[c]});
        return first != mine.end() && first->first < std::pair{c, (s + 1) * k[c]};
    }
    int64_t owned(int c) const { return std::count(owner.begin(), owner.end(), c); }
    bool plain() const { return classes() == 1 && k[0] == 1; }
    int64_t pinned(int c) const {
        if (plain()) return 0;  // not counted where nothing depends on it
        return slabs_where(c, [&](int s) { return own_slab(c, s); });
    }
    int64_t idle(int c) const {
        return slabs_where(c, [&](int s) { return used(c, s) && !held(c, s); });
    }
    int64_t cached(int c) const {
        return std::count_if(pages[c].begin(), pages[c].end(), [](const auto& p) { return p.second.list > 0; });
    }
    int64_t available(int c) const { return owned(c) * k[c] - static_cast<int64_t>(pages[c].size()) + cached(c); }
    int64_t empty() const { return std::count(owner.begin(), owner.end(), kNone) + T - std::ssize(owner); }
    int64_t quota() const {
        int64_t sum = 0;
        for (int c = 0; c < classes(); ++c) sum += std::max(pinned(c), needed[c]);
        return sum;
    }
    int coldest(int c) const {
        int found = kNone;
        for (const auto& [id, x] : pages[c])
            if (x.list && (found == kNone || x.rank() < pages[c].at(found).rank())) found = id;
        return found;
    }
    int find(int group, int number, uint32_t ns) const {
        for (const auto& [id, x] : pages[class_of[group]])
            if (x.key && x.group == group && x.number == number && x.ns == ns) return id;
        return kNone;
    }

    // ---- what calls do
    void cache(int group, int id, int list) {
        Cell& x = cell(group, id);
        x.list = list;
        x.age = ++clock;
    }
    void acquire(int group, int id, bool pin) {
        Cell& x = cell(group, id);
        const int place = x.list ? x.list : x.rest;
        x.list = 0;
        ++x.refs;
        x.pins += pin;
        x.rest = pin && x.refs == x.pins ? place : 0;
    }
    void unpin(int group, int id) {
        Cell& x = cell(group, id);
        --x.pins;
        if (x.refs > 1 || !x.rest || x.key != kvc::Page::kVisible) return release(group, id, 1 + kvc::Arena::kLru);
        x.refs = 0;
        x.list = x.rest;  // its age is what it was
        x.rest = 0;
    }
    void release(int group, int id, int list) {
        Cell& x = cell(group, id);
        if (--x.refs) {
            if (x.refs == x.pins && x.key == kvc::Page::kVisible && !x.rest) x.rest = list, x.age = ++clock;
            return;
        }
        x.rest = 0;
        if (x.key == kvc::Page::kVisible) cache(group, id, list);
        else remove(class_of[group], id);
    }
    void unpublish(int group, int id) {
        Cell& x = cell(group, id);
        lose_key(x);
        if (!x.refs) remove(class_of[group], id);
    }
    // A key stays where it is, but with a pending page, or with one that only readers hold if it is visible on both.
    bool publish(int group, int id, int number, uint32_t ns, int key) {
        Cell& x = cell(group, id);
        const int other = find(group, number, ns);
        if (other != kNone) {
            const Cell old = cell(group, other);
            if (key == kvc::Page::kPending || (old.key == kvc::Page::kVisible && old.refs != old.pins)) return false;
            if (old.key == kvc::Page::kVisible) {
                x.key = old.key, x.number = number, x.ns = ns, x.end = old.end, x.kept = old.kept, x.hits = old.hits;
                x.rest = 0;
                if (old.refs) cell(group, other).key = 0, cell(group, other).rest = 0;
                else remove(class_of[group], other);
                ++taken_over;
                return true;
            }
            unpublish(group, other);
        }
        x.key = key, x.number = number, x.ns = ns, x.end = number, x.kept = false, x.hits = 0;
        if (key == kvc::Page::kVisible) events.push_back({true, group, id, 0});
        return true;
    }
    void lose_key(Cell& x) {
        if (x.key == kvc::Page::kVisible) events.push_back({false, x.group, x.number, x.ns});
        x.key = 0;
    }
    void evict(int c, int id) {
        Cell& x = pages[c].at(id);
        ++evicted_of[x.group];
        ghosts.insert({x.group, x.ns, x.number});
        lose_key(x);
        pages[c].erase(id);
    }
    // Slabs that lost their last page go back.
    void remove(int c, int id) {
        pages[c].erase(id);
        if (!used(c, id / k[c])) owner[id / k[c]] = kNone;
    }

    // ---- taking
    int64_t spare(int c, int64_t n) const {
        int64_t give = 0;
        while (give < idle(c) && available(c) - (give + 1) * k[c] >= n) ++give;
        return give;
    }
    bool can_secure(const Counts& n) const {
        int64_t lacking = 0, give = empty();
        for (int c = 0; c < classes(); ++c) {
            for (int64_t own = available(c); own < n[c]; own += k[c]) ++lacking;
            give += spare(c, n[c]);
        }
        return lacking <= give;
    }
    // The class to take a slab from: the one with the coldest page of those that `may`.
    template <typename May>
    int coldest_class(May&& may) const {
        int found = kNone;
        for (int c = 0; c < classes(); ++c)
            if (may(c) && (found == kNone || rank_of(c) < rank_of(found))) found = c;
        return found;
    }
    std::pair<int, uint64_t> rank_of(int c) const { return pages[c].at(coldest(c)).rank(); }

    // What a slab of the class is worth: the rank of the last of its coldest pages that are lost with one.
    int64_t pages_lost(int c) const {
        const int64_t free = owned(c) * k[c] - std::ssize(pages[c]);
        return std::clamp<int64_t>(k[c] - free + std::min<int64_t>(k[c] - 1, asked[c]), 0, k[c]);
    }
    std::pair<int, uint64_t> price_of(int c, bool fresh) {
        const int64_t lost = pages_lost(c);
        if (!lost) return {0, 0};
        Price& price = prices[c];
        const int64_t evictions = std::accumulate(evicted_of.begin(), evicted_of.end(), int64_t{0});
        if (!fresh && price.evictions >= 0 && lost >= price.pages && evictions - price.evictions < k[c] / 8)
            return price.rank;
        std::vector<std::pair<int, uint64_t>> ranks;
        for (const auto& [id, x] : pages[c])
            if (x.list) ranks.push_back(x.rank());
        std::sort(ranks.begin(), ranks.end());
        price = {ranks[std::min<size_t>(ranks.size(), static_cast<size_t>(lost)) - 1], lost, evictions};
        return price.rank;
    }
    // The class to take a slab from: the cheapest below that rank of those that can spare one.
    int cheapest(std::pair<int, uint64_t> below, const Counts& n) {
        int found = kNone;
        for (int c = 0; c < classes(); ++c) {
            if (!spare(c, n[c])) continue;
            const bool any = below == kNoRank;
            if (pages_lost(c) && rank_of(c) >= below) continue;
            if (price_of(c, any) >= below) continue;
            const auto price = price_of(c, true);
            if (price >= below) continue;
            below = price;
            found = c;
        }
        return found;
    }
    static constexpr std::pair<int, uint64_t> kNoRank{INT_MAX, 0};

    int64_t left_alone(int c) const {
        const bool others_are_larger = k[c] > *std::min_element(k.begin(), k.end());
        return others_are_larger && cached(c) ? std::min(2, T / 64) : 0;
    }
    // Follows a reclaim by its moves, of which it takes its own off the front. The slab is empty afterwards.
    int reclaim(int c, Moves& moves) {
        const int s = slab_to_reclaim(c);
        std::vector<int> leaving;
        for (const auto& [id, x] : pages[c])
            if (id / k[c] == s) leaving.push_back(id);
        const auto rank = [&](int id) { return pages[c].at(id).rank(); };
        std::sort(leaving.begin(), leaving.end(), [&](int a, int b) { return rank(a) > rank(b); });
        for (const int id : leaving) {
            if (!movable) {
                evict(c, id);
                continue;
            }
            const int full = fullest(c, s);
            int colder = kNone;
            for (const auto& [other, x] : pages[c])
                if (x.list && other / k[c] != s && (colder == kNone || x.rank() < rank(colder))) colder = other;
            const bool replace = full < 0 && colder != kNone && rank(colder) < rank(id);
            if (full < 0 && !replace) {
                evict(c, id);
                continue;
            }
            if (moves.empty()) fail("page %d of class %d should have moved", id, c);
            const kvc::Move move = moves.front();
            moves.erase(moves.begin());
            if (move.size_class != c || move.from != id)
                fail("moved %d of class %d, not %d of %d", move.from, move.size_class, id, c);
            if (replace && move.to != colder)
                fail("page %d moved onto %d, not onto the colder %d", id, move.to, colder);
            if (replace) evict(c, colder);
            else if (!is_free(c, move.to) || move.to / k[c] == s || used(c, move.to / k[c]) != full)
                fail("page %d moved to %d, which is no hole of a fullest slab", id, move.to);
            pages[c][move.to] = pages[c].at(id);
            pages[c].erase(id);
            ++moved;
        }
        owner[s] = kNone;
        ++reclaimed;
        return s;
    }
    bool is_free(int c, int id) const {
        return id >= 0 && id / k[c] < std::ssize(owner) && owner[id / k[c]] == c && !pages[c].contains(id);
    }
    // Most pages in use of a slab of the class with a free one; -1 without any.
    int fullest(int c, int but_not) const {
        int most = -1;
        for (int s = 0; s < std::ssize(owner); ++s)
            if (owner[s] == c && s != but_not && used(c, s) < k[c]) most = std::max(most, used(c, s));
        return most;
    }
    // The arena chose slab s, empty or not yet made.
    void own_new(int c, int s) {
        if (s == std::ssize(owner) && s < T) owner.push_back(kNone);
        if (s < 0 || s >= std::ssize(owner) || owner[s] != kNone) fail("slab %d given to class %d is not empty", s, c);
        owner[s] = c;
    }
    void hold(int group, int id) {
        const int c = class_of[group];
        if (!is_free(c, id)) fail("page %d of class %d was taken but is not free", id, c);
        pages[c][id] = Cell{.refs = 1, .group = group};
    }

  private:
    template <typename Of>
    int count(int c, int s, Of&& of) const {
        int n = 0;
        for (auto p = pages[c].lower_bound(s * k[c]); p != pages[c].end() && p->first / k[c] == s; ++p)
            n += of(p->second);
        return n;
    }
    template <typename Of>
    int64_t slabs_where(int c, Of&& of) const {
        int64_t n = 0;
        for (int s = 0; s < std::ssize(owner); ++s) n += owner[s] == c && of(s);
        return n;
    }
    int slab_to_reclaim(int c) const {
        if (k[c] == 1) return coldest(c);
        std::tuple<uint64_t, int, int> best{UINT64_MAX, 0, kNone};
        for (int s = 0; s < std::ssize(owner); ++s) {
            if (owner[s] != c || !used(c, s) || held(c, s)) continue;
            uint64_t sum = 0, newest = 0;
            for (const auto& [id, x] : pages[c])
                if (id / k[c] == s && x.list == 1 + kvc::Arena::kLru) sum += x.age, newest = std::max(newest, x.age);
            best = std::min(best, {movable ? sum : newest, used(c, s), s});
        }
        return std::get<2>(best);
    }
};

}  // namespace model
