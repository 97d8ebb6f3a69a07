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
constexpr uint64_t kAheadLines = 4;   // fetched of a chunk before its turn; more displace what is used first

#if defined(__x86_64__)

// With AVX2 (docs/copy.md has the measurements):
constexpr uint64_t kTurnLines = 4;    // of a range, moved at a time
constexpr uint64_t kFirstLines = 12;  // of the next range, asked for
constexpr uint64_t kLeftLines = 48;   // where so many are left of the one before

template <uint64_t Lines>
void fetch(const uint8_t* from) {
#pragma GCC unroll 16
    for (uint64_t i = 0; i < Lines; ++i) _mm_prefetch(reinterpret_cast<const char*>(from + i * kLine), _MM_HINT_T0);
}

// The chunks up to a line, in turns of two lines each.
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

[[gnu::target("avx2")]] void alone_avx2(const Chunk& chunk, uint64_t first) {
    for (uint64_t i = first * kLine; i < chunk.lines * kLine; i += kLine) {
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(chunk.from + i));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(chunk.from + i + kLine / 2));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(chunk.to + i), a);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(chunk.to + i + kLine / 2), b);
    }
}

// A range by itself; lines are asked for two turns before their own, and before its end the first ones of the next range, so
// that memory is not waited for at its beginning.
[[gnu::target("avx2")]] void run_avx2(const Chunk& range, const uint8_t* next) {
    const uint64_t whole = range.lines / kTurnLines * kTurnLines;
    const uint64_t last = whole > kLeftLines ? whole - kLeftLines : 0;  // then the next range's turn has come
    for (uint64_t line = 0; line < whole; line += kTurnLines) {
        const uint8_t* const from = range.from + line * kLine;
        if (line + 3 * kTurnLines <= range.lines) fetch<kTurnLines>(from + 2 * kTurnLines * kLine);
        if (line == last) fetch<kFirstLines>(next);
        __m256i part[2 * kTurnLines];
#pragma GCC unroll 8
        for (uint64_t i = 0; i < 2 * kTurnLines; ++i)
            part[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * kLine / 2));
#pragma GCC unroll 8
        for (uint64_t i = 0; i < 2 * kTurnLines; ++i)
            _mm256_stream_si256(reinterpret_cast<__m256i*>(range.to + line * kLine + i * kLine / 2), part[i]);
    }
    alone_avx2(range, whole);
}

void batch_avx512(const Chunk* chunks, int n) {
    uint64_t together = 0;  // lines that all have
    if (n == kWays) {
        together = chunks[0].lines;
        for (int way = 1; way < kWays; ++way) together = std::min(together, chunks[way].lines);
        together -= together % 2;
        together_avx512(chunks, together);
    }
    for (int way = 0; way < n; ++way)
        if (chunks[way].lines > together) alone_avx512(chunks[way], together);
}

void fence() { _mm_sfence(); }

#else  // never reached: there is no vector path

template <uint64_t Lines>
void fetch(const uint8_t*) {}
void run_avx2(const Chunk&, const uint8_t*) {}
void batch_avx512(const Chunk*, int) {}
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
    fence_owed_ = true;
    if (path_ == VectorPath::kAvx2) {
        if (waiting_) run_avx2(chunks_[0], from);
        chunks_[0] = {to, from, lines};
        waiting_ = 1;
        return;
    }
    const uint64_t chunks = (lines + kChunkLines - 1) / kChunkLines;
    const uint64_t each = (lines + chunks - 1) / chunks;
    for (uint64_t first = 0; first < lines; first += each) {
        fetch<kAheadLines>(from + first * kLine);
        chunks_[waiting_++] = {to + first * kLine, from + first * kLine, std::min(each, lines - first)};
        if (waiting_ < 2 * kWays) continue;
        batch_avx512(chunks_, kWays);
        std::copy(chunks_ + kWays, chunks_ + 2 * kWays, chunks_);
        waiting_ = kWays;
    }
}

void CopyStream::finish() {
    if (path_ == VectorPath::kAvx2) {
        if (waiting_) run_avx2(chunks_[0], chunks_[0].from);
    } else {
        for (int first = 0; first < waiting_; first += kWays)
            batch_avx512(chunks_ + first, std::min(kWays, waiting_ - first));
    }
    waiting_ = 0;
    if (fence_owed_) fence();
    fence_owed_ = false;
}

}  // namespace kvc
