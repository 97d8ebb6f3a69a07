// Pages of several sizes in one arena, with reference counts, an index from key to page, and one LRU order over all.
//
//   arena = T slabs of equal bytes; a slab belongs to one size class at a time and holds k of its pages:
//
//     slab 0 (class 0, k = 4)   slab 1 (class 1, k = 1)   slab 2 (empty)   slab 3 (class 0)
//     [ p0 | p1 | p2 | p3 ]     [        p1         ]     [           ]    [ p12 | p13 | p14 | p15 ]
//
//   page number within a class = slab * k + slot, so page -> byte offset is page * stride of the class.
//   Groups of one page size share a class; each group has its own index.
//
//   a page of an owned slab:  free      no key, no reference
//                             held      references (a pin is one): never moves, never evicted
//                             cached    visible key, no reference: evictable
//
// Eviction order: the pages of the victims lists before those of the LRU lists, older before younger, over all classes.
// Space goes from one class to another by whole slabs, from the class whose slab is worth least: all the pages that it would
// lose with one are colder than the coldest page of the class that wants space. Cached pages of the slab that is given up
// move to holes, or into the place of colder pages of their class, if the caller can copy (`movable`); else they are
// evicted. Held pages never move.
//
// The guaranteed request (docs/memory.md): its pages are marked `mine`, and quotas keep sum over classes of
// max(slabs with a page of its, slabs it needs) within T.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "arena_parts.h"
#include "evicted_keys.h"
#include "namespace_counts.h"
#include "page.h"

namespace kvc {

inline constexpr int32_t kMostGroups = 64;
inline constexpr int32_t kMostPages = INT32_MAX - 1;  // of a class: slabs * pages_per_slab stays below
inline constexpr uint32_t kMostPins = UINT16_MAX;

// Told of every key that becomes visible or goes, in order. Must not call back into the arena.
class KeyListener {
  public:
    virtual ~KeyListener() = default;
    virtual void stored(int32_t group, int32_t page) = 0;                        // has become visible
    virtual void removed(int32_t group, const Digest& digest, uint32_t ns) = 0;  // was visible
    // At most so many calls of each before the next reserve(): make room, as neither may throw.
    virtual void reserve(int64_t /*stored*/, int64_t /*removed*/) {}
};

// Copies that must be done, in this order, before anything that was given pages since is written or read.
struct Move {
    int32_t size_class;
    int32_t from;
    int32_t to;
};

class Arena {
  public:
    enum List { kVictims = 0, kLru = 1 };
    static constexpr size_t kInFlight = 16;  // pages of a run whose lines are on their way: hides DRAM behind 15 others

    // slabs: kMostPages for no bound: made as needed. More than kMostPages / largest k are cut to that.
    Arena(int64_t slabs, std::vector<int32_t> pages_per_slab, std::vector<int32_t> class_of_group, bool movable,
          uint64_t seed, KeyListener* listener = nullptr);

    // ---- counts
    int64_t slabs() const { return most_slabs_; }  // bound T
    int64_t created_slabs() const { return std::ssize(slabs_) + (plain() ? std::ssize(classes_[0].pages) : 0); }
    int64_t empty_slabs() const { return empty_; }  // created, owned by no class
    int64_t owned_slabs(int32_t size_class) const { return of(size_class).owned; }
    int64_t free_pages(int32_t size_class) const { return of(size_class).free; }        // in owned slabs
    int64_t cached_pages(int32_t size_class) const { return of(size_class).cached(); }  // evictable
    int64_t held_pages(int32_t size_class) const { return of(size_class).held(); }
    int64_t keyed(int32_t group) const { return group_of(group).index.count(); }  // pending ones too
    int64_t pending() const { return pending_; }                                  // pending keys of all groups
    int64_t evictions(int32_t group) const { return group_of(group).evictions; }
    int64_t evictions() const { return evictions_; }
    int64_t moved_pages() const { return moved_; }
    int64_t reclaimed_slabs() const { return reclaimed_; }
    int64_t held_of(int32_t group) const { return group_of(group).held; }  // held pages that the group took or adopted
    uint64_t version() const { return version_; }  // changes when a key becomes visible, goes, or changes its page
    int32_t class_of(int32_t group) const { return group_of(group).size_class; }
    int32_t pages_per_slab(int32_t size_class) const { return of(size_class).k; }
    // In a slab that the group's class owns.
    bool contains(int32_t group, int64_t page) const;
    const Page& page(int32_t group, int32_t id) const { return of(class_of(group)).pages[static_cast<size_t>(id)]; }
    // Keys (visible or pending) of a namespace: without any its number may be used again.
    int64_t keyed_in(uint32_t ns) const { return namespaces_.of(ns); }

