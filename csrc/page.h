// What the arena knows of a page, and runs of keys as they lie in a chain of digests.
#pragma once

#include <cstdint>
#include <cstring>

#include "digest.h"

namespace kvc {

inline constexpr int32_t kNoPage = -1;

// What a page says of its key, in one word: it is written as a whole.
struct PageMarks {
    uint64_t end : 48 = 0;   // position after the block, or of the state
    uint64_t group : 6 = 0;  // of its key; stale without one
    uint64_t list : 2 = 0;   // 0: none, else 1 + List
    uint64_t hits : 3 = 0;   // adoptions, saturating
    uint64_t key : 2 = 0;    // Key
    uint64_t kept : 1 = 0;   // declared: keeps its place when superseded
    uint64_t rest : 2 = 0;   // only pins hold it: 1 + the List in which, by its age, its place is; else 0
};
static_assert(sizeof(PageMarks) == 8);

// One cache line, so that verifying a key costs one miss.
struct alignas(64) Page : PageMarks {
    uint64_t age : 48 = 0;   // clock at the last time it became cached
    uint64_t pins : 16 = 0;  // the part of refs that readers outside hold
    Digest digest{};
    uint32_t ns = 0;
    int32_t refs = 0;
    int32_t previous = kNoPage;  // in its list; with `rest`: when it was last there
    int32_t next = kNoPage;      // or the next free page of the slab
    enum Key : uint8_t { kNone, kPending, kVisible };
};
static_assert(sizeof(Page) == 64);

inline constexpr uint64_t kMostHits = 7;

// Every stride-th digest of a chain.
struct DigestRun {
    const uint8_t* first = nullptr;
    int64_t stride_bytes = 32;
    int64_t count = 0;

    Digest at(int64_t i) const {
        Digest digest;
        std::memcpy(digest.bytes, first + i * stride_bytes, 32);
        return digest;
    }
};

}  // namespace kvc
