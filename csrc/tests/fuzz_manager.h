// One manager and a caller who means it badly: right and wrong calls in any order, all from a seed.
//
// After each call that failed, whatever can be read is as it was before; kvc_check() holds throughout; when everything
// was given back nothing is held.
#pragma once

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "fuzz.h"
#include "fuzz_setup.h"
#include "readings.h"

namespace fuzz {

class ManagerFuzz {
  public:
    ManagerFuzz(uint64_t seed, Tally* tally);
    ~ManagerFuzz();
    ManagerFuzz(const ManagerFuzz&) = delete;
    ManagerFuzz& operator=(const ManagerFuzz&) = delete;

    // False: the setup was hostile and has been refused.
    bool made() const { return manager_ != nullptr; }
    void run(int64_t operations);

  private:
    struct Pin {
        int32_t group;
        int32_t page;
    };

    template <typename Body>
    int32_t call(const char* function, Body&& body, const int64_t* done = nullptr, bool halves = false);
    // halves: where memory runs out, a request may be served by half.
    template <typename Body>
    int32_t call_many(const char* function, int64_t n, int64_t* done, Body&& body, bool halves = false);
    Readings readings() { return read_all(manager_, setup_, handles_, loads_); }
    void check();
    void one_operation();
    void give_everything_back();

    // Arguments: mostly right, now and then hostile.
    bool spite() { return random_.chance(spite_percent_); }
    int64_t a_handle();
    int64_t a_load();
    int32_t a_group();
    int64_t a_count(int64_t most) { return spite() ? random_.hostile() : random_.between(0, most); }
    void look_up(int64_t handle);
    bool ask(int64_t handle, kvc_request_info* info);
    int32_t allocate(int64_t handle, int64_t n, int64_t drafts, kvc_grant* grant);
    void expect_a_reason(int64_t handle);

    // fuzz_manager.cpp
    void open();
    void extend();
    struct Kept {
        std::vector<int64_t> intervals;
        std::vector<int64_t> positions;
        std::vector<uint8_t> declared;
        int64_t n = 0;
    };
    Kept some_kept();
    void retain();
    void stops();
    void lookup();
    void explain();
    void explain(int64_t handle, const kvc_hit* hit);
    void need();
    void allocate();
    void begin_step();
    void commit();
    void end_step();
    std::vector<int64_t> some_handles();
    void allocate_many();
    void commit_many();
    void extend_many();
    void close();
    void advance();  // what the request's state asks for next
    // fuzz_tiers.cpp
    void read();
    void read_counts();
    void take_moves();
    void take_events();
    void take_keyed();
    void end_load();
    void abandon_load();
    void pin();
    void unpin();
    void has_key();
    void clear();
    void clear_namespaces();

    Random random_;
    Where where_;
    Tally* tally_;
    Setup setup_;
    kvc_manager* manager_ = nullptr;
    int64_t spite_percent_;
    int64_t starve_percent_;
    std::vector<int32_t> text_;  // prompts are prefixes of it, with other tokens from somewhere on
    std::vector<int64_t> handles_;
    std::vector<int64_t> closed_;
    std::deque<int64_t> steps_;
    std::vector<int64_t> loads_;
    std::vector<Pin> pins_;
    std::vector<kvc_keyed> keyed_;  // some that were seen
};

// `done`: of a batch, which leaves what was done before it fails.
template <typename Body>
int32_t ManagerFuzz::call(const char* function, Body&& body, const int64_t* done, bool halves) {
    where_.function = function;
    const bool compared = random_.chance(30);
    Readings before;
    if (compared) before = readings();
    bool starved = false;
    const int32_t status = starving(random_, starve_percent_, &starved, body);
    if (where_.trace) std::fprintf(stderr, "%lld %s: %d\n", static_cast<long long>(where_.operation), function, status);
    check_status(where_, status, starved);
    ++(*tally_)[function][status];
    if (status != KVC_OK && compared && !(done && *done) && !(halves && status == KVC_E_MEMORY)) {
        const std::string why = "status " + std::to_string(status) + " (" + kvc_last_error() + ")";
        expect_equal(where_, before, readings(), why);
    }
    return status;
}

template <typename Body>
int32_t ManagerFuzz::call_many(const char* function, int64_t n, int64_t* done, Body&& body, bool halves) {
    *done = 0;
    const int32_t status = call(function, body, done, halves);
    const bool all = *done == n;
    if (*done < 0 || *done > std::max<int64_t>(n, 0) || (status == KVC_OK ? !all : all && n))
        broken(where_, "status %d after %lld of %lld", status, static_cast<long long>(*done),
               static_cast<long long>(n));
    return status;
}

}  // namespace fuzz
