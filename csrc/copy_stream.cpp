// The loops of `copy_stream.h`.
#include "copy_stream.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvc {

namespace {

using Chunk = CopyStream::Chunk;
constexpr uint64_t kLine = CopyStream::kLine;
constexpr int kWays = CopyStream::kWays;
constexpr uint64_t kChunkLines = 64;  // what the processor fetches ahead by itself: up to the end of 4 KiB
constexpr uint64_t kFetchLines = 6;   // how many turns before its own a line is asked for, where it is
constexpr uint64_t kAheadLines = 4;   // fetched of a chunk before its turn; more displace what is used first

#if defined(__x86_64__)

// Each moves the chunks from line `first` to `end`, in turns of two lines each, or one where `end - first` is odd.

[[gnu::target("avx512f")]] void together_avx512(const Chunk* chunks, uint64_t lines) {
    for (uint64_t i = 0; i < lines * kLine; i += 2 * kLine) {
        __m512i part[kWays][2];
#pragma GCC unroll 4
        for (int way = 0; way < kWays; ++way) {
            part[way][0] = _mm512_loadu_si512(chunks[way].from + i);
            part[way][1] = _mm512_loadu_si512(chunks[way].from + i + kLine);
        }
#pragma GCC unroll 4
        for (int way = 0; way < kWays; ++way) {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(chunks[way].to + i), part[way][0]);
            _mm512_stream_si512(reinterpret_cast<__m512i*>(chunks[way].to + i + kLine), part[way][1]);
        }
    }
}

[[gnu::target("avx512f")]] void alone_avx512(const Chunk& chunk, uint64_t first) {
    for (uint64_t i = first * kLine; i < chunk.lines * kLine; i += kLine)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(chunk.to + i), _mm512_loadu_si512(chunk.from + i));
}

// Asks for each line a few turns before its own, also those of the next batch: processors without AVX-512 fetch too little by
// themselves (docs/copy.md has the measurement).
[[gnu::target("avx2")]] void together_avx2(const Chunk* chunks, const Chunk* next, uint64_t lines) {
    for (uint64_t line = 0; line < lines; ++line) {
        const uint64_t i = line * kLine, ahead = line + kFetchLines;
        __m256i part[kWays][2];
#pragma GCC unroll 4
        for (int way = 0; way < kWays; ++way) {
            const uint8_t* const wanted =
                ahead < lines ? chunks[way].from + ahead * kLine : next[way].from + (ahead - lines) * kLine;
            _mm_prefetch(reinterpret_cast<const char*>(wanted), _MM_HINT_NTA);
        }
#pragma GCC unroll 4
        for (int way = 0; way < kWays; ++way) {
            part[way][0] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(chunks[way].from + i));
            part[way][1] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(chunks[way].from + i + kLine / 2));
        }
#pragma GCC unroll 4
        for (int way = 0; way < kWays; ++way) {
            _mm256_stream_si256(reinterpret_cast<__m256i*>(chunks[way].to + i), part[way][0]);
            _mm256_stream_si256(reinterpret_cast<__m256i*>(chunks[way].to + i + kLine / 2), part[way][1]);
        }
    }
}

[[gnu::target("avx2")]] void alone_avx2(const Chunk& chunk, uint64_t first) {
    for (uint64_t i = first * kLine; i < chunk.lines * kLine; i += kLine) {
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(chunk.from + i));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(chunk.from + i + kLine / 2));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(chunk.to + i), a);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(chunk.to + i + kLine / 2), b);
    }
}

// next: the four that follow, or any others.
void move_batch(VectorPath path, const Chunk* chunks, int n, const Chunk* next) {
    uint64_t together = 0;  // lines that all have
    if (n == kWays) {
        together = chunks[0].lines;
        for (int way = 1; way < kWays; ++way) together = std::min(together, chunks[way].lines);
        together -= together % 2;
        if (path == VectorPath::kAvx512) together_avx512(chunks, together);
        else together_avx2(chunks, next, together);
    }
    const auto alone = path == VectorPath::kAvx512 ? alone_avx512 : alone_avx2;
    for (int way = 0; way < n; ++way)
        if (chunks[way].lines > together) alone(chunks[way], together);
}

void fetch_ahead(const uint8_t* from) {
    for (uint64_t i = 0; i < kAheadLines; ++i)
        _mm_prefetch(reinterpret_cast<const char*>(from + i * kLine), _MM_HINT_T0);
}

void fence() { _mm_sfence(); }

#else  // never reached: there is no vector path

void move_batch(VectorPath, const Chunk*, int, const Chunk*) {}
void fetch_ahead(const uint8_t*) {}
void fence() {}

#endif

}  // namespace

void CopyStream::move(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    if (path_ == VectorPath::kPortable || bytes < kStreamFrom) {
        std::memcpy(to, from, bytes);
        return;
    }
    const uint64_t head = -std::bit_cast<uintptr_t>(to) % kLine;
    const uint64_t lines = (bytes - head) / kLine;
    const uint64_t done = head + lines * kLine;
    std::memcpy(to, from, head);
    std::memcpy(to + done, from + done, bytes - done);
    to += head, from += head;
    const uint64_t chunks = (lines + kChunkLines - 1) / kChunkLines;
    const uint64_t each = (lines + chunks - 1) / chunks;
    for (uint64_t first = 0; first < lines; first += each) {
        if (path_ == VectorPath::kAvx512) fetch_ahead(from + first * kLine);
        chunks_[waiting_++] = {to + first * kLine, from + first * kLine, std::min(each, lines - first)};
        if (waiting_ < 2 * kWays) continue;
        move_batch(path_, chunks_, kWays, chunks_ + kWays);
        std::copy(chunks_ + kWays, chunks_ + 2 * kWays, chunks_);
        waiting_ = kWays;
    }
    fence_owed_ = true;
}

void CopyStream::finish() {
    for (int first = 0; first < waiting_; first += kWays)
        move_batch(path_, chunks_ + first, std::min(kWays, waiting_ - first), chunks_);
    waiting_ = 0;
    if (fence_owed_) fence();
    fence_owed_ = false;
}

}  // namespace kvc