    // ---- keys
    // Page of a key, visible or pending; kNoPage if neither.
    int32_t find(int32_t group, const Digest& digest, uint32_t ns) const;
    // How many keys of the run from `begin` on are visible (or pending, if allowed), up to the first that is not.
    int64_t run_length(int32_t group, const DigestRun& run, uint32_t ns, int64_t begin, bool allow_pending) const;
    // Of a run whose first keys were visible on these pages at that version: cut to those that still are, on the pages where
    // they are now; then as many more as are visible, up to the end of the run. O(pages) for the first part, with one look at
    // a page only where keys have left its neighbourhood.
    void follow(int32_t group, const DigestRun& run, uint32_t ns, uint64_t version, std::vector<int32_t>* ids) const;
    // Page of each key of the run that is visible, kNoPage for the others.
    void find_run(int32_t group, const DigestRun& run, uint32_t ns, int32_t* ids) const;
    // One past the last key of the run, from `begin` on, that is visible or was evicted (since then, see evicted_in());
    // `begin` if there is none.
    int64_t last_known(int32_t group, const DigestRun& run, uint32_t ns, int64_t begin, uint64_t since = 0) const;
    void present(int32_t group, const DigestRun& run, uint32_t ns, uint8_t* out) const;
    // The page must be held and without key. False, and nothing done, where the key is on another page; but a visible key
    // is taken over from a pending one, and from a page that nobody holds, or only readers outside: that one is free (once
    // they are gone), what it was marked with (kept, hits, end) goes along, and the listener hears nothing.
    bool publish(int32_t group, int32_t id, const Digest& digest, uint32_t ns, int64_t end, Page::Key key);
    // The same for page ids[i] and the i-th key of the run, of the block that ends at begin + (i + 1) * block_tokens. A page
    // that has a pending key is confirmed where `key` is kVisible; one that has a visible key is left alone. After reserve_keys(). Returns how many stay without, because another page has the key.
    int64_t key_run(int32_t group, const int32_t* ids, const DigestRun& run, uint32_t ns, int64_t begin,
                    int64_t block_tokens, Page::Key key);
    void confirm(int32_t group, int32_t id);    // pending -> visible
    void unpublish(int32_t group, int32_t id);  // nothing where the page has no key
    void keep(int32_t group, int32_t id) { page_of(group, id).kept = 1; }
    // The group's keys are noted as they come, pending or visible; the newest 4,096 of all are known.
    void watch(int32_t group);
    uint64_t appeared() const { return appeared_; }  // so many were
    struct Appeared {
        uint64_t hash;  // as index_hash()
        int64_t end;
        int32_t group;
    };
    // visit(key) for those noted since there were so many; false, and no visit, where they are too many.
    template <typename Visit>
    bool each_appeared(uint64_t since, Visit&& visit) const {
        if (appeared_ - since > kNoted) return false;
        for (; since != appeared_; ++since) visit(noted_[since % kNoted]);
        return true;
    }
    uint64_t index_hash(int32_t group, const Digest& digest, uint32_t ns) const {
        return group_of(group).index.hash(digest, ns);
    }
    // Number of the episode in which the key was evicted last, if that is `since` or later; 0: it was not, or that is
    // forgotten.
    uint64_t evicted_in(int32_t group, const Digest& digest, uint32_t ns, uint64_t since = 0) const;
    bool was_evicted(int32_t group, const Digest& digest, uint32_t ns, uint64_t since = 0) const {
        return evicted_in(group, digest, ns, since) > 0;
    }
    const EvictedKeys::Episode* episode(uint64_t number) const { return ghosts_.episode(number); }
    // What is evicted from now on is an episode of its own, caused by this request. O(1).
    void taken_by(int64_t handle, uint64_t session) {
        taker_ = handle;
        taker_session_ = session;
        episode_open_ = false;
    }
    // Number of the next episode: none of what went before belongs to it.
    uint64_t next_episode() {
        episode_open_ = false;
        return ghosts_.episodes() + 1;
    }
    double evicted_slabs() const;                // memory of all evicted pages, in slabs. O(groups)
    void forget_all();                           // drops every key, and what is remembered of evicted ones. O(pages)
    void forget(const NamespaceCounts& chosen);  // the keys of namespaces that are counted there. O(pages)
    // Room for n more pages of each class and n keys of each group: what follows cannot run out of memory half-way.
    // Invalidates references to pages.
    void reserve(std::span<const int64_t> pages_of_class, std::span<const int64_t> keys_of_group);
    void reserve_keys(int32_t group, int64_t keys, size_t namespaces = 1);
    bool has_room(int32_t group, int64_t keys) const {
        return group_of(group).index.has_room(std::ssize(of(class_of(group)).pages), keys);
    }

