// What the manager knows of one request, one step, one load.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "arena.h"
#include "content.h"
#include "kvcache_core.h"

namespace kvc {

// Longest request, and largest interval: sums of a few of these stay far from overflow.
inline constexpr int64_t kMostTokens = int64_t{1} << 47;

inline constexpr int64_t kMostStops = int64_t{1} << 24;  // of one plan
inline constexpr int64_t kMostGenerations = INT32_MAX;   // of one slot: the upper half of a handle
inline constexpr int64_t kMostDrafts = 1024;             // of one grant

inline constexpr int32_t kHole = -2;  // a block of a hit that a draft group lacks

// Memory for so many more, growing by doubling.
template <typename List>
void make_room(List& list, size_t more) {
    if (list.size() + more > list.capacity()) list.reserve(std::max(list.size() + more, 2 * list.size()));
}

// A set of group ids.
using GroupSet = uint64_t;
inline bool has(GroupSet set, int32_t group) { return set >> group & 1; }

// A position that the policy keeps.
struct Kept {
    int64_t position = 0;
    GroupSet groups = 0;  // that keep what a lookup here reads
    bool declared = false;
};

// The state after `position` tokens: one page for each state group. Frozen: never written again.
struct Point {
    int64_t position = 0;
    std::vector<int32_t> pages;
    int64_t step = 0;     // the step that writes it; complete once that has ended
    bool frozen = false;  // a snapshot; otherwise the working state, updated in place
    GroupSet wanted = 0;  // state groups that get their key with the step, not only when the request ends
    bool declared = false;
};

// Blocks [first, first + pages.size()) of one group. What lies before `first` was given up. Blocks of transient groups may
// have no page: kNoPage.
struct Table {
    int64_t first = 0;
    std::vector<int32_t> pages;

    // How far the keys are. Full: blocks whose key was settled, and how many of them got none, as another page had it.
    int64_t keyed = 0;
    int64_t keyless = 0;
    // Span, in tokens: up to where what kept positions read has keys, pending or visible; ...
    int64_t pending = 0;
    int64_t confirmed = 0;  // ... none of them is pending any more;
    int64_t settled = 0;    // ... all are visible.

    std::vector<int64_t> holes;  // of a draft group: blocks of the hit without content

    int64_t end() const { return first + static_cast<int64_t>(pages.size()); }
    int32_t page(int64_t block) const { return pages[static_cast<size_t>(block - first)]; }
    int32_t& at(int64_t block) { return pages[static_cast<size_t>(block - first)]; }
    // Pages of the blocks from `begin` on; O(blocks).
    int64_t count(int64_t begin) const {
        const auto from = std::min(pages.begin() + (std::max(begin, first) - first), pages.end());
        return std::count_if(from, pages.end(), [](int32_t page) { return page != kNoPage; });
    }
};

// Blocks [first, end).
struct BlockRange {
    int64_t first;
    int64_t end;
};

enum class RequestState : int32_t { kWaiting = 0, kRunning = 1, kLoading = 2 };

// settle() has nothing to do before one of these is reached: nothing becomes whole. Zero: it was not done yet.
struct SettleAt {
    int64_t computed = 0;
    int64_t told = 0;    // computed and known
    int64_t tokens = 0;  // known
};

struct Request : Content {
    // First what every step reads, beside the end of the content: few cache lines of the many, from `handle` up to `muted`
    // (Manager::prefetch).
    int64_t max_tokens = 0;
    RequestState state = RequestState::kWaiting;
    int32_t blockage = 0;  // why the last allocate had no space: kvc_blockage

    // Progress: settled <= computed <= committed <= granted, in tokens.
    int64_t computed = 0;
    int64_t committed = 0;
    int64_t granted = 0;
    int64_t drafts = 0;     // the last tokens of the grant that are guesses: any of them may be left out by commit
    int64_t last_step = 0;  // the newest step that the request takes part in
    uint64_t run = 0;       // counts starts, so that a step's entry of an earlier run is told apart
    size_t entry = 0;       // its place in that step
    SettleAt settle_at;
    // Computed tokens with which a transient group may give up a block; INT64_MAX: with those above.
    int64_t unread_at = 0;

