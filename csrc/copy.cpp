// Gather and scatter of pages between two host memories. Everything is validated before the first byte moves.
//
// A page-sized memcpy reads each destination line before it overwrites it, because libc switches to non-temporal stores
// only above about 3/4 of the last-level cache per call. Streaming stores save that read.
#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "error.h"
#include "vector_path.h"

namespace {

using kvc::fail;
using kvc::VectorPath;
using Longs = long long;

// ---- moving bytes ---------------------------------------------------------------------------------------------------

constexpr uint64_t kLine = 64;          // streaming stores write whole cache lines
constexpr uint64_t kBlock = 256;        // bytes per round of the loops below
constexpr uint64_t kStreamFrom = 1024;  // below, setting up costs more than the saved reads

#if defined(__x86_64__)

// Both: `to` on a cache line, any `from`.
[[gnu::target("avx512f")]] void stream_avx512(uint8_t* to, const uint8_t* from, uint64_t blocks) {
    for (; blocks; --blocks, to += kBlock, from += kBlock) {
        const __m512i a = _mm512_loadu_si512(from);
        const __m512i b = _mm512_loadu_si512(from + 64);
        const __m512i c = _mm512_loadu_si512(from + 128);
        const __m512i d = _mm512_loadu_si512(from + 192);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), a);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 64), b);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 128), c);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 192), d);
    }
}

[[gnu::target("avx2")]] void stream_avx2(uint8_t* to, const uint8_t* from, uint64_t blocks) {
    for (; blocks; --blocks, to += kBlock, from += kBlock) {
        __m256i part[8];
        for (int i = 0; i < 8; ++i) part[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i);
        for (int i = 0; i < 8; ++i) _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + i, part[i]);
    }
}

void stream_blocks(VectorPath path, uint8_t* to, const uint8_t* from, uint64_t blocks) {
    if (path == VectorPath::kAvx512) stream_avx512(to, from, blocks);
    else stream_avx2(to, from, blocks);
}

void fence() { _mm_sfence(); }

#else

void stream_blocks(VectorPath, uint8_t*, const uint8_t*, uint64_t) {}
void fence() {}

#endif

// Streams the whole cache lines of the destination, copies the ends as libc does. True: a fence is owed.
bool move(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    const VectorPath path = kvc::vector_path();
    if (path == VectorPath::kPortable || bytes < kStreamFrom) {
        std::memcpy(to, from, bytes);
        return false;
    }
    const uint64_t head = -std::bit_cast<uintptr_t>(to) % kLine;
    const uint64_t blocks = (bytes - head) / kBlock;
    const uint64_t done = head + blocks * kBlock;
    std::memcpy(to, from, head);
    stream_blocks(path, to + head, from + head, blocks);
    std::memcpy(to + done, from + done, bytes - done);
    return true;
}

// ---- validation -----------------------------------------------------------------------------------------------------

// One side of one segment: what it touches.
struct View {
    uint64_t base;
    int64_t stride, bytes, pages;
    const int32_t* ids;
    int32_t low, high;  // smallest and largest id used
    bool written;

    uint64_t at(int32_t id) const { return base + static_cast<uint64_t>(stride) * static_cast<uint64_t>(id); }
    uint64_t begin() const { return at(low); }
    uint64_t end() const { return at(high) + static_cast<uint64_t>(bytes); }
};

const char* side_name(const View& view) { return view.written ? "destination" : "source"; }

