// What a copy plan is made of, walked in order, and what must hold before its first byte moves.
//
//     segment s       source  src_base + src_stride * page         destination  dst_base + dst_stride * page
//     pair i          page src[i]  ->  page dst[i]                  in every segment, `bytes` each
//     run             neighbouring pairs that are one range on both sides: both ids rise by one, or both fall by one,
//                     and the segment is packed (stride == bytes on both sides)
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvcache_core.h"

namespace kvc {

// KVC_OK, or KVC_E_ARGUMENT with a text that names the numbers. O(pairs + segments * log segments) where views of one
// memory have one stride, as layers of a page have; else O(n log n), n = segments * pairs.
int32_t check_plan(const kvc_copy_plan* plan);

// Pairs from `first` up to `end` that are one range on both sides.
inline int64_t run_length(const int32_t* src, const int32_t* dst, int64_t first, int64_t end) {
    int64_t i = first + 1;
    if (i == end) return 1;
    const int64_t step = int64_t{src[i]} - src[first];
    if ((step != 1 && step != -1) || int64_t{dst[i]} - dst[first] != step) return 1;
    for (++i; i < end && int64_t{src[i]} - src[i - 1] == step && int64_t{dst[i]} - dst[i - 1] == step;) ++i;
    return i - first;
}

inline bool is_packed(const kvc_segment& segment) {
    return segment.src_stride == segment.bytes && segment.dst_stride == segment.bytes;
}

inline uint64_t page_at(uint64_t base, int64_t stride, int32_t page) {
    return base + static_cast<uint64_t>(stride) * static_cast<uint64_t>(page);
}

// emit(kvc_range) for pairs `first` to `end` of a segment, runs merged.
template <typename Emit>
void for_each_range(const kvc_segment& segment, const int32_t* src, const int32_t* dst, int64_t first, int64_t end,
                    Emit&& emit) {
    const auto [src_base, dst_base, src_stride, dst_stride, bytes, src_pages, dst_pages] = segment;
    if (!is_packed(segment)) {
        for (int64_t i = first; i < end; ++i)
            emit(kvc_range{page_at(src_base, src_stride, src[i]), page_at(dst_base, dst_stride, dst[i]), bytes});
        return;
    }
    for (int64_t i = first; i < end;) {
        const int64_t run = run_length(src, dst, i, end);
        // The lowest page is the first of a run that rises, the last of one that falls.
        const int64_t lowest = run > 1 && src[i + 1] < src[i] ? i + run - 1 : i;
        emit(kvc_range{page_at(src_base, bytes, src[lowest]), page_at(dst_base, bytes, dst[lowest]), bytes * run});
        i += run;
    }
}

}  // namespace kvc
