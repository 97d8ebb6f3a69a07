// The block manager: requests, their pages in every group, steps and loads.
//
// One file per part of a request's life: lookup.cpp (longest common hit), allocate.cpp (grants, state plans),
// steps.cpp (commit, end of step, closing), loads.cpp (tiers), manager.cpp (opening, reading, check).
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "request.h"
#include "sha256.h"

namespace kvc {

class Manager {
  public:
    Manager(const kvc_config& config, const kvc_group* groups);

    int32_t open(const kvc_open_args& args, int64_t* handle);
    int32_t extend(int64_t handle, const int32_t* tokens, int64_t n);
    int32_t retain(int64_t handle, int64_t interval, const int64_t* positions, const uint8_t* kept, int64_t n);
    int32_t stops(int64_t handle, int64_t start, int64_t end, int64_t* positions, int64_t cap, int64_t* n);

    int32_t lookup(int64_t handle, const uint8_t* const* present, const int64_t* n_present, kvc_hit* out);
    int32_t need(int64_t handle, int64_t n_tokens, int64_t* pages);
    int32_t allocate(int64_t handle, int64_t n_tokens, kvc_grant* out);

    int32_t begin_step(int64_t* step);
    int32_t commit(int64_t handle, int64_t upto);
    int32_t end_step(int64_t step);
    int32_t close(int64_t handle);
    int32_t preempt(int64_t handle);

    int32_t info(int64_t handle, kvc_request_info* out);
    int32_t digests(int64_t handle, const uint8_t** digests, int64_t* n_units);
    int32_t table(int64_t handle, int32_t group, int64_t first, int32_t* pages, int64_t cap, int64_t* n);
    int32_t state_plan(int64_t handle, int32_t group, int32_t* source, int64_t* positions, int32_t* pages, int64_t cap,
                       int64_t* n);

    int32_t load_items(int64_t load, kvc_keyed* items, int64_t cap, int64_t* n);
    int32_t end_load(int64_t load, const uint8_t* ok, int64_t n);
    int32_t abandon_load(int64_t load);
    int32_t take_keyed(kvc_keyed* items, int64_t cap, int64_t* n);
    int32_t pin(const kvc_keyed* items, int64_t n, uint8_t* pinned);
    int32_t unpin(int32_t group, const int32_t* pages, int64_t n);

    int32_t stats(kvc_manager_stats* out);
    int32_t group_stats(int32_t group, kvc_pool_stats* out);
    int32_t has_key(int32_t group, uint32_t ns, const uint8_t* digest, int32_t* page);
    int32_t clear();
    int32_t check();

  private:
    struct Walk {
        int64_t attention;  // longest hit of the attention groups alone, on the grid
        int64_t hit;        // with every recurrent group
    };
    // What a lookup may count as present beside visible keys.
    enum Sources : unsigned { kDevice = 0, kPresent = 1, kPending = 2 };

    // lookup.cpp
    int64_t hit_limit(const Request& r) const { return std::max<int64_t>(r.n_tokens - 1, 0) / grid_ * grid_; }
    DigestRun run_of(const Request& r, int32_t group, int64_t limit) const;
    const Digest* digest_at(const Request& r, int64_t position) const;
    bool is_present(const Request& r, int32_t group, int64_t index) const;
    int64_t attention_hit(const Request& r, int32_t group, int64_t limit, unsigned sources) const;
    bool state_at(const Request& r, int64_t position, unsigned sources) const;
    Walk longest(const Request& r, unsigned sources) const;
    void attribute_losses(const Request& r, const Walk& walk, const Walk& pending, kvc_hit* out) const;
    bool evicted_any() const;
    bool state_known(const Request& r, int64_t position) const;
    int64_t deepest_evicted(const Request& r, int32_t group, int64_t begin, int64_t limit) const;
    uint64_t version() const;

    // allocate.cpp
    struct Adoption {  // what a first grant takes over; kNoPage where a load must fill the page
        int64_t hit = 0;
        std::vector<std::vector<int32_t>> pages;  // per group: blocks of the hit, or the one state
        int64_t loads = 0;
    };
    bool gather(const Request& r, Adoption* adoption) const;
    Adoption adopt(Request& r) const;
    std::vector<Point> make_plan(const Request& r, int64_t start, int64_t* end) const;
    void count_new(const Request& r, const Adoption* adoption, size_t plan_points, int64_t end,
                   std::vector<int64_t>* pages) const;
    bool fits(const Adoption* adoption, const std::vector<int64_t>& pages) const;
    int32_t check_allocate(const Request& r, int64_t n_tokens, int64_t start) const;
    void start(Request& r, const Adoption& adoption);
    void start_load(Request& r, const Adoption& adoption, Load* load);
    void grant(Request& r, std::vector<Point> plan, int64_t end);
    bool is_declared(const Request& r, int64_t position) const;
    void add_stops(const Request& r, int64_t start, int64_t end, std::vector<Point>* points) const;

    // steps.cpp
    Step* open_step(int64_t id);
    const Step* open_step(int64_t id) const { return const_cast<Manager*>(this)->open_step(id); }
    void set_aside(const Step& step);
    void release(Request& r, int32_t group, int32_t page, Pool::List list);
    void release_point(Request& r, const Point& point, Pool::List list);
    void release_superseded(Request& r, const Point& point);
    bool key_page(const Request& r, int32_t group, int32_t page, int64_t end, Page::Key key);
    void key_blocks(Request& r);
    void key_points(Request& r);
    size_t newest_complete(const Request& r) const;
    void drop_pages(Request& r);

    // loads.cpp
    void detach_load(Request& r);
    void push_keyed(const Request& r, int32_t group, int32_t page);

    // manager.cpp
    Request* find(int64_t handle);
    const Request* peek(int64_t handle) const;
    int32_t unknown(int64_t handle) const;
    void append_tokens(Request& r, const int32_t* tokens, int64_t n) const;
    int32_t check_group(int32_t group) const;
    const char* check_requests(std::vector<std::vector<int32_t>>* refs) const;
    const char* check_pending() const;

    std::vector<kvc_group> groups_;
    std::vector<int32_t> attention_;  // group ids
    std::vector<int32_t> states_;     // group ids; Point::pages has this order
    int64_t unit_;
    int64_t grid_;
    int64_t max_open_steps_;
    BlockChain chain_;
    std::vector<Pool> pools_;

    struct Slot {
        std::unique_ptr<Request> request;
        int64_t generation = 1;
    };
    std::vector<Slot> slots_;
    std::vector<size_t> free_slots_;
    int64_t open_requests_ = 0;

    std::deque<Step> steps_;  // open, oldest first
    int64_t last_step_ = 0;
    std::unordered_map<int64_t, Load> loads_;
    int64_t last_load_ = 0;
    std::deque<kvc_keyed> keyed_;
    bool journal_;
    int64_t keyed_dropped_ = 0;
    int64_t pinned_ = 0;
};

}  // namespace kvc
