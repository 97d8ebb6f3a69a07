"""Faults in who holds which page, what goes first, and who may take the last one."""

from __future__ import annotations

from mutate.mutant import Mutant

LAW = "tests/laws/test_law_"
PROGRESS = LAW + "12_progress.py::"
ORDER = LAW + "14_order.py::"
STATES = "tests/core/test_manager_states.py::"
MOVES = LAW + "16_events.py::test_law_16_events_rebuild_the_keys_through_evictions_moves_and_clears"
BYTE_LRU = (
    "tests/bench/test_byte_lru.py::test_with_pages_of_one_size_the_manager_hits_as_the_oracle_does"
)
SPREAD_THIN = (
    PROGRESS + "test_law_12_a_request_that_was_spread_thin_before_it_became_the_oldest_completes"
)
WAITS = PROGRESS + "test_law_12_while_the_oldest_waits_nobody_else_gets_a_page"
CROWD = PROGRESS + "test_law_12_what_is_admitted_completes_in_every_geometry"
FIRST_OUT = (
    ORDER
    + "test_law_14_superseded_first_then_tail_before_head_and_what_serves_it_before_the_prefix"
)

PASSED = (
    LAW + "14_declared.py"
    "::test_law_14_a_running_request_passes_what_it_declared_in_order_and_the_rest_goes_first"
)
PASSED_BY_OTHERS = (
    LAW + "14_declared.py"
    "::test_law_14_what_others_declared_keeps_its_place_when_a_request_hits_and_passes_it"
)
PINS = LAW + "14_pins.py::test_law_14_pins_do_not_change_what_goes_when"
GUESSES = (
    LAW + "18_guesses.py"
    "::test_law_18_pages_of_wrong_guesses_are_handed_out_after_the_step_that_may_write_them"
)
REPLACED = (
    LAW + "18_guesses.py"
    "::test_law_18_pages_of_a_replaced_grant_are_handed_out_after_the_steps_that_may_compute_it"
)
TRANSIENT = "tests/core/test_manager_transient.py::"
SHORT_WAY = "tests/core/test_decode_steps.py::test_the_short_way_leaves_what_the_long_way_leaves"
TWINS = LAW + "14_twins.py::test_law_14_of_twins_the_tail_goes_before_the_head_whoever_leaves_last"

