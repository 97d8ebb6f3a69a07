"""Faults in what gets which key, when it is found, and what is told of it."""

from __future__ import annotations

from mutate.mutant import Mutant

LAW = "tests/laws/test_law_"
TIERS = "tests/core/test_manager_tiers.py::"

REPLAYED = (
    "tests/events/test_manager_events.py"
    "::test_replayed_events_give_the_managers_keys_blocks_and_parents"
)

RUNS = (
    LAW + "16_events.py::test_law_16_neighbouring_blocks_are_told_as_one_event_and_a_gap_makes_two"
)
WEIGHTS = (
    LAW + "02_weights.py"
    "::test_law_02_after_a_change_of_weights_open_requests_find_and_leave_no_keys"
)
SPANS = (
    LAW + "10_spans.py"
    "::test_law_10_a_boundary_keeps_the_blocks_of_the_tokens_that_its_query_reads_and_no_others"
)

RESEND = (
    LAW + "06_resend.py::test_law_06_the_second_identical_request_hits_all_but_the_last_grid_unit"
)
DRAFT_WINDOWS = (
    LAW + "07_draft_windows.py"
    "::test_law_07_draft_windows_get_the_same_keys_however_late_their_tokens_are_told"
)

KEYS = [
    Mutant(
        "publish early: pending keys are found",
        "csrc/lookup.cpp",
        "if (blocks > before || sources & kPending)\n"
        "            blocks += arena_.run_length(group, run, r.ns, blocks, sources & kPending);",
        "blocks += arena_.run_length(group, run, r.ns, blocks, true);",
        (
            LAW + "11_publish.py"
            "::test_law_11_no_key_is_found_before_the_step_that_wrote_it_has_ended",
        ),
    ),
    Mutant(
        "publish early: keys are visible with commit",
        "csrc/steps.cpp",
        "upto / rules(g).block_tokens, Page::kPending);",
        "upto / rules(g).block_tokens, Page::kVisible);",
        (
            LAW + "11_publish.py"
            "::test_law_11_no_key_is_found_before_the_step_that_wrote_it_has_ended",
        ),
    ),
    Mutant(
        "a search ends only at a bucket that no key has passed",
        "csrc/key_index.h",
        "if (!bucket.passed || !--left) return kNoPage;",
        "if (!bucket.passed || (left > buckets_.size() && !--left)) return kNoPage;",
        ("tests/core/test_pool.py::test_a_search_ends_where_keys_have_passed_every_bucket",),
        ("crash", "hang"),
    ),
    Mutant(
        "pending keys of a run stay pending",
        "csrc/arena_keys.cpp",
        "            confirm(group, id);\n",
        "            continue;\n",
        (RESEND,),
    ),
    Mutant(
        "the last block of a run gets no key",
        "csrc/arena_keys.cpp",
        "    for (int64_t i = 0; i < run.count; ++i) {\n        const int32_t id = ids[i];\n",
        "    for (int64_t i = 0; i + 1 < run.count; ++i) {\n        const int32_t id = ids[i];\n",
        (RESEND,),
    ),
    Mutant(
        "blocks of a run end where they begin",
        "csrc/arena_keys.cpp",
        "publish(group, id, digest, ns, begin + (i + 1) * block_tokens, key, hash);",
        "publish(group, id, digest, ns, begin + i * block_tokens, key, hash);",
        (RUNS,),
    ),
    Mutant(
        "a page that is still being written is adopted where a tier has the block",
        "csrc/arena_keys.cpp",
        "ids[base + i] = id != kNoPage && pages[id].key == Page::kVisible ? id : kNoPage;",
        "ids[base + i] = id;",
        ("tests/laws/test_machine.py::TestManagerMachine",),
    ),
    Mutant(
        "a block of the hit that only a tier has is not loaded",
        "csrc/adopt.cpp",
        "if (!is_present(r, g, b)) return false;\n                ++adoption->loads;\n",
        "if (!is_present(r, g, b)) return false;\n",
        (LAW + "18_fences.py::test_law_18_pages_that_a_load_writes_are_handed_out_after_its_end",),
        ("KeyError",),  # no load was begun
    ),
    Mutant(
        "a draft window is settled before its last key is known",
        "csrc/keys.cpp",
        "const bool all = !g.draft() || block_key(",
        "const bool all = g.draft() || block_key(",
        (DRAFT_WINDOWS,),
    ),
    Mutant(
        "a draft window's keys become visible before the position that they are kept for",
        "csrc/keys.cpp",
        "if (all || visibility == Page::kPending) *done",
        "if (all) *done",
        (
            LAW + "07_draft_windows.py"
            "::test_law_07_blocks_of_a_kept_position_get_their_keys_when_it_is_reached",
        ),
    ),
    Mutant(
        "a hole of a draft gets a key",
        "csrc/keys.cpp",
        "table.holes.empty() ? 0 : table.holes.back() + 1",
        "table.holes.empty() ? 0 : table.holes.front()",
        (LAW + "03_soundness.py::test_law_03_what_a_draft_lacks_of_a_hit_gets_no_key_from_twins",),
    ),
    Mutant(
        "load published before its end",
        "csrc/loads.cpp",
        "arena_.publish(g, item.page, key, r.ns, item.end, Page::kPending);",
        "arena_.publish(g, item.page, key, r.ns, item.end, Page::kPending);\n"
        "            writer_ = &r;\n"
        "            arena_.confirm(g, item.page);\n"
        "            writer_ = nullptr;",
        (LAW + "18_fences.py::test_law_18_pages_that_a_load_writes_are_handed_out_after_its_end",),
        ("KeyError",),  # the bytes of a key that nobody has written
    ),
    Mutant(
        "orphaned pending key of an aborted request",
        "csrc/closing.cpp",
        "key == Page::kPending) arena_.unpublish(g, table.page(b));",
        "key == Page::kPending) continue;",
        (LAW + "11_publish.py::test_law_11_an_end_between_schedule_and_completion_leaves_no_key",),
    ),
    Mutant(
        "state keyed for the wrong token",
        "csrc/keys.cpp",
        "const Digest* key = digest_at(r, point.position);",
        "const Digest* key = digest_at(r, point.position - grid_);",
        (
            LAW + "03_soundness.py"
            "::test_law_03_what_a_hit_covers_was_written_for_exactly_that_prefix",
        ),
    ),
    Mutant(
        "window off by one",
        "csrc/group_rules.h",
        "position / chunk_tokens * chunk_tokens - lead_tokens, 0",
        "position / chunk_tokens * chunk_tokens - lead_tokens + 1, 0",
        (
            SPANS,
            LAW
            + "10_boundaries.py::test_law_10_with_what_is_kept_each_boundary_hits_and_without_one_key_some_do_not",
        ),
    ),
    Mutant(
        "window kept a token too long",
        "csrc/group_rules.h",
        "position / chunk_tokens * chunk_tokens - lead_tokens, 0",
        "position / chunk_tokens * chunk_tokens - lead_tokens - (lead_tokens > 0), 0",
        (SPANS,),
    ),
    Mutant(
        "block of a window taken for one that was seen",
        "csrc/lookup.cpp",
        "there = all ? std::min(there, (b + 1) * block) : INT64_MAX;",
        "there = all ? std::min(there, b * block) : INT64_MAX;",
        (LAW + "04_windows.py::test_law_04_the_hit_of_several_windows_equals_brute_force",),
    ),
    Mutant(
        "a tier's block of a window taken for one that no later position reads",
        "csrc/lookup.cpp",
        "(block + 1) * of.block_tokens + of.chunk_tokens + of.lead_tokens;",
        "(block + 1) * of.block_tokens;",
        (TIERS + "test_a_window_may_lie_in_the_arena_and_in_the_tier_by_parts",),
    ),
    Mutant(
        "a tier's state looked for a grid point too low",
        "csrc/lookup.cpp",
        "(last(g, position / grid_) + 1) * grid_",
        "last(g, position / grid_) * grid_",
        ("tests/laws/test_machine.py::TestManagerMachine",),
    ),
    Mutant(
        "what appeared above where a walk began taken for asked",
        "csrc/lookup.cpp",
        "again.known && !unasked ?",
        "again.known ?",
        (
            LAW + "07_polls.py"
            "::test_law_07_an_allocate_that_is_refused_hides_no_state_that_came_before_it",
        ),
    ),
    Mutant(
        "junction dropped",
        "csrc/lookup.cpp",
        "out->junction = !full_.empty() && pending.full > pending.hit ? pending.full : 0;",
        "out->junction = 0;",
        (
            LAW
            + "21_second_sighting.py::test_law_21_an_undeclared_one_hits_on_the_third_at_the_latest",
        ),
    ),
    Mutant(
        "end of turn not keyed",
        "csrc/closing.cpp",
        "if (i == newest) key_state(r, point, g, Page::kVisible);",
        "if (i == newest && false) key_state(r, point, g, Page::kVisible);",
        (
            LAW + "08_next_turn.py"
            "::test_law_08_the_next_turn_hits_all_that_the_last_one_computed_to_the_grid",
        ),
    ),
    Mutant(
        "preempted windows not keyed",
        "csrc/closing.cpp",
        "if (!loading && last) key_span(",
        "if (!loading && last < 0) key_span(",
        (LAW + "09_resume.py::test_law_09_a_resume_hits_at_least_the_last_completed_grid_point",),
    ),
    Mutant(
        "chunk-dependent stop: the last grid point of each grant is kept",
        "csrc/plan.cpp",
        "points.push_back({.position = last, .pages = {}, .frozen = true});",
        "points.push_back({.position = last, .pages = {}, .frozen = true, .wanted = state_set_});",
        (LAW + "07_chunks.py::test_law_07_the_keys_kept_do_not_depend_on_chunk_sizes",),
    ),
    Mutant(
        "interval counted from the chunk's start",
        "csrc/plan.cpp",
        "for (int64_t p = (start / interval + 1) * interval; p <= end; p += interval)",
        "for (int64_t p = start + interval; p <= end; p += interval)",
        (LAW + "07_chunks.py::test_law_07_the_keys_kept_do_not_depend_on_chunk_sizes",),
    ),
    Mutant(
        "hit of n instead of n - 1",
        "csrc/manager.h",
        "return std::max<int64_t>(r.n_tokens - 1, 0) / grid_ * grid_;",
        "return r.n_tokens / grid_ * grid_;",
        (LAW + "04_maximality.py::test_law_04_a_hit_equals_brute_force_over_device_and_tier",),
    ),
    Mutant(
        "draft vetoes a hit",
        "csrc/manager.cpp",
        "if (group.full() && group.votes()) full_.push_back(g);",
        "if (group.full()) full_.push_back(g);",
        (LAW + "04_maximality.py::test_law_04_a_hit_equals_brute_force_over_device_and_tier",),
    ),
    Mutant(
        "look-ahead left out of a draft's key",
        "csrc/open.cpp",
        "digest_at(r, (end + g.lookahead_tokens + unit_ - 1) / unit_ * unit_)",
        "digest_at(r, (end + unit_ - 1) / unit_ * unit_)",
        (
            LAW + "03_soundness.py"
            "::test_law_03_what_a_hit_covers_was_written_for_exactly_that_prefix",
        ),
    ),
    Mutant(
        "blocks of one hash unit share a key",
        "csrc/open.cpp",
        "    last ^= follow;\n",
        "",
        (
            LAW + "03_soundness.py"
            "::test_law_03_what_a_hit_covers_was_written_for_exactly_that_prefix",
        ),
    ),
    Mutant(
        "group ignored in a key",
        "csrc/manager.cpp",
        "*page = arena_.find(group, key, ns);",
        "*page = arena_.find(0, key, ns);",
        (LAW + "17_separation.py::test_law_17_a_key_of_one_group_is_none_of_another",),
    ),
    Mutant(
        "clearing one namespace clears another",
        "csrc/arena_keys.cpp",
        "forget_if([&](const Page& page) { return chosen.of(page.ns) > 0; });",
        "forget_if([&](const Page& page) { return chosen.of(page.ns) >= 0; });",
        (LAW + "02_index.py::test_law_02_clearing_one_salt_leaves_the_keys_of_others",),
    ),
    Mutant(
        "a request that ran through clear() leaves keys",
        "csrc/keys.cpp",
        "if (r.muted || r.retired) return end;",
        "if (r.retired) return end;",
        (
            LAW + "02_index.py"
            "::test_law_02_clear_forgets_every_key_and_what_runs_leaves_none_until_it_starts_anew",
        ),
    ),
    Mutant(
        "event for a block that has no key yet",
        "csrc/arena_keys.cpp",
        "        ++pending_;\n        return true;\n    }\n",
        "        ++pending_;\n    }\n",
        (
            LAW + "16_events.py"
            "::test_law_16_what_an_open_step_writes_is_told_when_the_step_has_ended",
        ),
        ("KeyError",),  # a key that nobody has written
    ),
    Mutant(
        "event for a masked block: runs go on over gaps",
        "csrc/events.cpp",
        "last.first_end + last.n_keys * rules(last.group).block_tokens == head.first_end && head.has_parent &&\n"
        "           std::equal(head.parent, head.parent + 32, run_keys_.end() - 32);",
        "last.first_end + last.n_keys * rules(last.group).block_tokens <= head.first_end;",
        (RUNS, REPLAYED),
    ),
    Mutant(
        "a request of other weights leaves keys",
        "csrc/keys.cpp",
        "if (r.muted || r.retired || target.key == Page::kVisible) return;",
        "if (r.muted || target.key == Page::kVisible) return;",
        (WEIGHTS,),
        ("KeyError",),  # a key of roots that nobody knows
    ),
    Mutant(
        "a request of other weights finds what a tier has of the old ones",
        "csrc/manager.h",
        "return r.retired ? 0 : hit_limit(r);",
        "return hit_limit(r);",
        (WEIGHTS,),
    ),
    Mutant(
        "a hit of other weights is loaded",
        "csrc/manager.cpp",
        "    r.looked_up = false;  // what it found is of the old root\n"
        "    r.hit = r.hit_left = 0;\n"
        "    r.present.clear();\n",
        "",
        (LAW + "02_weights.py::test_law_02_a_hit_in_a_tier_of_other_weights_is_not_loaded",),
    ),
    Mutant(
        "no event for what is evicted",
        "csrc/arena_keys.cpp",
        "    if (listener_) listener_->removed(group, page.digest, page.ns);\n",
        "",
        (
            LAW + "16_events.py"
            "::test_law_16_events_rebuild_the_keys_through_evictions_moves_and_clears",
        ),
    ),
    Mutant(
        "tokens lost to eviction are called new",
        "csrc/arena_keys.cpp",
        "    ghosts_.add(hash);\n",
        "",
        (
            LAW + "06_resend.py"
            "::test_law_06_under_eviction_every_token_lost_by_a_resend_is_reported_as_evicted",
        ),
    ),
    Mutant(
        "the deepest evicted block is called new",
        "csrc/arena_keys.cpp",
        "episode && episode >= since) return end - i;",
        "episode && episode >= since) return end - i - 1;",
        (
            LAW + "06_resend.py"
            "::test_law_06_under_eviction_every_token_lost_by_a_resend_is_reported_as_evicted",
        ),
    ),
]
