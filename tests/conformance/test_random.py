"""Random schedules through vLLM's own scheduler, over a tier whose worker has faults."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from conformance.faulty import Clock, tier_with, worker_of
from conformance.stack import Setup, Stack, chunked, expected_outputs, full, state, window
from vllm.v1.request import RequestStatus

from kvcache.connectors.adapters.vllm import worker_side

SCALE = int(os.environ.get("KVCACHE_TEST_SCALE", "1"))
RUNS = 200 * SCALE
OPERATIONS = 60
MOST_STEPS = 3000

MODELS: list[dict[str, Any]] = [
    {},
    {"layers": 2, "blocks_first": True},
    {"specs": [full(), window()]},
    {"specs": [full(), window(64)], "retention": 0},
    {"specs": [full(), chunked()]},
    {"specs": [full(), state()], "blocks": 60},
    {"specs": [full(), state()], "retention": 64, "blocks": 60},
    {"specs": [full(64), state(64, 16384)], "match_unit": 16, "blocks": 30},
    {"specs": [full(), window(), state()], "blocks": 60},
]

FAULTS: list[dict[str, Any]] = [
    {},
    {"fail_item": 0.1, "corrupt": 0.1},
    {"late": 0.4},
    {"drop": 0.2},
    {"duplicate": 0.5, "reorder": True},
    {"refuse": 0.3, "refuse_by_raising": 0.2},
    {"hang_after": 15},
    {"die_after": 10},
    {
        "fail_item": 0.05,
        "corrupt": 0.05,
        "late": 0.1,
        "drop": 0.05,
        "duplicate": 0.1,
        "refuse": 0.1,
        "refuse_by_raising": 0.05,
        "reorder": True,
    },
]


class Run:
    """One schedule: sessions that come and go, aborts, resets, results in the order of the test."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.random = random.Random(seed)
        self.clock = clock
        rng = self.random
        model = rng.choice(MODELS)
        self.faults = rng.choice(FAULTS)
        pages = rng.choice([8, 30, 100])
        page_bytes = max(spec.page_size_bytes for spec in model.get("specs", [full()]))
        extra = tier_with(
            self.faults,
            seed=seed,
            hold=True,
            capacity_bytes=pages * page_bytes * model.get("layers", 1),
            queue_depth=rng.choice([2, 32]),
            deadline_seconds=3.0,
        )
        extra["store"] = rng.choice(["all", "prompt"])
        asynchronous = rng.random() < 0.3
        if not asynchronous and len(model.get("specs", [1])) == 1 and rng.random() < 0.5:
            extra["load"] = "sync"
            extra["tiers"][0]["hold"] = (
                False  # a step waits for its loads: nobody would deliver them
            )
            clock.step = 0.01
        self.stack = Stack(
            Setup(
                **({"blocks": 30} | model),
                extra=extra,
                policy=rng.choice(["recompute", "recompute", "fail"]),
                asynchronous=asynchronous,
                requests=rng.choice([2, 8]),
            )
        )
        self.sessions = [
            [rng.randrange(200) for _ in range(rng.randrange(1, 120))] for _ in range(4)
        ]

    def play(self) -> None:
        """All of it, and what must hold in the end."""
        with self.stack:
            for number in range(OPERATIONS):
                self._operate(number)
            self._end()

    def _operate(self, number: int) -> None:
        rng, stack = self.random, self.stack
        what = rng.random()
        if what < 0.25:
            session = rng.choice(self.sessions)
            stack.add(f"r{number}", session, rng.randrange(1, 24))
            session += [rng.randrange(200) for _ in range(rng.randrange(1, 20))]
            if len(session) > 220:
                del session[rng.randrange(1, 40) :]
        elif what < 0.30:
            open_ones = [name for name in stack.requests if name in stack.scheduler.requests]
            if open_ones:
                stack.abort(rng.choice(open_ones))
        elif what < 0.33:
            stack.scheduler.reset_prefix_cache(reset_connector=rng.random() < 0.5)
        elif what < 0.55:
            worker_of(stack).deliver(rng.randrange(1, 4))
        elif what < 0.60:
            self.clock.now += 20.0
        if rng.random() < 0.8:
            stack.step()

    def _end(self) -> None:
        stack, worker = self.stack, worker_of(self.stack)
        for _ in range(MOST_STEPS):
            if not stack.busy:
                break
            worker.deliver()
            if not stack.step():
                self.clock.now += 1.0
        assert not stack.busy, "some request does not end"
        for request in stack.requests.values():
            assert request.is_finished()
            if request.status is RequestStatus.FINISHED_LENGTH_CAPPED:
                assert list(request.output_token_ids) == expected_outputs(request)
            elif stack.setup.policy == "recompute":
                assert request.status is RequestStatus.FINISHED_ABORTED
        self._settle()

    def _settle(self) -> None:
        """What was lost comes after all, and nothing is held for it any more."""
        stack, worker = self.stack, worker_of(self.stack)
        side = stack.connector._scheduler
        if not worker.dead:
            worker.recover()
        for _ in range(6):
            worker.deliver()
            self.clock.now += 20.0
            stack.step()
        assert not any(it.blocks for it in side._moving.values())
        assert stack.free == stack.setup.blocks - 1
        assert not side._requests
        side.tier.check()


@pytest.mark.parametrize("batch", range(10))
def test_every_request_ends_with_the_right_answer(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: dict[str, int] = {}
    for seed in range(batch * RUNS // 10, (batch + 1) * RUNS // 10):
        clock = Clock()
        monkeypatch.setattr(worker_side, "time", clock)
        run = Run(seed, clock)
        try:
            run.play()
        except Exception as fault:
            fault.add_note(f"seed {seed}: {run.stack.setup}")
            raise
        met[str(run.faults)] = met.get(str(run.faults), 0) + run.stack.model.checks
    assert all(met.values())
