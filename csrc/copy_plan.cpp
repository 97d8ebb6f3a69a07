// The checks of `copy_plan.h`: every id in its bounds, no page written twice, no byte written that another pair uses.
#include "copy_plan.h"

#include <bit>
#include <vector>

#include "error.h"
#include "vector_path.h"

namespace kvc {

namespace {

using Longs = long long;

// ---- ids ------------------------------------------------------------------------------------------------------------

struct Ids {
    const int32_t* of;
    int64_t n;
    int32_t low, high;
    bool rising, falling;  // each above, or below, the one before
};

[[gnu::always_inline]] inline Ids scan_any(const int32_t* ids, int64_t n) {
    int32_t low = ids[0], high = ids[0], rises = 0, falls = 0, stays = 0;
    for (int64_t i = 1; i < n; ++i) {
        low = std::min(low, ids[i]), high = std::max(high, ids[i]);
        rises |= ids[i] > ids[i - 1];
        falls |= ids[i] < ids[i - 1];
        stays |= ids[i] == ids[i - 1];
    }
    return {ids, n, low, high, !falls && !stays, !rises && !stays};
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] Ids scan_avx2(const int32_t* ids, int64_t n) { return scan_any(ids, n); }
#else
constexpr auto scan_avx2 = scan_any;
#endif

Ids scan(const int32_t* ids, int64_t n) {
    return vector_path() == VectorPath::kPortable ? scan_any(ids, n) : scan_avx2(ids, n);
}

int32_t named_twice(const Ids& ids, int32_t id) {
    const int32_t* const first = std::find(ids.of, ids.of + ids.n, id);
    const int32_t* const second = std::find(first + 1, ids.of + ids.n, id);
    return fail(KVC_E_ARGUMENT, "destination page %d is named twice in one copy, by pairs %lld and %lld", id,
                static_cast<Longs>(first - ids.of), static_cast<Longs>(second - ids.of));
}

// A bit for each id where they lie close together, as pages of one pool do.
int32_t check_distinct_close(const Ids& ids, uint64_t range) {
    std::vector<uint64_t> seen((range + 63) / 64);
    for (int64_t i = 0; i < ids.n; ++i) {
        const auto bit = static_cast<uint64_t>(int64_t{ids.of[i]} - ids.low);
        const uint64_t mask = uint64_t{1} << (bit % 64);
        if (seen[bit / 64] & mask) return named_twice(ids, ids.of[i]);
        seen[bit / 64] |= mask;
    }
    return KVC_OK;
}

// A table of at least twice as many slots, linear probing; the multiplier is 2^32 over the golden ratio (Knuth, TAOCP 3, 6.4).
int32_t check_distinct_far(const Ids& ids) {
    const uint64_t slots = std::bit_ceil(2 * static_cast<uint64_t>(ids.n));
    const int shift = std::max(0, 32 - std::countr_zero(slots));
    std::vector<int32_t> table(slots, -1);
    for (int64_t i = 0; i < ids.n; ++i) {
        uint64_t slot = (static_cast<uint32_t>(ids.of[i]) * 2654435769U) >> shift;
        for (; table[slot] >= 0; slot = (slot + 1) % slots)
            if (table[slot] == ids.of[i]) return named_twice(ids, ids.of[i]);
        table[slot] = ids.of[i];
    }
    return KVC_OK;
}

// Ids are not below 0.
int32_t check_distinct(const Ids& ids) {
    if (ids.rising || ids.falling) return KVC_OK;
    const auto range = static_cast<uint64_t>(int64_t{ids.high} - ids.low + 1);
    return range <= 64 * static_cast<uint64_t>(ids.n) ? check_distinct_close(ids, range) : check_distinct_far(ids);
}

// ---- one side of one segment ----------------------------------------------------------------------------------------

struct View {
    uint64_t base;
    int64_t stride, bytes, pages;
    const Ids* ids;
    int64_t segment;
    bool written;

