// The block manager: requests, their pages in every group, steps and loads.
//
// One file per part of a request's life: open.cpp (tokens, keys, what the policy keeps), lookup.cpp (longest common hit),
// explain.cpp and siblings.cpp (why it was not longer),
// plan.cpp (where states are snapshotted), allocate.cpp (what a grant needs), adopt.cpp (its hit), grant.cpp (its pages),
// steps.cpp (commit, end of step), keys.cpp (what becomes findable then), closing.cpp (giving pages back), loads.cpp
// (tiers), events.cpp (what became findable or went), manager.cpp (reading, clear), manager_check.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "group_rules.h"
#include "history.h"
#include "namespace_counts.h"
#include "request.h"
#include "sha256.h"

namespace kvc {

int64_t now_ns();  // of the steady clock

class Manager final : private KeyListener {
  public:
    Manager(const kvc_config& config, const kvc_group* groups);
    Manager(const Manager&) = delete;
    Manager& operator=(const Manager&) = delete;

    int32_t open(const kvc_open_args& args, int64_t* handle);
    int32_t extend(int64_t handle, const int32_t* tokens, int64_t n);
    int32_t retain(int64_t handle, const int64_t* intervals, const int64_t* positions, const uint8_t* declared,
                   int64_t n);
    int32_t stops(int64_t handle, int64_t start, int64_t end, int64_t* positions, int64_t cap, int64_t* n);

    int32_t lookup(int64_t handle, const uint8_t* const* present, const int64_t* n_present, kvc_hit* out);
    int32_t explain(int64_t handle, const uint8_t* const* elsewhere, const int64_t* n_elsewhere, kvc_explained* out,
                    kvc_loss* losses, int64_t cap, int64_t* n);
    int32_t need(int64_t handle, int64_t n_tokens, int64_t n_drafts, int64_t* pages);
    int32_t allocate(int64_t handle, int64_t n_tokens, int64_t n_drafts, kvc_grant* out);
    int32_t blockage(int64_t handle, int32_t* reason);

    int32_t begin_step(int64_t* step);
    int32_t check_in_step() const;
    int32_t commit(int64_t handle, int64_t upto);
    int32_t end_step(int64_t step);
    int32_t close(int64_t handle, bool aborted);
    int32_t preempt(int64_t handle);

    int32_t info(int64_t handle, kvc_request_info* out);
    int32_t digests(int64_t handle, int64_t first, uint8_t* digests, int64_t cap, int64_t* n);
    int32_t table(int64_t handle, int32_t group, int64_t first, int32_t* pages, int64_t cap, int64_t* n);
    int32_t state_plan(int64_t handle, int32_t group, int32_t* source, int64_t* positions, int32_t* pages, int64_t cap,
                       int64_t* n);
    int32_t holes(int64_t handle, int32_t group, int64_t* blocks, int64_t cap, int64_t* n);

    int32_t load_items(int64_t load, kvc_keyed* items, int64_t cap, int64_t* n);
    int32_t end_load(int64_t load, const uint8_t* ok, int64_t n);
    int32_t abandon_load(int64_t load);
    int32_t take_keyed(kvc_keyed* items, int64_t cap, int64_t* n);
    int32_t next_evicted(int64_t slabs, kvc_keyed* items, int64_t cap, int64_t* n) const;
    int32_t pin(kvc_keyed* items, int64_t n, uint8_t* pinned);
    int32_t unpin(int32_t group, const int32_t* pages, int64_t n);
    int32_t take_moves(kvc_move* moves, int64_t cap, int64_t* n);
    int32_t take_events(const kvc_event_counts& cap, kvc_event_run* runs, uint8_t* keys, int32_t* tokens,
                        kvc_event_counts* n);

    int32_t stats(kvc_manager_stats* out);
    int32_t arena_stats(kvc_arena_stats* out);
    int32_t class_stats(int32_t size_class, kvc_class_stats* out);
    int32_t group_stats(int32_t group, kvc_group_stats* out);
    int32_t has_key(int32_t group, uint32_t ns, const uint8_t* digest, int32_t* page);
    int32_t namespace_use(uint32_t ns, int64_t* uses);
    int32_t clear(bool retire);
    int32_t clear_namespaces(const uint32_t* ns, int64_t n, bool retire);
    int32_t check();

