"""Faults in copies of pages: what is merged, what is refused, what slices and chunks leave out."""

from __future__ import annotations

from mutate.mutant import Mutant

PLANS = "tests/core/test_copy_plans.py::test_"
COPIES = "tests/core/test_copy.py::test_"

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
        "chunks of odd length are moved to the next even line",
        "csrc/copy_stream.cpp",
        "together -= together % 2;",
        "together += together % 2;",
        (COPIES + "every_path_copies_the_same",),
    ),
    Mutant(
        "the last chunks are never moved",
        "csrc/copy_stream.cpp",
        "first < waiting_; first += kWays",
        "first + kWays < waiting_; first += kWays",
        (COPIES + "every_path_copies_the_same",),
    ),
]