int32_t check_view(const View& view, int64_t segment, int64_t n_pairs) {
    const auto name = side_name(view);
    if (view.base == 0 || view.bytes < 1 || view.stride < view.bytes || view.pages < 1)
        return fail(
            KVC_E_ARGUMENT,
            "segment %lld, %s: base %#llx, %lld bytes, stride %lld, %lld pages: the base must not be NULL, bytes"
            " and pages above 0, the stride at least the bytes",
            static_cast<Longs>(segment), name, static_cast<Longs>(view.base), static_cast<Longs>(view.bytes),
            static_cast<Longs>(view.stride), static_cast<Longs>(view.pages));
    uint64_t last = 0, end = 0;
    if (__builtin_mul_overflow(static_cast<uint64_t>(view.stride), static_cast<uint64_t>(view.pages - 1), &last) ||
        __builtin_add_overflow(last, static_cast<uint64_t>(view.bytes), &end) ||
        __builtin_add_overflow(end, view.base, &end))
        return fail(KVC_E_ARGUMENT, "segment %lld, %s: %lld pages with a stride of %lld bytes pass the end of memory",
                    static_cast<Longs>(segment), name, static_cast<Longs>(view.pages), static_cast<Longs>(view.stride));
    if (view.low >= 0 && view.high < view.pages) return KVC_OK;
    for (int64_t i = 0; i < n_pairs; ++i)
        if (view.ids[i] < 0 || view.ids[i] >= view.pages)
            return fail(KVC_E_ARGUMENT, "segment %lld, pair %lld: %s page %d is outside 0 to %lld",
                        static_cast<Longs>(segment), static_cast<Longs>(i), name, view.ids[i],
                        static_cast<Longs>(view.pages - 1));
    return fail(KVC_E_INVARIANT, "segment %lld: page range without a page", static_cast<Longs>(segment));
}

// O(n) where the ids lie close together, as pages of one pool do; sorts otherwise.
int32_t check_distinct(const int32_t* ids, int64_t n, int32_t low, int32_t high) {
    const auto twice = [](int32_t id) {
        return fail(KVC_E_ARGUMENT, "destination page %d is named twice in one copy", id);
    };
    const int64_t range = int64_t{high} - low + 1;
    if (range <= 512 * n) {
        std::vector<uint64_t> seen(static_cast<size_t>((range + 63) / 64));
        for (int64_t i = 0; i < n; ++i) {
            const auto bit = static_cast<uint64_t>(ids[i] - low);
            const uint64_t mask = uint64_t{1} << (bit % 64);
            if (seen[bit / 64] & mask) return twice(ids[i]);
            seen[bit / 64] |= mask;
        }
        return KVC_OK;
    }
    std::vector<int32_t> sorted(ids, ids + n);
    std::sort(sorted.begin(), sorted.end());
    const auto found = std::adjacent_find(sorted.begin(), sorted.end());
    return found == sorted.end() ? KVC_OK : twice(*found);
}

// Do two views share no byte, whatever their ids? Apart as ranges; or interleaved, as layers in a page are.
bool surely_apart(const View& a, const View& b) {
    if (a.end() <= b.begin() || b.end() <= a.begin()) return true;
    if (a.stride != b.stride) return false;
    const auto stride = static_cast<uint64_t>(a.stride);
    const uint64_t offset =
        b.base >= a.base ? (b.base - a.base) % stride : (stride - (a.base - b.base) % stride) % stride;
    return offset >= static_cast<uint64_t>(a.bytes) && stride - offset >= static_cast<uint64_t>(b.bytes);
}

// Compares the byte ranges themselves. O(n log n) in segments * pairs; only where surely_apart could not tell.
int32_t check_apart_exactly(const std::vector<View>& views, int64_t n_pairs) {
    struct Range {
        uint64_t begin, end;
        bool written;
    };
    std::vector<Range> ranges;
    ranges.reserve(views.size() * static_cast<size_t>(n_pairs));
    for (const View& view : views)
        for (int64_t i = 0; i < n_pairs; ++i) {
            const uint64_t begin = view.at(view.ids[i]);
            ranges.push_back({begin, begin + static_cast<uint64_t>(view.bytes), view.written});
        }
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    uint64_t read_end = 0, write_end = 0;
    for (const Range& range : ranges) {
        if (range.begin < write_end || (range.written && range.begin < read_end))
            return fail(KVC_E_ARGUMENT,
                        "a destination range overlaps another range of the copy at address %#llx: every byte may be"
                        " written once, and not be read as well",
                        static_cast<Longs>(range.begin));
        (range.written ? write_end : read_end) = std::max(range.written ? write_end : read_end, range.end);
    }
    return KVC_OK;
}

