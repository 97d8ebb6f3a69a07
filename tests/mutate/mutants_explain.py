"""Faults in why tokens were lost, and in what is remembered to tell it."""

from __future__ import annotations

from mutate.mutant import Mutant

CAUSES = "tests/explain/test_causes.py::"
HISTORY = "tests/explain/test_history.py::"
OFFLOAD = "tests/explain/test_offload.py::"

EXPLAIN = [
    Mutant(
        "nobody is told to have taken a page",
        "csrc/allocate.cpp",
        "    arena_.taken_by(r.handle, r.session);\n    try {\n",
        "    try {\n",
        (CAUSES + "test_an_eviction_is_told_with_who_took_the_pages_and_how_much_went_since",),
    ),
    Mutant(
        "evictions of another root with the same number count",
        "csrc/open.cpp",
        "at->second = {root, arena_.next_episode()};",
        "at->second = {root, 0};",
        (CAUSES + "test_a_number_of_a_namespace_that_has_another_root_now_has_nothing_evicted",),
    ),
    Mutant(
        "the other side of a difference shows the own tokens",
        "csrc/explain.cpp",
        "copy_tokens(other.content->tokens, at, other.content->n_tokens, loss->others)",
        "copy_tokens(r.tokens, at, r.losses.tokens(), loss->others)",
        (CAUSES + "test_the_first_token_that_differs_is_shown_with_its_neighbours",),
    ),
    Mutant(
        "requests that came after the lookup explain it",
        "csrc/siblings.cpp",
        "return other.order <= r.losses.order && other.handle != r.handle;",
        "return other.handle != r.handle;",
        (CAUSES + "test_a_request_that_came_later_explains_nothing",),
    ),
    Mutant(
        "what was computed since counts as having been there",
        "csrc/siblings.cpp",
        "content.started < content.ended && content.ended < tick;",
        "content.started < content.ended && content.ended != tick;",
        (CAUSES + "test_an_open_request_had_not_computed_it_when_this_one_was_looked_up",),
    ),
    Mutant(
        "a clear is taken for the end of a request",
        "csrc/explain.cpp",
        "if (other.cleared && other.cleared < tick)",
        "if (other.cleared > tick)",
        (CAUSES + "test_a_clear_drops_keys",),
    ),
    Mutant(
        "a conversation takes an entry for each turn",
        "csrc/history.cpp",
        "        drop(known);\n",
        "",
        (CAUSES + "test_a_conversation_is_remembered_by_its_last_turn",),
    ),
    Mutant(
        "the newest request is forgotten first",
        "csrc/history.cpp",
        "entries_kept_ > kMostEntries) drop(oldest_);",
        "entries_kept_ > kMostEntries) drop(newest_);",
        (HISTORY + "test_the_oldest_goes_first_when_there_are_more_tokens_than_allowed",),
    ),
    Mutant(
        "another image is taken for other tokens",
        "csrc/siblings.cpp",
        "if (extra < end && extra < at) return {Difference::kExtra, extra};",
        "if (extra < 0) return {Difference::kExtra, extra};",
        (CAUSES + "test_another_image_is_another_key_from_its_place_on",),
    ),
    Mutant(
        "other tokens at an image's place are taken for another image",
        "csrc/siblings.cpp",
        "if (extra < end && extra < at) return {Difference::kExtra, extra};",
        "if (extra < end && extra <= at) return {Difference::kExtra, extra};",
        (CAUSES + "test_other_tokens_from_an_image_on_are_other_tokens",),
    ),
    Mutant(
        "another image explains tokens that differ too",
        "csrc/explain.cpp",
        "add((equal + grid_ - 1) / grid_ * grid_, KVC_LOST_KEY",
        "add(differing.content->n_tokens / grid_ * grid_, KVC_LOST_KEY",
        (CAUSES + "test_another_image_explains_as_far_as_the_tokens_are_equal",),
    ),
    Mutant(
        "a second clear is taken for the first",
        "csrc/content.h",
        "if (!cleared) cleared = tick;",
        "cleared = tick;",
        (CAUSES + "test_a_second_clear_changes_no_explanation",),
    ),
    Mutant(
        "what a tier holds is not asked",
        "connectors/driver.py",
        "elsewhere=self._scheduler.holds(keys)",
        "elsewhere=None",
        (OFFLOAD + "test_a_load_that_cannot_be_made_is_told_as_the_reason",),
    ),
    Mutant(
        "a salt stands in the words",
        "kvcache/core/explain_words.py",
        'parts.append("the salt")',
        'parts.append(f"the salt {field.own}")',
        (CAUSES + "test_a_salt_is_not_put_into_words",),
    ),
]