    // ---- references
    void acquire(int32_t group, int32_t id);  // one more
    void adopt(int32_t group, int32_t id);    // acquire, counted as a hit
    // A reference of a reader outside; false: kMostPins reached, nothing done. It does not change the page's place in the
    // eviction order: that is where it was, or where the last other reference that went has put it.
    bool pin(int32_t group, int32_t id);
    void unpin(int32_t group, int32_t id);
    // Drops a reference. The last one frees the page, or caches it as the newest of `list`.
    void release(int32_t group, int32_t id, List list = kLru);
    void adopt_run(int32_t group, std::span<const int32_t> ids);               // but for negative numbers
    void release_run(int32_t group, std::span<const int32_t> ids, List list);  // the last first
    // Brings a page closer that is about to be released.
    [[gnu::always_inline]] void prefetch(int32_t group, int32_t id) const {
        __builtin_prefetch(of(class_of(group)).pages.data() + id, 1);
    }

    // Undo log for adoption: acquire()s between mark() and rollback() are undone exactly (counts, lists, order, hits).
    // Only acquire/adopt may be called in between (and mine(), which is not undone). commit_mark() forgets the log.
    // With `acquires` announced nothing in between can run out of memory.
    void mark(int64_t acquires = 0);
    void rollback();
    void commit_mark();

    // ---- taking. First secure(), then exactly that many take()s of each class, with nothing else in between.
    //
    // secure: can n pages of each class be had at once? False: nothing changed. True: every class has them among its own
    // free and cached pages now (slabs were given to it where it lacked them; with one class of single pages they may lie
    // empty still), and takes cannot fail.
    // Exact: with own = free + cached, u = slabs of a class without a held page, k = pages per slab:
    //   class c lacks y = ceil(max(0, n - own) / k) slabs; class h can give min(u, floor((own - n) / k)) slabs;
    //   feasible iff the sum of y <= empty + not yet created + what others can give.
    bool can_secure(std::span<const int64_t> n) const;
    bool secure(std::span<const int64_t> n);
    // Cached pages in eviction order, over all classes, as it is now: visit(group, page number) until it says false.
    template <typename Visit>
    void each_coldest(Visit&& visit) const {
        std::vector<int32_t> next;
        for (const SizeClass& c : classes_) next.push_back(coldest(c));
        for (;;) {
            size_t first = next.size();
            for (size_t c = 0; c < next.size(); ++c)
                if (next[c] != kNoPage && (first == next.size() || rank(page_in(classes_[c], next[c])) <
                                                                       rank(page_in(classes_[first], next[first]))))
                    first = c;
            if (first == next.size()) return;
            const int32_t id = next[first];
            next[first] = after(classes_[first], id);
            if (!visit(static_cast<int32_t>(page_in(classes_[first], id).group), id)) return;
        }
    }
    // A page of the group's class without key, one reference. Free page in the fullest partial slab; else an empty or new
    // slab (a class that can evict a page of its own leaves the last T / 64 of them, at most two, to classes of larger
    // pages); else the class whose slab is worth least gives one (of those that can spare it beyond what is still to be
    // taken of them), if all that it would lose is colder than the coldest page of the own class; else that one is evicted.
    // kNoPage if all pages are held.
    int32_t take(int32_t group);

    // ---- the guaranteed request
    // needs[c]: most pages of class c that it holds at one time. Clears every `mine` mark. Empty span: nobody.
    void guarantee(std::span<const int64_t> needs);
    void mine(int32_t group, int32_t id, int32_t change);  // +1, -1: it holds the page, or gave it up
    // P: slabs with a page of its; 0, uncounted, with one class of single pages, where nothing depends on it.
    int64_t pinned_slabs(int32_t size_class) const { return of(size_class).pinned; }
    int64_t quota() const;  // sum over classes of max(P, N)
    // As secure/take for the guaranteed request, keeping quota() <= T if it is so now. Free choice (plain secure) where
    // no choice can break it; otherwise own slabs first, then whole slabs without a held page (empty, new, or
    // reclaimed). Pages are marked mine.
    bool can_secure_mine(std::span<const int64_t> n) const;
    bool secure_mine(std::span<const int64_t> n);
    int32_t take_mine(int32_t group);
    // n times take_mine() or take().
    void take_run(int32_t group, int64_t n, bool mine, int32_t* ids);

