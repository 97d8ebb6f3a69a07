"""Faults in simulated time: the roofline, leaps, copies, live sessions, the laws of a replay."""

from __future__ import annotations

from mutate.mutant import Mutant

ENGINE = "tests/engine/test_simulated.py::test_"
ROOFLINE = "tests/engine/test_simulated_roofline.py::test_"
LIVE = "tests/bench/test_live.py::test_"
TIMED = "tests/bench/test_replay_timed.py::test_"

SIMULATED = [
    Mutant(
        "a window's chunk reads a token too many",
        "kvcache/engine/simulated_roofline.py",
        "new + (group.reach - 1)",
        "new + group.reach",
        (ROOFLINE + "attention_costs_what_its_queries_do_one_by_one",),
    ),
    Mutant(
        "a batch reads the experts of one token",
        "kvcache/engine/simulated_roofline.py",
        "(1.0 - share) ** tokens",
        "(1.0 - share) ** np.ones_like(tokens)",
        (ROOFLINE + "experts_are_read_as_often_as_random_choices_touch_them",),
    ),
    Mutant(
        "a leap goes on after the next arrival",
        "kvcache/engine/simulated.py",
        "            if clock.now >= until_seconds:\n                break\n",
        "",
        (ENGINE + "a_leap_takes_many_steps_and_ends_before_it_is_told_to",),
    ),
    Mutant(
        "a leap though somebody waits",
        "kvcache/engine/simulated.py",
        "if self.scheduler.waiting or self.scheduler.loading or",
        "if self.scheduler.loading or",
        (ENGINE + "requests_that_wait_come_before_any_leap",),
    ),
    Mutant(
        "copies over one link side by side",
        "kvcache/engine/simulated_tier.py",
        "max(self._clock.now, self._free_at[transfer.direction])",
        "self._clock.now",
        (ENGINE + "copies_of_one_direction_go_one_after_the_other",),
    ),
    Mutant(
        "pages stored in each other's slots",
        "kvcache/engine/simulated_stamps.py",
        "self._slots[group][slots] = self",
        "self._slots[group][slots[::-1]] = self",
        (ENGINE + "what_is_read_was_written_for_that_prefix",),
    ),
    Mutant(
        "a live request waits for the last one alone",
        "bench/traces/live.py",
        "max(self._ended_at[i] for i in last)",
        "self._ended_at[last[-1]]",
        (LIVE + "a_request_comes_after_all_that_ended_before_it",),
    ),
    Mutant(
        "the time before a request was taken in is not counted",
        "bench/replay_timed.py",
        "        self._request_seconds += self.clock.now - request.arrival_seconds\n",
        "",
        (TIMED + "one_server_queues_as_theory_says",),
    ),
]