    // Of a request that a batch comes to soon: what every step reads; the end of its tokens.
    void prefetch(int64_t handle) const;
    void prefetch_tokens(int64_t handle) const;

  private:
    struct Walk {
        int64_t full;  // longest hit of the full groups alone, on the grid
        int64_t hit;   // with every group that votes
    };
    // What a lookup may count as there beside visible keys.
    enum Sources : unsigned { kDevice = 0, kPresent = 1, kPending = 2 };

    // open.cpp
    int32_t retain_in(Request& r, const int64_t* intervals, const int64_t* positions, const uint8_t* declared,
                      int64_t n) const;
    int32_t check_open(const kvc_open_args& args) const;
    void append_tokens(Request& r, const int32_t* tokens, int64_t n) const;
    void append_units(Request& r, const int32_t* tokens, int64_t n, int64_t units) const;
    std::vector<int64_t> class_needs(int64_t most_tokens) const;  // slabs of each class
    uint64_t first_episode(uint32_t ns, const Digest& root);
    const Digest* digest_at(const Request& r, int64_t position) const;
    bool key_at(const Request& r, int32_t group, int64_t end, Digest* key) const;
    bool block_key(const Request& r, int32_t group, int64_t block, Digest* key) const;

    // lookup.cpp
    int64_t hit_limit(const Request& r) const { return std::max<int64_t>(r.n_tokens - 1, 0) / grid_ * grid_; }
    int64_t reach_of(const Request& r) const { return r.retired ? 0 : hit_limit(r); }
    DigestRun run_of(const Request& r, int32_t group, int64_t begin, int64_t end) const;
    bool is_present(const Request& r, int32_t group, int64_t index) const;
    const std::vector<int32_t>& resident(const Request& r, int32_t group, int64_t blocks) const;
    int64_t full_hit(const Request& r, int32_t group, int64_t limit, unsigned sources) const;
    bool block_at(const Request& r, int32_t group, int64_t block, unsigned sources) const;
    bool state_at(const Request& r, int32_t group, int64_t position, unsigned sources) const;
    struct Reopened {
        struct Range {
            int64_t first;
            int64_t last;
        };
        std::vector<Range> ranges;  // the highest first
        size_t next = 0;            // those before it lie above what is asked for now
        bool known = false;         // else nothing is ruled out
    };
    Reopened reopened(const Request& r, const Request::Served& before) const;
    int64_t not_ruled_out(Reopened* again, const Request::Served& before, int64_t position) const;
    void rule_out(const Reopened& again, int64_t from, int64_t hit, Request::Served* before) const;
    int64_t last_sparse_known(const Request& r, int64_t from, int64_t least) const;
    using GroupPlaces = std::array<int64_t, kMostGroups>;
    int64_t last_present(const Request& r, int64_t position, int64_t least, GroupPlaces* found) const;
    int64_t served_upto(const Request& r, int64_t position, unsigned sources, GroupPlaces* seen) const;
    int64_t sparse_hit(const Request& r, int64_t from, unsigned sources) const;
    Walk longest(const Request& r, unsigned sources, int64_t limit) const;
    void attribute_losses(const Request& r, const Walk& walk, const Walk& pending, Request::Losses* out) const;
    int32_t lacking_group(const Request& r, int64_t position) const;
    bool sparse_known(const Request& r, int64_t position) const;
    int64_t deepest_evicted(const Request& r, int32_t group, int64_t begin, int64_t limit) const;

    // siblings.cpp
    struct Difference {
        enum Kind { kEnd, kExtra, kTokens } kind = kEnd;  // the shorter one ends; media or embeddings; tokens
        int64_t position = 0;                             // so many tokens are equal
    };
    struct Sibling {  // a request that has a part of its content in common with another one
        const Content* content = nullptr;
        const Request* open = nullptr;  // the same, if it is open
        int64_t links = 0;
        Difference difference;
    };
    template <typename Visit>
    void each_other(const Request& r, Visit&& visit) const;
    Difference difference(const Request& r, const Content& other, int64_t links) const;
    static int64_t equal_tokens(const Request& r, const Content& other, int64_t begin);
    int64_t common_links(const Request& r, const Content& other, int64_t known) const;
    static int64_t computed_before(const Sibling& other, uint64_t tick);
    Sibling longest_common(const Request& r, bool running, Sibling* differing = nullptr) const;
    Sibling longest_under_another_root(const Request& r, int64_t beyond) const;