    // ---- moves since the last call, oldest first
    std::span<const Move> moves() const { return moves_; }
    void forget_moves() { moves_.clear(); }

    // Nullptr if all is well, else what is broken. O(pages).
    const char* check() const;

  private:
    static constexpr int16_t kNoClass = arena_parts::kNoClass;
    static constexpr int32_t kNoSlab = arena_parts::kNoSlab;
    static constexpr uint64_t kNoted = 4096;
    static constexpr int64_t kLeftAlone = 2;  // empty slabs, at most: see left_alone()

    using Head = arena_parts::Head;
    using SizeClass = arena_parts::SizeClass;
    using Slab = arena_parts::Slab;
    using Group = arena_parts::Group;
    using Undo = arena_parts::Undo;

    SizeClass& of(int32_t c) { return classes_[static_cast<size_t>(c)]; }
    const SizeClass& of(int32_t c) const { return classes_[static_cast<size_t>(c)]; }
    Group& group_of(int32_t g) { return groups_[static_cast<size_t>(g)]; }
    const Group& group_of(int32_t g) const { return groups_[static_cast<size_t>(g)]; }
    Page& page_of(int32_t g, int32_t id) { return page_in(of(group_of(g).size_class), id); }
    static Page& page_in(SizeClass& c, int32_t id) { return c.pages[static_cast<size_t>(id)]; }
    static const Page& page_in(const SizeClass& c, int32_t id) { return c.pages[static_cast<size_t>(id)]; }
    Slab& slab(int32_t s) { return slabs_[static_cast<size_t>(s)]; }
    const Slab& slab(int32_t s) const { return slabs_[static_cast<size_t>(s)]; }
    // One class, one page in a slab: no slabs_, and in the stack of empty ones Page::next leads to the next.
    bool plain() const { return most_per_slab_ == 1 && classes_.size() == 1; }
    int32_t& next_empty(int32_t s) { return plain() ? page_in(classes_[0], s).next : slab(s).next; }
    int32_t next_empty(int32_t s) const { return plain() ? page_in(classes_[0], s).next : slab(s).next; }
    int16_t owner(int32_t s) const {
        if (!plain()) return slab(s).owner;
        const Page& page = page_in(classes_[0], s);
        return page.refs || page.list ? 0 : kNoClass;
    }
    static int32_t slab_of(const SizeClass& c, int32_t id) { return c.k == 1 ? id : id / c.k; }
    int32_t classes() const { return static_cast<int32_t>(classes_.size()); }
    int64_t uncreated() const { return most_slabs_ - created_slabs(); }
    static int64_t slabs_for(const SizeClass& c, int64_t n) { return (n + c.k - 1) / c.k; }
    int32_t mine_in(const Slab& s) const { return s.epoch == epoch_ ? s.mine : 0; }

    // arena_keys.cpp
    static constexpr int32_t kRegion = 64;
    static size_t region_of(int32_t id) { return static_cast<size_t>(id) / kRegion; }
    static void leave(SizeClass& c, int32_t id, uint64_t version) { c.left[region_of(id)] = version; }
    void note(int32_t group, int64_t end, uint64_t hash) { noted_[appeared_++ % kNoted] = {hash, end, group}; }
    bool publish(int32_t group, int32_t id, const Digest& digest, uint32_t ns, int64_t end, Page::Key key,
                 uint64_t hash);
    void drop_key(SizeClass& c, int32_t id);
    void drop_key(SizeClass& c, int32_t id, uint64_t hash);
    void evict(SizeClass& c, int32_t id);
    void begin_episode();
    bool take_over(int32_t group, int32_t id, int32_t from, uint64_t hash);
    template <typename Chosen>
    void forget_if(Chosen&& chosen);