    uint64_t begin() const { return page_at(base, stride, ids->low); }
    uint64_t end() const { return page_at(base, stride, ids->high) + static_cast<uint64_t>(bytes); }
};

int32_t check_view(const View& view) {
    const char* const name = view.written ? "destination" : "source";
    const auto segment = static_cast<Longs>(view.segment);
    if (view.base == 0 || view.bytes < 1 || view.stride < view.bytes || view.pages < 1)
        return fail(
            KVC_E_ARGUMENT,
            "segment %lld, %s: base %#llx, %lld bytes, stride %lld, %lld pages: the base must not be NULL, bytes"
            " and pages above 0, the stride at least the bytes",
            segment, name, static_cast<Longs>(view.base), static_cast<Longs>(view.bytes),
            static_cast<Longs>(view.stride), static_cast<Longs>(view.pages));
    uint64_t last = 0, end = 0;
    if (__builtin_mul_overflow(static_cast<uint64_t>(view.stride), static_cast<uint64_t>(view.pages - 1), &last) ||
        __builtin_add_overflow(last, static_cast<uint64_t>(view.bytes), &end) ||
        __builtin_add_overflow(end, view.base, &end))
        return fail(KVC_E_ARGUMENT,
                    "segment %lld, %s: %lld pages with a stride of %lld bytes from %#llx pass the end of memory",
                    segment, name, static_cast<Longs>(view.pages), static_cast<Longs>(view.stride),
                    static_cast<Longs>(view.base));
    const Ids& ids = *view.ids;
    if (ids.low >= 0 && ids.high < view.pages) return KVC_OK;
    const auto outside = [&](int32_t id) { return id < 0 || id >= view.pages; };
    const int32_t* const found = std::find_if(ids.of, ids.of + ids.n, outside);
    return fail(KVC_E_ARGUMENT, "segment %lld, pair %lld: %s page %d is outside 0 to %lld", segment,
                static_cast<Longs>(found - ids.of), name, *found, static_cast<Longs>(view.pages - 1));
}

// ---- several --------------------------------------------------------------------------------------------------------

// Bytes that are read or written, from some origin.
struct Span {
    uint64_t begin, end;
    bool written;
    int64_t segment, pair;
};

// Two neighbours in memory of which one is written, and which share a byte; or nothing.
struct Clash {
    const Span *one = nullptr, *other = nullptr;
};

Clash find_clash(std::vector<Span>& spans) {
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    const Span *read = nullptr, *write = nullptr;  // that reach furthest
    for (const Span& span : spans) {
        if (write && span.begin < write->end) return {write, &span};
        if (span.written && read && span.begin < read->end) return {read, &span};
        const Span*& furthest = span.written ? write : read;
        if (!furthest || span.end > furthest->end) furthest = &span;
    }
    return {};
}

// Do these views share no byte, whatever their ids? So it is where they lie in one stride beside each other, as the layers of
// a page do. No answer is false.
bool surely_apart(const View* views, size_t n) {
    const auto stride = static_cast<uint64_t>(views[0].stride);
    const uint64_t origin = views[0].begin();  // of all the lowest
    std::vector<Span> spans;
    spans.reserve(n);
    for (const View* view = views; view < views + n; ++view) {
        if (static_cast<uint64_t>(view->stride) != stride) return false;
        const uint64_t offset = (view->begin() - origin) % stride;
        if (offset + static_cast<uint64_t>(view->bytes) > stride) return false;
        spans.push_back({offset, offset + static_cast<uint64_t>(view->bytes), view->written, view->segment, 0});
    }
    return !find_clash(spans).one;
}

int32_t check_exactly(const View* views, size_t n) {
    std::vector<Span> spans;
    spans.reserve(n * static_cast<size_t>(views[0].ids->n));
    for (const View* view = views; view < views + n; ++view)
        for (int64_t i = 0; i < view->ids->n; ++i) {
            const uint64_t begin = page_at(view->base, view->stride, view->ids->of[i]);
            spans.push_back({begin, begin + static_cast<uint64_t>(view->bytes), view->written, view->segment, i});
        }
    const auto [one, other] = find_clash(spans);
    if (!one) return KVC_OK;
    const auto verb = [](const Span* span) { return span->written ? "writes" : "reads"; };
    return fail(
        KVC_E_ARGUMENT,
        "segment %lld, pair %lld %s %#llx to %#llx, which overlaps another range of the copy: segment %lld, pair"
        " %lld %s %#llx to %#llx. What is written may be in no other range",
        static_cast<Longs>(other->segment), static_cast<Longs>(other->pair), verb(other),
        static_cast<Longs>(other->begin), static_cast<Longs>(other->end - 1), static_cast<Longs>(one->segment),
        static_cast<Longs>(one->pair), verb(one), static_cast<Longs>(one->begin), static_cast<Longs>(one->end - 1));
}

// Views in clusters that share no byte with each other; each cluster by itself.
int32_t check_apart(std::vector<View>& views) {
    std::sort(views.begin(), views.end(), [](const View& a, const View& b) { return a.begin() < b.begin(); });
    for (size_t first = 0, next; first < views.size(); first = next) {
        uint64_t end = views[first].end();
        bool written = views[first].written;
        for (next = first + 1; next < views.size() && views[next].begin() < end; ++next) {
            end = std::max(end, views[next].end());
            written |= views[next].written;
        }
        if (next - first == 1 || !written || surely_apart(&views[first], next - first)) continue;
        if (const auto status = check_exactly(&views[first], next - first)) return status;
    }
    return KVC_OK;
}

}  // namespace

int32_t check_plan(const kvc_copy_plan* plan) {
    if (!plan) return fail(KVC_E_ARGUMENT, "plan is NULL");
    const auto [segments, src, dst, n_segments, n_pairs] = *plan;
    if (n_segments < 0 || n_pairs < 0)
        return fail(KVC_E_ARGUMENT, "%lld segments, %lld pairs: counts must not be negative",
                    static_cast<Longs>(n_segments), static_cast<Longs>(n_pairs));
    if (n_segments == 0 || n_pairs == 0) return KVC_OK;
    if (!segments || !src || !dst)
        return fail(KVC_E_ARGUMENT, "%lld segments, %lld pairs: segments, src or dst is NULL",
                    static_cast<Longs>(n_segments), static_cast<Longs>(n_pairs));
    const Ids source = scan(src, n_pairs), target = scan(dst, n_pairs);
    std::vector<View> views;
    for (int64_t s = 0; s < n_segments; ++s) {
        const kvc_segment& part = segments[s];
        views.push_back({part.src_base, part.src_stride, part.bytes, part.src_pages, &source, s, false});
        if (const auto status = check_view(views.back())) return status;
        views.push_back({part.dst_base, part.dst_stride, part.bytes, part.dst_pages, &target, s, true});
        if (const auto status = check_view(views.back())) return status;
    }
    if (const auto status = check_distinct(target)) return status;
    return check_apart(views);
}

}  // namespace kvc
