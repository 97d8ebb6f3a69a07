// What the manager knows of one request, one step, one load.
#pragma once

#include <cstdint>
#include <vector>

#include "kvcache_core.h"
#include "pool.h"

namespace kvc {

// Longest request, and largest interval: sums of a few of these stay far from overflow.
inline constexpr int64_t kMostTokens = int64_t{1} << 48;

// The state after `position` tokens: one page for each recurrent group. Frozen: never written again.
struct Point {
    int64_t position = 0;
    std::vector<int32_t> pages;
    int64_t step = 0;     // the step that writes it; complete once that has ended
    bool frozen = false;  // a snapshot; otherwise the working state, updated in place
    bool policy = false;  // the policy wants it: gets its key with its step, not only when the request ends
    bool kept = false;
};

struct Retained {
    int64_t position;
    bool kept;
};

enum class RequestState : int32_t { kWaiting = 0, kRunning = 1, kLoading = 2 };

struct Request {
    int64_t handle = 0;
    RequestState state = RequestState::kWaiting;

    // Content.
    uint32_t ns = 0;
    Digest root{};
    std::vector<int32_t> tokens;  // empty for foreign keys
    std::vector<Digest> digests;  // one link per hash unit
    int64_t n_tokens = 0;
    int64_t n_prompt = 0;
    int64_t max_tokens = 0;

    // Retention.
    int64_t interval = 0;
    std::vector<Retained> retained;  // ascending

    // The last lookup.
    bool looked_up = false;
    int64_t hit = 0;
    uint64_t hit_version = 0;
    std::vector<std::vector<uint8_t>> present;  // per group, empty: the tier has nothing

    // Progress: computed <= committed <= granted, in tokens.
    int64_t computed = 0;
    int64_t committed = 0;
    int64_t granted = 0;
    int64_t last_step = 0;  // the newest step that the request takes part in
    uint64_t run = 0;       // counts starts, so that a step's entry of an earlier run is told apart
    int64_t load = 0;

    // Pages.
    std::vector<std::vector<int32_t>> tables;  // per group; attention only
    std::vector<int64_t> keyed_blocks;         // per group: blocks whose key was settled
    std::vector<Point> points;                 // frozen, ascending; the oldest may be an adopted cached state
    Point working;                             // pages empty: none
    std::vector<Point> plan;                   // of the current grant
    std::vector<int32_t> plan_source;          // pages of the state at the grant's start; empty: zero
    bool plan_open = false;                    // not committed yet: its pages are still the plan's own
};

struct Release {
    int32_t group;
    int32_t page;
    Pool::List list;
};

struct Step {
    struct Entry {
        int64_t handle;
        uint64_t run;
        int64_t upto;
    };
    int64_t id = 0;
    std::vector<Entry> entries;
    std::vector<Release> releases;  // in the order in which they were freed
};

struct Load {
    int64_t handle = 0;  // 0: the request does not wait for it any more
    std::vector<kvc_keyed> items;
};

}  // namespace kvc