    // arena.cpp: lists and references
    void prepare_to_evict();
    void append(SizeClass& c, int32_t id, List list);
    int32_t last_older(const SizeClass& c, List list, const Page& page) const;
    void put_back(SizeClass& c, int32_t id, List list);
    void unlink(SizeClass& c, int32_t id);
    static void unchain(SizeClass& c, Page& page);
    void acquire_now(int32_t group, int32_t id);
    void release_now(int32_t group, int32_t id, List list);
    size_t append_last(int32_t group, std::span<const int32_t> ids, List list);
    void log_acquire(int32_t group, int32_t id, bool hit);
    // k > 1: heat of the slab, for a page that comes into a list, and for one that leaves it; its first and last held page.
    void warm(SizeClass& c, int32_t id);
    void cool(SizeClass& c, int32_t id);
    void hold_in_slab(SizeClass& c, int32_t id);
    void unhold_in_slab(SizeClass& c, int32_t id);

    // slabs.cpp: slabs between classes
    void list_partial(SizeClass& c, int32_t s);
    void unlist_partial(SizeClass& c, int32_t s);
    int32_t fullest(const SizeClass& c) const;
    int32_t take_from(SizeClass& c, int32_t s);
    void free_page(SizeClass& c, int32_t id);
    int32_t own_slab(int32_t size_class);
    int32_t give_slab(int32_t size_class);
    int32_t take_new(int32_t size_class);
    int64_t left_alone(const SizeClass& c) const;
    void foresee(const SizeClass& c, int64_t n) const;
    int64_t take_unused(int32_t group, int64_t n, int32_t* ids);
    void push_empty(int32_t s) {
        if (!plain()) slab(s).owner = kNoClass;
        next_empty(s) = first_empty_;
        first_empty_ = s;
        ++empty_;
    }
    void give_back_unused();
    void reverse_unused(SizeClass& c);
    int64_t can_spare(const SizeClass& c, int64_t n) const;
    int32_t cheapest_that_spares(uint64_t below);
    int64_t pages_to_go(const SizeClass& c) const;
    uint64_t price_of(SizeClass& c, bool fresh);
    static int32_t coldest(const SizeClass& c);
    static int32_t after(const SizeClass& c, int32_t id);
    static uint64_t rank(const Page& page);
    int32_t held_now(int32_t group, int32_t id) {  // a page that was taken
        SizeClass& c = of(class_of(group));
        if (c.wanted) --c.wanted;
        page_in(c, id).refs = 1;
        ++group_of(group).held;
        if (c.k > 1) hold_in_slab(c, id);
        return id;
    }

    // reclaim.cpp: emptying a slab
    void reclaim(int32_t size_class);
    int32_t slab_to_reclaim(int32_t size_class);
    uint64_t newest_in(const SizeClass& c, int32_t s) const;
    void move_page(int32_t size_class, int32_t from, int32_t to);

    // guarantee.cpp: own slabs first
    bool any_choice_keeps_quota(std::span<const int64_t> n) const;
    int64_t lacking_slabs(int32_t size_class, int64_t n) const;
    static void reset_own_cursors(SizeClass& c);
    int32_t take_own(int32_t size_class);
    int32_t take_whole_slab(int32_t size_class);

    // arena_check.cpp
    const char* check_slabs(int32_t size_class) const;
    const char* check_pages(int32_t size_class) const;
    const char* check_lists(int32_t size_class) const;
    const char* check_totals() const;

    int64_t most_slabs_;
    bool movable_;
    KeyListener* listener_;
    std::vector<SizeClass> classes_;
    std::vector<Group> groups_;
    LargeVector<Slab> slabs_;  // created ones, unless plain()
    int32_t first_empty_ = kNoSlab;
    int64_t empty_ = 0;
    int32_t most_per_slab_ = 1;
    int32_t least_per_slab_ = kMostPages;
    uint64_t clock_ = 0;
    uint64_t version_ = 1;
    int64_t pending_ = 0;
    int64_t evictions_ = 0;
    int64_t moved_ = 0;
    int64_t reclaimed_ = 0;
    uint32_t epoch_ = 1;  // of the guaranteed request
    bool tight_ = false;  // the last secure_mine() keeps to own and whole slabs
    bool marked_ = false;
    uint64_t appeared_ = 0;
    std::vector<Appeared> noted_;  // a ring
    EvictedKeys ghosts_;
    int64_t taker_ = 0;  // for whom pages are evicted now
    uint64_t taker_session_ = 0;
    bool episode_open_ = false;
    NamespaceCounts namespaces_;
    std::vector<Undo> log_;
    std::vector<Move> moves_;
    std::vector<int32_t> leaving_;  // pages of the slab that is being reclaimed
};

}  // namespace kvc