    // explain.cpp
    using Maps = std::vector<std::span<const uint8_t>>;  // per group, as `present` of a lookup
    int64_t hit_elsewhere(const Request& r, const Maps& maps) const;
    void explain_evicted(const Request& r, kvc_loss* loss) const;
    void explain_pending(const Request& r, kvc_loss* loss) const;
    void explain_new(const Request& r, const Request::Lost& lost, std::vector<kvc_loss>* out) const;
    void explain_region(const Request& r, const Request::Lost& lost, std::vector<kvc_loss>* out) const;
    void name_other(const Sibling& other, kvc_loss* loss) const;
    void show_difference(const Request& r, const Sibling& other, kvc_loss* loss) const;

    // plan.cpp
    // What the policy keeps in (start, end], ascending, of the groups `among` alone. All of it lies on the grid.
    void kept_between(const Request& r, int64_t start, int64_t end, std::vector<Kept>* out,
                      GroupSet among = ~GroupSet{0}) const {
        out->clear();
        if (start / grid_ * grid_ + grid_ <= end) add_kept_between(r, start, end, among, out);
    }
    void add_kept_between(const Request& r, int64_t start, int64_t end, GroupSet among, std::vector<Kept>* out) const;
    int64_t plan_limit(const Request& r, int64_t start, int64_t end) const;
    std::vector<Point> make_points(const Request& r, int64_t start, int64_t end) const;
    std::vector<Point> make_plan(const Request& r, int64_t start, int64_t end, int64_t drafts) const;
    std::vector<BlockRange> paged_blocks(const Request& r, int32_t group, int64_t start, int64_t sure,
                                         int64_t end) const;
    bool is_declared(const Request& r, int64_t position) const;

    // allocate.cpp
    using Holders = std::set<int64_t>;  // orders of requests that hold pages
    struct Adoption {  // what a first grant takes over; kNoPage: a load fills it; kHole: a draft goes without
        int64_t hit = 0;
        std::vector<std::vector<int32_t>> pages;  // per group: blocks of the hit that it needs, or the one state
        int64_t loads = 0;
    };
    struct Demand {  // of a grant
        int64_t start = 0;
        int64_t end = 0;
        std::vector<Point> plan;
        std::vector<std::vector<BlockRange>> blocks;  // of transient groups: those that have a page, from `start` on
        std::array<int64_t, kMostGroups> pages{};     // new ones, per group
        std::array<int64_t, kMostGroups> classes{};   // ... and per class
    };
    Request* guaranteed();
    bool gather(const Request& r, Adoption* adoption) const;
    Adoption adopt(Request& r, bool guaranteed) const;
    bool keeps_quota(const Adoption& adoption, const Request& r) const;
    Demand demand_of(const Request& r, const Adoption* adoption, int64_t start, int64_t end, int64_t sure) const;
    Demand fitting_demand(const Request& r, const Adoption* adoption, int64_t start, int64_t end, int64_t sure) const;
    int64_t slabs_after(const Request& r, const Adoption* adoption, const Demand& demand) const;
    int32_t check_allocate(const Request& r, int64_t n_tokens, int64_t n_drafts, int64_t start) const;
    void reserve_grant(Request& r, const Adoption* adoption, Demand* demand);
    bool secure_grant(const Request& r, const Adoption* adoption, const Demand& demand);
    bool try_grant(Request& r, const Adoption* adoption, Demand demand);
    enum Granted { kGranted, kNoRoom, kNeedsPlan };
    Granted grant_on(Request& r, bool oldest, int64_t end, int64_t drafts);
    bool take_next_blocks(Request& r, bool oldest);
    bool starts_block(const Request& r, int32_t group) const {
        return rules(group).blocks() && r.granted % rules(group).block_tokens == 0;
    }
    int32_t grant_beyond(Request& r, bool oldest, int64_t n_tokens, int64_t n_drafts, kvc_grant* out);
    int32_t no_space(Request& r);
    bool alone(const Request& r) const;
    void start(Request& r, const Adoption& adoption, Point state, Load* load, Holders::node_type holder);
    void start_load(Request& r, const Adoption& adoption, Load* load);
    int64_t new_pages(const Request& r, int32_t group, const Demand& demand, bool first) const;
    void grant_blocks(Request& r, int32_t group, int64_t end);
    void grant_ranges(Request& r, int32_t group, std::span<const BlockRange> blocks, int64_t end);
    void grant(Request& r, Demand demand);
    int32_t take_page(const Request& r, int32_t group);

