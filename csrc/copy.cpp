// Copies of pages between host memories: a checked plan, cut into slices, moved by one thread or several.
#include "copy_plan.h"

#include <atomic>
#include <bit>
#include <vector>

#include "copy_stream.h"
#include "error.h"
#include "workers.h"

namespace {

using kvc::CopyStream;
using kvc::fail;
using kvc::VectorPath;
using Longs = long long;

constexpr uint64_t kSlice = uint64_t{1} << 20;  // of one thread at a time
// A copy that fits into the caches with its source leaves them warm for who reads it next (docs/copy.md).
constexpr uint64_t kStreamTotal = uint64_t{512} << 10;

class Copy {
  public:
    explicit Copy(const kvc_copy_plan& plan) : plan_(plan) {
        ends_.reserve(static_cast<size_t>(plan.n_segments));
        for (int64_t s = 0; s < plan.n_segments; ++s) {
            total_ += static_cast<uint64_t>(plan.segments[s].bytes) * static_cast<uint64_t>(plan.n_pairs);
            ends_.push_back(total_);
        }
        path_ = total_ < kStreamTotal ? VectorPath::kPortable : kvc::vector_path();
    }

    void run(int32_t threads) {
        kvc::work_together(kvc::threads_for(static_cast<int64_t>(total_) / kvc::kCopyThreadBytes, threads),
                           [this] { work(); });
    }

  private:
    void work() noexcept {
        CopyStream stream(path_);
        for (uint64_t slice = next_++; slice < (total_ + kSlice - 1) / kSlice; slice = next_++)
            move_slice(stream, slice * kSlice, std::min(total_, (slice + 1) * kSlice));
    }

    // Bytes `begin` to `end` of all, segment after segment, pair after pair.
    void move_slice(CopyStream& stream, uint64_t begin, uint64_t end) const {
        auto s = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
        for (; begin < end; begin = std::min(end, ends_[s]), ++s) {
            const uint64_t base = s ? ends_[s - 1] : 0;
            move_part(stream, plan_.segments[s], begin - base, std::min(end, ends_[s]) - base);
        }
    }

    // Bytes `begin` to `end` of a segment: the end of a page, whole pages, the beginning of one.
    void move_part(CopyStream& stream, const kvc_segment& segment, uint64_t begin, uint64_t end) const {
        const auto bytes = static_cast<uint64_t>(segment.bytes);
        const auto page_part = [&](uint64_t pair, uint64_t from, uint64_t to) {
            const auto i = static_cast<int64_t>(pair);
            kvc::for_each_range(segment, plan_.src, plan_.dst, i, i + 1, [&](const kvc_range& range) {
                stream.move(std::bit_cast<uint8_t*>(range.dst + from), std::bit_cast<const uint8_t*>(range.src + from),
                            to - from);
            });
        };
        uint64_t first = begin / bytes;
        const uint64_t last = end / bytes;
        if (first == last) return page_part(first, begin % bytes, end % bytes);
        if (begin % bytes) page_part(first++, begin % bytes, bytes);
        kvc::for_each_range(segment, plan_.src, plan_.dst, static_cast<int64_t>(first), static_cast<int64_t>(last),
                            [&](const kvc_range& range) {
                                stream.move(std::bit_cast<uint8_t*>(range.dst),
                                            std::bit_cast<const uint8_t*>(range.src),
                                            static_cast<uint64_t>(range.bytes));
                            });
        if (end % bytes) page_part(last, 0, end % bytes);
    }

    const kvc_copy_plan& plan_;
    std::vector<uint64_t> ends_;  // where each segment ends, of all bytes
    uint64_t total_ = 0;
    VectorPath path_ = VectorPath::kPortable;
    std::atomic<uint64_t> next_ = 0;
};

}  // namespace

extern "C" {

const char* kvc_copy_path(void) {
    constexpr const char* kNames[] = {"memcpy", "avx2", "avx512"};
    return kNames[static_cast<int>(kvc::vector_path())];
}

int32_t kvc_copy(const kvc_copy_plan* plan, int32_t threads) {
    return kvc::guarded([&]() -> int32_t {
        if (const auto status = kvc::check_threads(threads)) return status;
        if (const auto status = kvc::check_plan(plan)) return status;
        if (plan->n_segments && plan->n_pairs) Copy(*plan).run(threads);
        return KVC_OK;
    });
}

int32_t kvc_copy_ranges(const kvc_copy_plan* plan, kvc_range* ranges, int64_t cap, int64_t* n) {
    return kvc::guarded([&]() -> int32_t {
        if (!n || cap < 0 || (cap && !ranges))
            return fail(KVC_E_ARGUMENT, "room for %lld ranges: neither ranges nor n may be NULL, cap not below 0",
                        static_cast<Longs>(cap));
        if (const auto status = kvc::check_plan(plan)) return status;
        const int64_t most = plan->n_segments * plan->n_pairs;
        int64_t found = 0;
        // Where all that can come has room, none is asked whether it has.
        const auto list = [&](const auto& emit_all) {
            if (most <= cap) emit_all([&](const kvc_range& range) { ranges[found++] = range; });
            else
                emit_all([&](const kvc_range& range) {
                    if (found < cap) ranges[found] = range;
                    ++found;
                });
        };
        // The runs of pages are the same in all packed segments.
        std::vector<kvc_range> runs;
        list([&](const auto& emit) {
            for (int64_t s = 0; s < plan->n_segments && plan->n_pairs; ++s) {
                const kvc_segment& segment = plan->segments[s];
                if (plan->n_segments == 1 || !kvc::is_packed(segment)) {
                    kvc::for_each_range(segment, plan->src, plan->dst, 0, plan->n_pairs, emit);
                    continue;
                }
                if (runs.empty()) {
                    runs.reserve(static_cast<size_t>(plan->n_pairs));
                    kvc::for_each_range(kvc_segment{0, 0, 1, 1, 1, 0, 0}, plan->src, plan->dst, 0, plan->n_pairs,
                                        [&](const kvc_range& run) { runs.push_back(run); });
                }
                const auto [src_base, dst_base, src_stride, dst_stride, bytes, src_pages, dst_pages] = segment;
                const auto each = static_cast<uint64_t>(bytes);
                for (const auto& [src, dst, pages] : runs)
                    emit({src_base + src * each, dst_base + dst * each, pages * bytes});
            }
        });
        *n = found;
        return KVC_OK;
    });
}
}