MEMORY = [
    Mutant(
        "a run is given back over a page that others hold",
        "csrc/arena.cpp",
        "if (page.refs != 1 || page.key != Page::kVisible) break;",
        "if (page.key != Page::kVisible) break;",
        (CROWD,),
    ),
    Mutant(
        "a run is given back with pages that nothing finds",
        "csrc/arena.cpp",
        "if (page.refs != 1 || page.key != Page::kVisible) break;",
        "if (page.refs != 1) break;",
        (LAW + "01_conservation.py::test_law_01_pages_are_conserved_however_requests_end",),
    ),
    Mutant(
        "lost reference: a hit is adopted without one",
        "csrc/arena.cpp",
        "    ++page.refs;\n",
        "    page.refs = 1;\n",
        ("tests/laws/test_machine.py::TestManagerMachine",),
    ),
    Mutant(
        "lost page: the working state is not given back",
        "csrc/closing.cpp",
        "    unkeyed(r.working);\n",
        "",
        (LAW + "01_conservation.py::test_law_01_pages_are_conserved_however_requests_end",),
    ),
    Mutant(
        "fresh hit evicted: it counts as space",
        "csrc/grant.cpp",
        "    for (int32_t g = 0; adoption && g < n_groups_; ++g) "
        "arena_.adopt_run(g, adoption->pages[static_cast<size_t>(g)]);\n"
        "    if (oldest) each_adopted([&](int32_t g, int32_t page) { arena_.mine(g, page, +1); });\n"
        "    const auto pages = std::span(demand.classes).first(pages_per_slab_.size());\n"
        "    try {\n"
        "        if (oldest ? arena_.secure_mine(pages) : arena_.secure(pages)) {\n",
        "    const auto pages = std::span(demand.classes).first(pages_per_slab_.size());\n"
        "    try {\n"
        "        if (oldest ? arena_.secure_mine(pages) : arena_.secure(pages)) {\n"
        "            each_adopted([&](int32_t g, int32_t page) { arena_.adopt(g, page); });\n"
        "            if (oldest) each_adopted([&](int32_t g, int32_t page) { arena_.mine(g, page, +1); });\n",
        (LAW + "19_fresh_hits.py::test_law_19_what_a_lookup_found_is_what_the_grant_after_it_has",),
    ),
    Mutant(
        "fence skipped",
        "csrc/closing.cpp",
        "if (Step* step = fence_of(r)) step->releases.push_back({group, page, list});",
        "if (Step* step = open_step(0)) step->releases.push_back({group, page, list});",
        (
            LAW + "18_fences.py"
            "::test_law_18_pages_of_open_steps_are_handed_out_after_the_last_of_them",
        ),
    ),
    Mutant(
        "pages of a load handed out before its end",
        "csrc/loads.cpp",
        "            arena_.acquire(g, item.page);\n",
        "",
        (LAW + "18_fences.py::test_law_18_pages_that_a_load_writes_are_handed_out_after_its_end",),
    ),
    Mutant(
        "pinned page handed out",
        "csrc/arena.cpp",
        "    acquire(group, id);\n    page.pins = page.pins + 1u;\n",
        "    page.pins = page.pins + 1u;\n",
        (
            LAW + "18_fences.py"
            "::test_law_18_a_pinned_page_stays_where_it_is_until_its_reader_is_done",
        ),
    ),
    Mutant(
        "head before tail",
        "csrc/closing.cpp",
        "    if (!step) return arena_.release_run(group, pages, list);\n",
        "    if (!step) {\n"
        "        for (const int32_t page : pages) arena_.release(group, page, list);\n"
        "        return;\n"
        "    }\n",
        (FIRST_OUT,),
    ),
    Mutant(
        "head before tail in a run",
        "csrc/arena.cpp",
        "const int32_t id = ids[i - 1];",
        "const int32_t id = ids[ids.size() - i];",
        (FIRST_OUT,),
    ),
    Mutant(
        "head before tail under an open step",
        "csrc/closing.cpp",
        "    for (size_t i = pages.size(); i-- > 0;) step->releases",
        "    for (size_t i = 0; i < pages.size(); ++i) step->releases",
        (ORDER + "test_law_14_pages_freed_under_an_open_step_go_in_the_same_order_as_at_once",),
    ),
    Mutant(
        "a run of blocks goes past the state that they serve",
        "csrc/closing.cpp",
        "        if (next < filed_.size()) others = std::max(others, filed_[next].position);\n",
        "",
        (FIRST_OUT,),
    ),
    Mutant(
        "a twin's copies never get the key",
        "csrc/closing.cpp",
        "    if (!loading) key_twins(r);\n",
        "",
        (TWINS,),
    ),
    Mutant(
        "a twin's copies that were loaded never get the key",
        "csrc/loads.cpp",
        "if (r && !keyed && rules(item.group).full())",
        "if (r && !keyed && rules(item.group).state())",
        (
            LAW + "14_twins.py"
            "::test_law_14_of_twins_of_which_one_loads_what_the_other_computes_the_tail_goes_first",
        ),
    ),
    Mutant(
        "a twin's windows never get the key",
        "csrc/closing.cpp",
        "int64_t none = 0;",
        "int64_t none = r.tables[static_cast<size_t>(g)].settled;",
        (TWINS,),
    ),
    Mutant(
        "a window goes before the tail beyond it",
        "csrc/closing.cpp",
        "filed_.push_back({end, {g, page, Arena::kLru}});",
        "filed_.push_back({std::max(last, end), {g, page, Arena::kLru}});",
        (LAW + "14_order.py::test_law_14_holds_for_histories_that_share_heads",),
    ),
    Mutant(
        "a token that needs no page gets one",
        "csrc/allocate.cpp",
        "(end > at + 1 || unpaged_tokens_)",
        "(end > at + 1)",
        (TRANSIENT + "test_of_blocks_of_one_token_a_decode_step_takes_what_need_tells",),
    ),
    Mutant(
        "a decode step goes past a grid point in the state that it has",
        "csrc/allocate.cpp",
        "end / grid_ != at / grid_ || ",
        "",
        (SHORT_WAY,),
    ),
    Mutant(
        "a decode step of the oldest request takes pages of its quota as any other",
        "csrc/allocate.cpp",
        "if (!(oldest ? arena_.secure_mine(wanted) : arena_.secure(wanted))) return false;",
        "if (!arena_.secure(wanted)) return false;",
        (CROWD,),
    ),
    Mutant(
        "a block that only tokens read stays until the next grid point",
        "csrc/steps.cpp",
        "        else if (r->computed >= r->unread_at) settle_unread(*r);\n",
        "",
        (TRANSIENT + "test_a_decoding_request_holds_the_last_grid_point_s_block_and_two_more",),
    ),
    Mutant(
        "blocks of a window count as confirmed while they wait for a position",
        "csrc/keys.cpp",
        "        if (table.pending > r.settled()) continue;  // they wait for a position to come\n",
        "",
        (SHORT_WAY,),
    ),
    Mutant(
        "state outlives the prefix that it needs",
        "csrc/closing.cpp",
        "[](const Filed& a, const Filed& b) { return a.position > b.position; });",
        "[](const Filed& a, const Filed& b) { return a.position < b.position; });",
        (FIRST_OUT,),
    ),
    Mutant(
        "superseded states wait with the rest",
        "csrc/closing.cpp",
        "return old.kept || old.hits > 1 ? Arena::kLru : Arena::kVictims;",
        "return Arena::kLru;",
        (PASSED, STATES + "test_superseded_undeclared_states_are_the_first_victims"),
    ),
    Mutant(
        "kept flag dropped",
        "csrc/closing.cpp",
        "return old.kept || old.hits > 1 ? Arena::kLru : Arena::kVictims;",
        "return old.hits > 1 ? Arena::kLru : Arena::kVictims;",
        (PASSED, PASSED_BY_OTHERS, BYTE_LRU),
    ),
    Mutant(
        "a declared window is kept but for its first block",
        "csrc/keys.cpp",
        "std::max(g.need_begin(position), declared ? walked->declared : keyed);",
        "std::max(g.need_begin(position) + declared * g.block_tokens, declared ? 0 : keyed);",
        (PASSED,),
    ),
    Mutant(
        "what lies between a kept position and a declared one after it is not marked",
        "csrc/keys.cpp",
        "    if (declared) walked->declared = position;\n",
        "    walked->declared = position;\n",
        (PASSED,),
    ),
    Mutant(
        "a pin makes its page the newest",
        "csrc/arena.cpp",
        "    if (page.key != Page::kVisible || !page.rest || page.refs > 1) return release(group, id);\n",
        "    if (page.refs) return release(group, id);\n",
        (PINS,),
    ),
    Mutant(
        "a page released under pins is placed when it is unpinned",
        "csrc/arena.cpp",
        "        page.rest = (1u + list) & 3u;\n        page.age = ++clock_;\n",
        "",
        (PINS,),
    ),
    Mutant(
        "an unpinned page comes back at the wrong place",
        "csrc/arena.cpp",
        "if (&side == &low) return !older(page_in(c, id).next);",
        "if (&side == &low) return true;",
        (PINS,),
    ),
    Mutant(
        "an unpinned page comes back one place too early",
        "csrc/arena.cpp",
        "        low = before;\n",
        "        low = before == kNoPage ? before : page_in(c, before).previous;\n",
        (PINS,),
    ),
    Mutant(
        "an unpinned page comes back to the other list",
        "csrc/arena.cpp",
        "    put_back(c, id, static_cast<List>(page.rest - 1));\n",
        "    put_back(c, id, kLru);\n",
        (PINS,),
    ),
    Mutant(
        "pages of wrong guesses are not fenced",
        "csrc/steps.cpp",
        "            if (table.pages.back() != kNoPage) release(r, g, table.pages.back(), Arena::kLru);\n",
        "            if (table.pages.back() != kNoPage) {\n"
        "                if (r.handle == guaranteed_) arena_.mine(g, table.pages.back(), -1);\n"
        "                arena_.release(g, table.pages.back(), Arena::kLru);\n"
        "            }\n",
        (GUESSES,),
    ),
    Mutant(
        "pages of wrong guesses stay held",
        "csrc/steps.cpp",
        "    if (r.drafts) release_guesses(r, upto);\n",
        "",
        (GUESSES,),
    ),
    Mutant(
        "pages of a replaced grant are not fenced",
        "csrc/grant.cpp",
        "    for (const Release& dropped : unused_) release(r, dropped.group, dropped.page, dropped.list);\n",
        "    for (const Release& dropped : unused_) {\n"
        "        if (r.handle == guaranteed_) arena_.mine(dropped.group, dropped.page, -1);\n"
        "        arena_.release(dropped.group, dropped.page);\n"
        "    }\n",
        (REPLACED,),
    ),
    Mutant(
        "the first page of a replaced grant that is not needed stays held",
        "csrc/grant.cpp",
        "    for (int64_t b = past; b < table.end(); ++b) unused_",
        "    for (int64_t b = past + 1; b < table.end(); ++b) unused_",
        (REPLACED,),
    ),
    Mutant(
        "keyed pages evicted while others are free",
        "csrc/slabs.cpp",
        "    if (empty_ + uncreated() > left_alone(c)) return held_now(group, take_new(size_class));\n",
        "    if (empty_ + uncreated() > left_alone(c) && coldest(c) == kNoPage)"
        " return held_now(group, take_new(size_class));\n",
        (ORDER + "test_law_14_a_key_is_evicted_only_when_no_page_without_one_is_left",),
    ),
    Mutant(
        "quota dropped",
        "csrc/guarantee.cpp",
        "return worst <= most_slabs_ || quota() > most_slabs_;",
        "return true;",
        (SPREAD_THIN,),
    ),
    Mutant(
        "freeze dropped",
        "csrc/allocate.cpp",
        "    frozen_ |= oldest;\n",
        "",
        (WAITS,),
    ),
    Mutant(
        "pins go on while the oldest waits",
        "csrc/loads.cpp",
        "const int32_t page = frozen_ ? kNoPage : arena_.find(",
        "const int32_t page = arena_.find(",
        (WAITS,),
    ),
    Mutant(
        "oldest that holds pages guaranteed, not the oldest",
        "csrc/allocate.cpp",
        "    Request* oldest = find(by_age_.front());\n",
        "    Request* oldest = find(by_age_.front());\n"
        "    for (const int64_t handle : by_age_)\n"
        "        if (Request* r = find(handle); r && r->state != RequestState::kWaiting) {\n"
        "            oldest = r;\n"
        "            break;\n"
        "        }\n",
        (CROWD,),
    ),
    Mutant(
        "slabs that a request needs rounded down",
        "csrc/guarantee.cpp",
        "c.needed = needs.empty() ? 0 : slabs_for(c, needs[i]);",
        "c.needed = needs.empty() ? 0 : needs[i] / c.k;",
        (PROGRESS + "test_law_12_a_lone_request_completes_in_the_smallest_pool_that_admits_it",),
    ),
    Mutant(
        "admission counts one state",
        "csrc/group_rules.h",
        "return 2 + request_pages;",
        "return 1 + request_pages;",
        (PROGRESS + "test_law_12_admitted_is_exactly_what_the_arena_can_serve_to_its_end",),
    ),
    Mutant(
        "double unpin accepted",
        "csrc/loads.cpp",
        "if (++times[pages[i]] > pins)",
        "if (++times[pages[i]] > pins + 1)",
        (LAW + "15_misuse.py::test_law_15_a_pin_ends_once",),
    ),
    Mutant(
        "two threads in one manager",
        "csrc/exclusive.h",
        "if (exclusive.entered.test_and_set(std::memory_order_acquire))",
        "if (exclusive.entered.test(std::memory_order_acquire) && false)",
        (LAW + "15_misuse.py::test_law_15_two_threads_at_once_are_refused",),
    ),
    Mutant(
        "move without re-pointing the key",
        "csrc/reclaim.cpp",
        "    index.move(index.hash(page.digest, page.ns), from, to);\n",
        "    index.move(index.hash(page.digest, page.ns), from, from);\n",
        (MOVES,),
    ),
    Mutant(
        "move of a held page",
        "csrc/reclaim.cpp",
        "if (slab(s).owner != size_class || candidate.held || !candidate.used) continue;",
        "if (slab(s).owner != size_class || !candidate.used) continue;",
        (
            LAW + "18_fences.py"
            "::test_law_18_a_pinned_page_stays_where_it_is_until_its_reader_is_done",
        ),
    ),
    Mutant(
        "a grant without space changes something",
        "csrc/grant.cpp",
        "    undo();\n    return false;\n",
        "    arena_.commit_mark();\n    return false;\n",
        (
            LAW + "13_counting.py"
            "::test_law_13_no_space_is_said_only_where_pages_lack_and_changes_nothing",
        ),
    ),
]
