// Moves byte ranges past the caches: non-temporal stores to whole cache lines.
//
//     range      | head |  lines ...                      | tail |     head and tail: copied as libc does
//     chunks            | 64 lines | 64 lines | 64 lines |
//     a batch    4 chunks side by side, two lines of each in turn, while the first lines of the next 4 are fetched
//
// That is the way of AVX-512. With AVX2 one range comes after the other, while lines ahead and the next range's first are fetched.
//
// A page-sized memcpy reads each line of the destination before it overwrites it, because libc goes past the caches only
// above about 3/4 of the last-level cache in one call. And one page at a time waits for memory at each start of a page:
// what the processor fetches ahead ends at a boundary of 4 KiB.
#pragma once

#include <cstdint>

#include "vector_path.h"

namespace kvc {

// Ranges smaller than this are stored through the caches (docs/copy.md has the measurement).
constexpr uint64_t kStreamFrom = 1024;

// One thread's. No allocation, no exception. Ranges that were given are moved by `finish` at the latest; no byte of a
// destination may be in another range.
class CopyStream {
  public:
    explicit CopyStream(VectorPath path) : path_(path) {}
    ~CopyStream() { finish(); }
    CopyStream(const CopyStream&) = delete;
    CopyStream& operator=(const CopyStream&) = delete;

    void move(uint8_t* to, const uint8_t* from, uint64_t bytes);
    // All is moved, and visible to threads that learn that this has returned.
    void finish();

    static constexpr uint64_t kLine = 64;
    static constexpr int kWays = 4;

    struct Chunk {
        uint8_t* to;  // on a line
        const uint8_t* from;
        uint64_t lines;
    };

  private:
    VectorPath path_;
    bool fence_owed_ = false;
    int waiting_ = 0;  // chunks that are not moved yet: the older batch, and what is there of the next; AVX2: one range
    Chunk chunks_[2 * kWays];
};

}  // namespace kvc
