// What a request was made of, and how far it got: what explains the losses of others, and is left of it when it is closed.
#pragma once

#include <cstdint>
#include <vector>

#include "digest.h"

namespace kvc {

struct Media {
    int64_t offset;
    int64_t length;
    Digest digest;

    bool operator==(const Media&) const = default;
};

struct Content {
    int64_t order = 0;  // age: lower is older
    uint64_t session = 0;
    Digest root{};
    std::vector<Media> media;  // ascending

    // Ticks of the manager's own clock, which counts starts, ends and lookups; 0: never.
    uint64_t started = 0;  // was last given pages
    uint64_t ended = 0;    // last lost them
    uint64_t cleared = 0;  // its keys were first dropped since it started
    uint64_t closed = 0;   // 0: open
    bool aborted = false;
    int64_t closed_ns = 0;  // of the steady clock

    int64_t reached = 0;  // most tokens that were computed and known when it lost its pages

    // Last, beside what every step reads of an open request.
    int64_t handle = 0;
    uint32_t ns = 0;
    bool foreign = false;
    std::vector<Digest> digests;  // one link per hash unit
    std::vector<int32_t> tokens;  // empty for foreign keys
    int64_t n_tokens = 0;

    void clear_at(uint64_t tick) {
        if (!cleared) cleared = tick;
    }
    bool shares_root(const Content& other) const { return foreign == other.foreign && root == other.root; }
    // It held pages then: what it had computed was there.
    bool ran_at(uint64_t tick) const { return started && started < tick && (ended < started || ended > tick); }
};

}  // namespace kvc