    // Of the current grant.
    bool plan_open = false;  // not committed yet: its pages are still the plan's own
    std::vector<Point> plan;
    std::vector<int32_t> plan_source;  // pages of the state at its start; empty: zero
    Point working;                     // pages empty: none

    bool muted = false;    // its namespace was cleared while it ran: it leaves no keys until it starts anew
    bool retired = false;  // its root is out of use: it finds no keys and leaves none
    uint64_t since = 0;    // evictions before this episode were of another root with the same number
    int64_t n_prompt = 0;
    int64_t load = 0;
    std::vector<int64_t> needs;     // slabs of each class that it has to be able to hold
    int64_t key_limit = INT64_MAX;  // foreign requests bring no keys for tokens beyond

    // Retention.
    std::vector<int64_t> intervals;  // per group, 0: none
    std::vector<Kept> kept;          // ascending: what the policy named

    // What lookups found, so that the next one does not start anew: a request that waits is asked for in every step.
    struct Resident {  // of a full group
        std::vector<int32_t> pages;
        uint64_t version = 0;
    };
    // No position in (hit, upto] had what the sparse groups read, when so many keys had appeared in them.
    struct Served {
        int64_t hit = 0;
        int64_t upto = -1;
        uint64_t appeared = 0;
    };
    struct Lost {  // tokens [begin, end)
        int64_t begin;
        int64_t end;
        int32_t cause;
    };
    struct Losses {
        std::array<int64_t, 6> of{};  // the walks and tokens that they belong to
        bool current = false;         // the request has held no pages since
        size_t n = 0;
        std::array<Lost, 8> regions{};  // ascending, of [hit, n_tokens)
        // What explain() asks later: the moment of the lookup, in ticks, in evicted pages and in their memory.
        uint64_t tick = 0;
        int64_t order = 0;  // of the newest request then
        int64_t evictions = 0;
        double evicted_slabs = 0;
        int32_t lacking = -1;  // group that had nothing for a hit where the full groups ended
        int64_t reached = 0;   // what it had computed itself, before it lost its pages
        bool cleared = false;  // ... and the keys of that were dropped
        bool retired = false;

        int64_t tokens() const { return of[0]; }
        int64_t hit() const { return of[2]; }
        int64_t full() const { return of[3]; }
        void lose(int32_t cause, int64_t begin, int64_t end) {
            if (n && regions[n - 1].cause == cause) regions[n - 1].end = end;
            else regions[n++] = {begin, end, cause};
        }
    };
    mutable std::vector<Resident> resident;  // per group
    // Visible keys; pending ones too; visible or evicted ones; the first two once more, beside a tier's map.
    mutable std::array<Served, 5> served;
    Losses losses;

    // The last lookup.
    bool looked_up = false;
    int64_t hit = 0;
    int64_t hit_left = 0;  // ... of it, when the arena had the version `hit_version`
    uint64_t hit_version = 0;
    std::vector<std::vector<uint8_t>> present;  // per group, empty: the tier has nothing

    // Pages.
    std::vector<Table> tables;  // per group; full, span, private
    std::vector<Point> points;  // frozen, ascending; the oldest may be an adopted cached state

    // Tokens that are computed and known: what may get keys.
    int64_t settled() const { return std::min({computed, n_tokens, key_limit}); }
    // With so many computed and known there is something for settle() to do.
    bool unsettled(int64_t computed, int64_t tokens) const {
        return computed >= settle_at.computed || std::min(computed, tokens) >= settle_at.told ||
               tokens >= settle_at.tokens;
    }
};

struct Release {
    int32_t group;
    int32_t page;
    Arena::List list;
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
    uint32_t ns = 0;
    bool muted = false;  // its namespace was cleared: its pages get no keys
    std::vector<kvc_keyed> items;
    std::vector<Digest> parents;  // of the items' blocks; all zero for the first
};

}  // namespace kvc
