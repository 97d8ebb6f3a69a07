"""Faults in copies of pages, what is merged, refused, left out; and in attention over pages."""

from __future__ import annotations

from mutate.mutant import Mutant

PLANS = "tests/core/test_copy_plans.py::test_"
COPIES = "tests/core/test_copy.py::test_"
ATTENTION = "tests/core/test_attention.py::test_"

COPY = [
    Mutant(
        "runs whose ids fall are not merged",
        "csrc/copy_plan.h",
        "(step != 1 && step != -1)",
        "step != 1",
        (PLANS + "moves_of_packed_segments_are_runs_merged",),
    ),
    Mutant(
        "a run that falls begins at its first page",
        "csrc/copy_plan.h",
        "? i + run - 1 : i;",
        "? i : i;",
        (PLANS + "moves_of_packed_segments_are_runs_merged",),
    ),
    Mutant(
        "pages with gaps are merged",
        "csrc/copy_plan.h",
        "return segment.src_stride == segment.bytes && segment.dst_stride == segment.bytes;",
        "return segment.src_stride == segment.bytes;",
        (PLANS + "pages_with_gaps_are_moved_one_by_one",),
    ),
    Mutant(
        "a page named twice in a row passes for rising",
        "csrc/copy_plan.cpp",
        "!falls && !stays",
        "!falls",
        (COPIES + "bad_input_is_named_and_copies_nothing",),
    ),
    Mutant(
        "a segment may reach into the next page",
        "csrc/copy_plan.cpp",
        "if (offset + static_cast<uint64_t>(view->bytes) > stride) return false;",
        "",
        (COPIES + "a_segment_that_reaches_into_the_next_page_is_refused",),
    ),
    Mutant(
        "the end of a page that a slice begins in is left out",
        "csrc/copy.cpp",
        "if (begin % bytes) page_part(first++, begin % bytes, bytes);",
        "if (begin % bytes) first++;",
        (PLANS + "threads_share_a_copy_of_layers_and_slots",),
    ),
    Mutant(
        "the line after the last whole turn is left out",
        "csrc/copy_stream.cpp",
        "    alone_avx2(range, whole);",
        "    alone_avx2(range, whole + 1);",
        (COPIES + "every_path_copies_the_same",),
    ),
    Mutant(
        "the last range is never moved",
        "csrc/copy_stream.cpp",
        "if (waiting_) run_avx2(chunks_[0], chunks_[0].from);",
        "if (waiting_ > 1) run_avx2(chunks_[0], chunks_[0].from);",
        (COPIES + "every_path_copies_the_same",),
    ),
    Mutant(
        "splits of a context weigh alike, whatever their highest score",
        "csrc/attention.cpp",
        "const float rescale = std::exp(split[dim + 1] - highest);",
        "const float rescale = 1;",
        (ATTENTION + "a_long_context_is_merged_from_its_splits_whatever_the_threads",),
    ),
    Mutant(
        "a higher score leaves the weight of earlier pages as it was",
        "csrc/attention.cpp",
        "found[dim] = found[dim] * rescale + weight;",
        "found[dim] = found[dim] + weight;",
        (ATTENTION + "rows_see_what_numpy_sees",),
    ),
    Mutant(
        "a row sees its last block whole",
        "csrc/attention.cpp",
        "const int64_t next = std::min(split.end, (first / block + 1) * block);",
        "const int64_t next = (first / block + 1) * block;",
        (ATTENTION + "what_lies_past_the_end_of_a_row_is_not_read",),
    ),
    Mutant(
        "the page of a row's last block is taken on trust",
        "csrc/attention.cpp",
        "i <= (end - 1) / d->block_tokens; ++i",
        "i < (end - 1) / d->block_tokens; ++i",
        (ATTENTION + "bad_input_is_named",),
    ),
    Mutant(
        "two threads take one split",
        "csrc/attention.cpp",
        "for (size_t i = next_++; i < splits_.size(); i = next_++)",
        "for (size_t i = next_++; i < splits_.size(); i = next_++, next_++)",
        (ATTENTION + "a_long_context_is_merged_from_its_splits_whatever_the_threads",),
    ),
    Mutant(
        "every query head reads the first KV head",
        "csrc/attention.cpp",
        "const float* const key = keys + k * dim;",
        "const float* const key = keys;",
        (ATTENTION + "rows_see_what_numpy_sees",),
    ),
    Mutant(
        "a row that begins inside a block sees it from its first token",
        "csrc/attention.cpp",
        "page(first) + first % block * token_floats",
        "page(first)",
        (ATTENTION + "rows_see_what_numpy_sees",),
    ),
    Mutant(
        "a decoding request with a window sees all that its blocks hold",
        "kvcache/engine/batch.py",
        "np.zeros_like(end) if window is None else np.maximum(end - window, 0)",
        "np.zeros_like(end)",
        (
            "tests/engine/test_model.py::test_decoding_in_pages_computes_what_padded_dense_decoding_computes",
        ),
    ),
]