    // steps.cpp
    Step* fence_of(const Request& r);
    Step* open_step(int64_t id);
    const Step* open_step(int64_t id) const { return const_cast<Manager*>(this)->open_step(id); }
    void enter_step(Request& r, Step& step, int64_t upto);
    bool commit_within(Request& r, int64_t upto);
    void commit_beyond(Request& r, int64_t upto);
    int32_t check_commit(const Request* r, int64_t handle, int64_t upto) const;
    void commit_points(Request& r, std::vector<Point> plan, int64_t upto, int64_t step);
    struct Room {
        std::array<int64_t, kMostGroups> keys{};
        size_t releases = 0;
        size_t namespaces = 0;
    };
    void reserve_settle(const Request& r, int64_t computed, int64_t tokens, Room* room);
    void release_guesses(Request& r, int64_t upto);
    void confirm_spans(Request& r);
    void key_page(const Request& r, int32_t group, int32_t page, const Digest& key, int64_t end, Page::Key visibility);
    int64_t key_full(Request& r, int32_t group, int64_t begin, int64_t end, Page::Key visibility);
    void key_twins(Request& r);
    void key_state(const Request& r, const Point& point, int32_t group, Page::Key visibility);
    struct SpanWalk {  // of one call, over the kept positions of a group: the last one, and the last declared one
        int64_t keyed = 0;
        int64_t declared = 0;
    };
    void key_span(Request& r, int32_t group, int64_t position, int64_t* done, bool declared, Page::Key visibility,
                  SpanWalk* walked);
    void end_pending(Request& r, int32_t group, int32_t page, bool written);
    void key_full_blocks(Request& r);
    void key_sparse(Request& r);
    size_t newest_complete(const Request& r) const;
    void settle(Request& r);
    void give_up_passed(Request& r);
    void give_up_unread(Request& r, int32_t group, int64_t told);
    void settle_unread(Request& r);
    void reserve_unread(const Request& r, Room* room);
    int64_t unread_after(const Request& r) const {
        return piece_ < key_piece_ ? (r.computed / piece_ + 1) * piece_ : INT64_MAX;
    }

    // closing.cpp
    void release(Request& r, int32_t group, int32_t page, Arena::List list);
    void release_run(Request& r, int32_t group, std::span<const int32_t> pages, Arena::List list);
    void release_point(Request& r, const Point& point, Arena::List list);
    Arena::List superseded_list(int32_t group, int32_t page) const;
    struct Filed {  // a sparse page, under where it ends
        int64_t position;
        Release release;
    };
    void collect_points(Request& r, bool loading);
    void collect_spans(Request& r, bool loading);
    template <typename Visit>
    void each_declared(const Request& r, Visit&& visit) const;
    void collect_touched(Request& r);
    void release_all(Request& r);
    void reserve_drop(const Request& r);
    void drop_pages(Request& r);
    void remember(Content&& content, bool aborted);

    // loads.cpp
    void detach_load(Request& r);
    int64_t most_untaken() const;
    void push_keyed(int64_t handle, int32_t group, int32_t page);

    // events.cpp
    void stored(int32_t group, int32_t page) override;
    void removed(int32_t group, const Digest& digest, uint32_t ns) override;
    void push_event(const kvc_event_run& head, const uint8_t* key, const int32_t* tokens);
    Digest parent_key(const Request& r, int32_t group, int64_t end) const;
    bool continues(const kvc_event_run& last, const kvc_event_run& head) const;

