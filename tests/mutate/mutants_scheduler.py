"""Faults in who is served first, what is loaded, and what of guesses is kept."""

from __future__ import annotations

from mutate.mutant import Mutant

ENGINE = "kvcache/engine/"
PRIORITY = "tests/engine/test_engine_priority.py::test_"
COSTS = "tests/engine/test_engine_costs.py::test_"
GUESSES = "tests/engine/test_engine_speculative.py::test_"
PAUSES = "tests/engine/test_engine_pauses.py::test_"
TWINS = "tests/engine/test_engine_twins.py::test_"

SCHEDULER = [
    Mutant(
        "a priority that no waiting makes up for",
        ENGINE + "engine.py",
        "due=now + number * self.settings.priority_seconds,",
        "due=now + number * 1e9,",
        (PRIORITY + "a_low_priority_is_passed_for_a_while_and_not_for_ever",),
    ),
    Mutant(
        "the oldest preempted for another one",
        ENGINE + "room.py",
        "if other is request or other is self.oldest or other.in_step:",
        "if other is request or other.in_step:",
        (PRIORITY + "the_oldest_is_pushed_out_by_no_priority",),
    ),
    Mutant(
        "a waiting request pushes out its equals",
        ENGINE + "room.py",
        "(not waits or other.priority > request.priority)",
        "True",
        (PRIORITY + "a_waiting_request_pushes_nobody_of_its_own_priority_out",),
    ),
    Mutant(
        "a slow load tried again for nothing",
        ENGINE + "costs.py",
        "max(0.0, self._credit_seconds - excess_seconds)",
        "self._credit_seconds",
        (COSTS + "a_way_that_looks_dear_is_tried_again_for_a_small_share_of_the_time",),
    ),
    Mutant(
        "the whole prefix counted where a state alone is missing",
        ENGINE + "scheduler.py",
        "there = max(alone.hit_tokens, alone.junction)",
        "there = alone.hit_tokens",
        (COSTS + "a_state_alone_is_loaded_where_the_device_has_the_rest",),
    ),
    Mutant(
        "what is computed instead stays held in the tier",
        ENGINE + "scheduler.py",
        "        request.instead = (alone.hit_tokens, end)\n        self._offload.release(request.id)\n",
        "        request.instead = (alone.hit_tokens, end)\n",
        (COSTS + "a_refused_request_that_will_compute_holds_nothing_in_the_tier",),
    ),
    Mutant(
        "pages of wrong guesses stay in the table",
        ENGINE + "chunk_maker.py",
        "table.cut(0 if rules.transient else blocks)",
        "pass",
        (GUESSES + "tokens_are_those_of_the_model_alone",),
    ),
    Mutant(
        "one wrong guess kept",
        ENGINE + "speculative.py",
        "return best[: int(wrong[0]) + 1] if len(wrong) else best",
        "return best[: int(wrong[0]) + 2] if len(wrong) else best",
        (GUESSES + "tokens_are_those_of_the_model_alone",),
    ),
    Mutant(
        "new weights under the old epoch",
        ENGINE + "pauses.py",
        "self._manager.set_weights_epoch(weights_epoch)",
        "self._manager.clear()",
        (PAUSES + "nothing_of_old_weights_is_a_hit_in_device_or_tier",),
    ),
    Mutant(
        "memory given back while the keys stay",
        ENGINE + "pauses.py",
        "        self._manager.clear()\n        self._move_pages()\n",
        "        self._move_pages()\n",
        (PAUSES + "requests_that_run_load_or_wait_go_on_after_a_sleep",),
    ),
    Mutant(
        "a twin of a higher priority computes what another one does",
        ENGINE + "scheduler.py",
        "and not other.in_step",
        "and other.in_step",
        (TWINS + "twins_of_a_higher_priority_wait_for_the_prefill_of_a_lower_one",),
    ),
    Mutant(
        "a load waited for however little it brings",
        ENGINE + "scheduler.py",
        "if shared - there >= GOOD_PART * (most - there):",
        "if shared > there:",
        (TWINS + "a_short_common_beginning_is_no_reason_to_load_one_after_the_other",),
    ),
    Mutant(
        "pages stored before their move is copied",
        ENGINE + "queues.py",
        "            self._move_pages()\n            self._offload.end_of_step()",
        "            self._offload.end_of_step()",
        ("tests/engine/test_engine_moves.py::test_no_page_is_stored_before_its_move_is_copied",),
    ),
    Mutant(
        "pages of wrong guesses counted as a request's",
        ENGINE + "engine.py",
        "request.granted = request.computed  # pages of wrong guesses are gone",
        "pass",
        (GUESSES + "an_error_of_the_runner_ends_the_requests_of_its_batch_alone",),
    ),
]
