// Two managers that are asked the same: one runs out of memory at each allocation of each call before it may answer, the
// other never does.
//
// A call that runs out of memory changes nothing; at last it answers, and both answer, and are, the same. Events and keyed
// pages may be lost to it, and are then said to be lost: from there on the twins differ in these alone.
#pragma once

#include <array>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "event_index.h"
#include "fuzz.h"
#include "readings.h"

namespace fuzz {

class Twins {
  public:
    Twins(Where* where, const Setup& setup);
    ~Twins();
    Twins(const Twins&) = delete;
    Twins& operator=(const Twins&) = delete;

    // body(manager, &out) -> status, without an allocation of its own. What `out` holds at first goes in; it is plain data.
    template <typename Out, typename Body>
    int32_t ask(const char* function, Out* out, Body&& body);
    template <typename Body>
    int32_t ask(const char* function, Body&& body) {
        char nothing = 0;
        return ask(function, &nothing, [&](kvc_manager* manager, char*) { return body(manager); });
    }
    // A batch of n, beside single calls to the manager that never runs out. many(manager, first, &done) -> status asks for
    // the batch from `first` on, again and again where memory runs out: what was done before that stands. one(manager, i) ->
    // status. half(i): does to the healthy manager what was done of the i-th when memory ran out; false: nothing was.
    // *done: how many were served.
    template <typename Many, typename One, typename Half>
    int32_t ask_many(const char* function, int64_t n, int64_t* done, Many&& many, One&& one, Half&& half);
    template <typename Many, typename One>
    int32_t ask_many(const char* function, int64_t n, int64_t* done, Many&& many, One&& one) {
        return ask_many(function, n, done, many, one, [](int64_t) { return false; });
    }
    // All events that wait, replayed and compared.
    void read_events();
    kvc_manager* healthy() const { return healthy_; }
    kvc_manager* starving() const { return starving_; }
    std::array<kvc_manager*, 2> both() const { return {starving_, healthy_}; }

    std::vector<int64_t> handles;  // whose requests are compared
    std::vector<int64_t> loads;
    int64_t open_steps = 0;
    std::map<std::string, std::pair<int64_t, int64_t>> tally;  // per function: calls, refusals for want of memory

  private:
    Readings readings(kvc_manager* manager, bool journals) const {
        return read_all(manager, *setup_, handles, loads, journals);
    }
    void check(kvc_manager* manager) const;

    Where* where_;
    const Setup* setup_;
    kvc_manager* starving_ = nullptr;
    kvc_manager* healthy_ = nullptr;
    bool lossy_ = false;  // something was lost for want of memory
    EventIndex of_starving_, of_healthy_;
};

template <typename Out, typename Body>
int32_t Twins::ask(const char* function, Out* out, Body&& body) {
    static_assert(std::is_trivially_copyable_v<Out>);
    where_->function = function;
    auto& [calls, refusals] = tally[function];
    ++calls;
    const Out asked = *out;
    const Readings before = readings(starving_, true);
    int32_t status = KVC_E_MEMORY;
    for (int64_t granted = 0;; ++granted) {
        *out = asked;
        failed_allocations = 0;
        allocations_left = granted;
        status = body(starving_, out);
        allocations_left = -1;
        if (status != KVC_E_MEMORY) break;
        ++refusals;
        if (!failed_allocations) broken(*where_, "out of memory, but no allocation had failed");
        expect_equal(*where_, before, readings(starving_, true),
                     "out of memory at allocation " + std::to_string(granted));
        check(starving_);
    }
    lossy_ |= failed_allocations > 0;
    if (where_->trace)
        std::fprintf(stderr, "%lld %s: %d\n", static_cast<long long>(where_->operation), function, status);
    check_status(*where_, status, false);
    if (status < 0) expect_equal(*where_, before, readings(starving_, true), "status " + std::to_string(status));
    Out wanted = asked;
    const int32_t wanted_status = body(healthy_, &wanted);
    check(healthy_);  // a fault that has nothing to do with memory
    if (status != wanted_status) broken(*where_, "status %d, not %d", status, wanted_status);
    if (std::memcmp(out, &wanted, sizeof wanted))
        broken(*where_, "another answer than that of a manager that never ran out of memory");
    expect_equal(*where_, readings(healthy_, !lossy_), readings(starving_, !lossy_), "after running out of memory");
    check(starving_);
    return status;
}

template <typename Many, typename One, typename Half>
int32_t Twins::ask_many(const char* function, int64_t n, int64_t* done, Many&& many, One&& one, Half&& half) {
    where_->function = function;
    auto& [calls, refusals] = tally[function];
    ++calls;
    *done = 0;
    int32_t status = KVC_E_MEMORY;
    for (int64_t granted = 0; status == KVC_E_MEMORY; ++granted) {
        const Readings before = readings(starving_, true);
        int64_t more = -1;
        failed_allocations = 0;
        allocations_left = granted;
        status = many(starving_, *done, &more);
        allocations_left = -1;
        if (status == KVC_E_MEMORY && !failed_allocations)
            broken(*where_, "out of memory, but no allocation had failed");
        if (more < 0 || (status == KVC_OK) != (*done + more == n))
            broken(*where_, "status %d after %lld and %lld of %lld", status, static_cast<long long>(*done),
                   static_cast<long long>(more), static_cast<long long>(n));
        for (int64_t i = *done; i < *done + more; ++i)
            if (const int32_t single = one(healthy_, i)) broken(*where_, "a single call says %d", single);
        *done += more;
        refusals += status == KVC_E_MEMORY;
        lossy_ |= failed_allocations > 0 && (more > 0 || status == KVC_OK);
        const bool half_done = status == KVC_E_MEMORY && half(*done);
        if (!more && !half_done && status != KVC_OK && status != KVC_NO_SPACE)
            expect_equal(*where_, before, readings(starving_, true), "status " + std::to_string(status));
        if (status == KVC_E_MEMORY) {
            expect_equal(*where_, readings(healthy_, !lossy_), readings(starving_, !lossy_),
                         "in the middle of a batch");
            if (more) granted = -1;
        }
        check(starving_);
    }
    if (where_->trace)
        std::fprintf(stderr, "%lld %s: %d after %lld of %lld\n", static_cast<long long>(where_->operation), function,
                     status, static_cast<long long>(*done), static_cast<long long>(n));
    check_status(*where_, status, false);
    if (const int32_t wanted = *done < n ? one(healthy_, *done) : KVC_OK; status != wanted)
        broken(*where_, "status %d, not %d", status, wanted);
    check(healthy_);
    expect_equal(*where_, readings(healthy_, !lossy_), readings(starving_, !lossy_), "after a batch");
    return status;
}

}  // namespace fuzz
