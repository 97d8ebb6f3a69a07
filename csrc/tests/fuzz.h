// What the fuzzers share: random numbers, hostile values, failing allocations, reports that name the seed.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <map>
#include <string>

#include "kvcache_core.h"

namespace fuzz {

// splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint64_t next() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15ULL;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
        return z ^ (z >> 31);
    }
    // [0, n); 0 where n is 0 or below.
    int64_t below(int64_t n) { return n <= 0 ? 0 : static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
    int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
    bool chance(int64_t percent) { return below(100) < percent; }
    template <typename T>
    T one_of(std::initializer_list<T> values) {
        return *(values.begin() + below(static_cast<int64_t>(values.size())));
    }
    template <typename Container>
    const auto& in(const Container& values) {
        return *std::next(values.begin(), below(static_cast<int64_t>(values.size())));
    }

    // Small, odd, huge and negative numbers.
    int64_t hostile() {
        const int64_t edge = one_of<int64_t>(
            {0, 1, 127, 128, 255, 256, INT32_MAX, INT64_C(1) << 32, INT64_C(1) << 40, INT64_C(1) << 61, INT64_MAX});
        const int64_t near = static_cast<int64_t>(static_cast<uint64_t>(edge) + static_cast<uint64_t>(between(-2, 2)));
        return chance(50) ? near : static_cast<int64_t>(uint64_t{0} - static_cast<uint64_t>(near));
    }
    int32_t hostile32() { return static_cast<int32_t>(chance(50) ? hostile() : static_cast<int64_t>(next())); }

  private:
    uint64_t state_;
};

// Allocations of this thread that still succeed; below 0: all do. See allocations.cpp.
extern thread_local int64_t allocations_left;
extern thread_local int64_t failed_allocations;

// What is being done, for reports.
struct Where {
    uint64_t seed = 0;
    int64_t operation = 0;
    const char* function = "";
    bool trace = std::getenv("KVCACHE_FUZZ_TRACE") != nullptr;  // prints every call
};

[[noreturn, gnu::format(printf, 2, 3)]] inline void broken(const Where& where, const char* format, ...) {
    std::fprintf(stderr, "seed %llu, operation %lld, %s: ", static_cast<unsigned long long>(where.seed),
                 static_cast<long long>(where.operation), where.function);
    va_list args;
    va_start(args, format);
    std::vfprintf(stderr, format, args);
    va_end(args);
    std::fprintf(stderr, "\n");
    std::_Exit(1);
}

// How often each function gave each status.
using Tally = std::map<std::string, std::map<int32_t, int64_t>>;

// Any status of the header but KVC_E_INVARIANT is a right answer to a hostile call, with a text if it is an error.
inline void check_status(const Where& where, int32_t status, bool starved) {
    if (status == KVC_OK || status == KVC_NO_SPACE) return;
    const std::string text = kvc_last_error();
    if (status == KVC_E_INVARIANT || status < KVC_E_INVARIANT || status > KVC_NO_SPACE)
        broken(where, "status %d: %s", status, text.c_str());
    if (status == KVC_E_MEMORY && !starved) broken(where, "out of memory, but no allocation had failed");
    if (text.empty()) broken(where, "status %d without a text", status);
}

// Runs one call, with allocations that fail after a while now and then.
template <typename Body>
int32_t starving(Random& random, int64_t percent, bool* starved, Body&& body) {
    *starved = random.chance(percent);
    if (*starved) allocations_left = random.below(random.chance(50) ? 3 : 24);
    const int32_t status = body();
    allocations_left = -1;
    return status;
}

}  // namespace fuzz