    // manager.cpp
    Request* find(int64_t handle) { return const_cast<Request*>(peek(handle)); }
    // Handles: generation in the upper, slot in the lower 32 bits.
    const Request* peek(int64_t handle) const {
        const auto index = static_cast<size_t>(handle & 0xffffffff);
        if (handle <= 0 || index >= slots_.size() || slots_[index].generation != handle >> 32) return nullptr;
        return slots_[index].request.get();
    }
    int32_t unknown(int64_t handle) const;
    int32_t check_group(int32_t group) const;
    void mute(Request& r, bool retire);
    const char* check_request(const Request& r, std::vector<std::vector<int32_t>>* refs) const;
    const char* check_pending() const;
    const char* check_guaranteed() const;
    const char* check_namespaces() const;
    template <typename Visit>
    void each_page(const Request& r, Visit&& visit) const;  // visit(group, page) for every reference of the request

    const GroupRules& rules(int32_t group) const { return groups_[static_cast<size_t>(group)]; }
    int64_t known_tokens(const Request& r) const;

    std::vector<GroupRules> groups_;
    std::vector<int32_t> full_;    // ids of full groups that vote
    std::vector<int32_t> spans_;   // ids of all span groups
    std::vector<int32_t> states_;  // ids of state groups; Point::pages has this order
    GroupSet state_set_ = 0;
    bool sparse_votes_ = false;    // some span or state group votes
    bool unpaged_tokens_ = false;  // of a transient group with blocks of one token, where not each gets a page
    bool whole_grants_ = false;    // a state or transient group: what a grant covers is committed but for its drafts
    int32_t n_groups_;
    std::vector<int32_t> pages_per_slab_;  // per class
    int64_t unit_;
    int64_t grid_;
    int64_t piece_;      // of tokens: every block, hash unit and grid unit is a multiple of it
    int64_t key_piece_;  // the same but for the blocks of transient groups, which get keys on the grid only
    int64_t max_open_steps_;
    BlockChain chain_;
    Arena arena_;

    struct Slot {
        std::unique_ptr<Request> request;
        int64_t generation = 1;
    };
    std::vector<Slot> slots_;
    std::vector<size_t> free_slots_;
    int64_t open_requests_ = 0;
    NamespaceCounts users_;  // open requests and loads
    Holders holders_;
    int64_t last_order_ = 0;
    uint64_t tick_ = 0;  // counts starts, ends and lookups: what came first
    struct Root {
        Digest root;
        uint64_t since;  // episode
    };
    std::unordered_map<uint32_t, Root> roots_;  // by number of the namespace
    History history_;
    std::deque<int64_t> by_age_;  // handles, the oldest first; of closed requests too
    int64_t guaranteed_ = 0;      // handle of the oldest open request, once it was asked for; 0: to be found
    bool frozen_ = false;         // it waits for space: nobody else gets any

    std::vector<Kept> kept_;       // working memory of kept_between
    std::vector<Filed> filed_;     // ... and of a request's end
    std::vector<Release> unused_;  // ... and of a grant that replaces another: pages that go back when all are taken

    std::deque<Step> steps_;            // open, oldest first
    std::vector<Step::Entry> entries_;  // none: memory for the next step's
    int64_t last_step_ = 0;
    std::unordered_map<int64_t, Load> loads_;
    int64_t last_load_ = 0;
    std::deque<kvc_keyed> keyed_;
    NamespaceCounts keyed_of_;  // entries of keyed_
    bool journal_;
    int64_t keyed_dropped_ = 0;
    int64_t pinned_ = 0;

    bool events_;
    const Request* writer_ = nullptr;  // whose keys become visible now
    const Digest* parent_ = nullptr;   // of the key, where that is known without it
    std::vector<kvc_event_run> runs_;
    NamespaceCounts runs_of_;  // entries of runs_
    std::vector<uint8_t> run_keys_;
    std::vector<int32_t> run_tokens_;
    int64_t events_dropped_ = 0;
};

template <typename Visit>
void Manager::each_page(const Request& r, Visit&& visit) const {
    for (int32_t g = 0; g < n_groups_; ++g)
        if (!r.tables.empty())
            for (const int32_t page : r.tables[static_cast<size_t>(g)].pages)
                if (page != kNoPage) visit(g, page);
    auto point = [&](const Point& p) {
        for (size_t s = 0; s < p.pages.size(); ++s) visit(states_[s], p.pages[s]);
    };
    for (const Point& p : r.points) point(p);
    point(r.working);
    if (r.plan_open)
        for (const Point& p : r.plan)
            if (r.working.pages.empty() || p.pages != r.working.pages) point(p);
}

}  // namespace kvc