int32_t check_apart(const std::vector<View>& views, int64_t n_pairs) {
    for (size_t i = 0; i < views.size(); ++i)
        for (size_t j = 0; j < i; ++j)
            if ((views[i].written || views[j].written) && !surely_apart(views[i], views[j]))
                return check_apart_exactly(views, n_pairs);
    return KVC_OK;
}

int32_t validate(const kvc_segment* segments, int64_t n_segments, const int32_t* src, const int32_t* dst,
                 int64_t n_pairs) {
    const auto [src_low, src_high] = std::minmax_element(src, src + n_pairs);
    const auto [dst_low, dst_high] = std::minmax_element(dst, dst + n_pairs);
    std::vector<View> views;
    for (int64_t s = 0; s < n_segments; ++s) {
        const kvc_segment& segment = segments[s];
        views.push_back(
            {segment.src_base, segment.src_stride, segment.bytes, segment.src_pages, src, *src_low, *src_high, false});
        if (const auto status = check_view(views.back(), s, n_pairs)) return status;
        views.push_back(
            {segment.dst_base, segment.dst_stride, segment.bytes, segment.dst_pages, dst, *dst_low, *dst_high, true});
        if (const auto status = check_view(views.back(), s, n_pairs)) return status;
    }
    if (const auto status = check_distinct(dst, n_pairs, *dst_low, *dst_high)) return status;
    return check_apart(views, n_pairs);
}

// ---- runs -----------------------------------------------------------------------------------------------------------

// Pairs from `first` on that are one range on both sides: ids rise, or fall, by one.
int64_t run_pairs(const int32_t* src, const int32_t* dst, int64_t first, int64_t n_pairs) {
    const int64_t second = first + 1;
    if (second == n_pairs) return 1;
    const int32_t step = src[second] - src[first];
    if (step != 1 && step != -1) return 1;
    int64_t i = second;
    while (i < n_pairs && src[i] - src[i - 1] == step && dst[i] - dst[i - 1] == step) ++i;
    return i - first;
}

bool copy_segment(const kvc_segment& segment, const int32_t* src, const int32_t* dst, int64_t n_pairs) {
    const auto address = [](uint64_t base, int64_t stride, int32_t a, int32_t b) {
        return base + static_cast<uint64_t>(stride) * static_cast<uint64_t>(std::min(a, b));
    };
    const bool packed = segment.src_stride == segment.bytes && segment.dst_stride == segment.bytes;
    bool streamed = false;
    for (int64_t first = 0; first < n_pairs;) {
        const int64_t run = packed ? run_pairs(src, dst, first, n_pairs) : 1;
        const int64_t last = first + run - 1;
        const uint64_t from = address(segment.src_base, segment.src_stride, src[first], src[last]);
        const uint64_t to = address(segment.dst_base, segment.dst_stride, dst[first], dst[last]);
        streamed |= move(std::bit_cast<uint8_t*>(to), std::bit_cast<const uint8_t*>(from),
                         static_cast<uint64_t>(segment.bytes * run));
        first += run;
    }
    return streamed;
}

}  // namespace

extern "C" {

const char* kvc_copy_path(void) {
    constexpr const char* kNames[] = {"memcpy", "avx2", "avx512"};
    return kNames[static_cast<int>(kvc::vector_path())];
}

int32_t kvc_copy(const kvc_segment* segments, int64_t n_segments, const int32_t* src, const int32_t* dst,
                 int64_t n_pairs) {
    return kvc::guarded([&]() -> int32_t {
        if (n_segments < 0 || n_pairs < 0)
            return fail(KVC_E_ARGUMENT, "%lld segments, %lld pairs: counts must not be negative",
                        static_cast<Longs>(n_segments), static_cast<Longs>(n_pairs));
        if (n_segments == 0 || n_pairs == 0) return KVC_OK;
        if (!segments || !src || !dst) return fail(KVC_E_ARGUMENT, "segments, src or dst is NULL");
        if (const auto status = validate(segments, n_segments, src, dst, n_pairs)) return status;
        bool streamed = false;
        for (int64_t s = 0; s < n_segments; ++s) streamed |= copy_segment(segments[s], src, dst, n_pairs);
        if (streamed) fence();
        return KVC_OK;
    });
}
}
