from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import pytest
from engine.rig import DRAIN_SECONDS, Failing, Rig, rig, tokens
from engine.stamp_guesser import DRAFT_TOKENS, StampGuesser
from engine.stamp_runner import VOCAB, expected_output, stamp_geometry
from numpy.typing import NDArray

from kvcache import (
    Dense,
    HandleError,
    Sparse,
)
from kvcache.core.retain import RetentionPolicy
from kvcache.engine.chunk import Chunk, Guesses
from kvcache.engine.request import Event, Reason, Token


class Sleeper(StampGuesser):
    """It can sleep: after that its pages hold what no stamp is. And things happen while it works."""

    inside: Callable[[], None] | None = None

    def move_pages(self, moves: NDArray[np.void]) -> None:
        super().move_pages(moves)
        if self.inside is not None:
            self.inside()

    def run_guessing(self, chunks: Sequence[Chunk]) -> list[Guesses]:
        if self.inside is not None:
            self.inside()
        return super().run_guessing(chunks)

    def release_memory(self) -> None:
        self.arena[:] = 2**64 - 1


class Play:
    """Random opens, aborts, preempts and steps, with every token checked as it comes.

    `spread`: priorities from 0 to it.
    """

    def __init__(self, r: Rig, rng: random.Random, spread: int = 0) -> None:
        self.r, self.rng, self.spread = r, rng, spread
        self.shared = [tokens(90, -i) for i in range(1, 5)]
        self.wanted: dict[int, list[int]] = {}
        self.got: dict[int, list[int]] = {}
        self.opened = 0
        self.reasons: dict[Reason, int] = {}

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Token):
                self.got[event.request].append(event.token)
                continue
            wanted, got = self.wanted.pop(event.request), self.got.pop(event.request)
            assert got == wanted[: len(got)]
            assert (event.reason is Reason.LENGTH) == (got == wanted)
            self.reasons[event.reason] = self.reasons.get(event.reason, 0) + 1

    def act(self) -> None:
        rng, engine, dice = self.rng, self.r.engine, self.rng.random()
        if dice < 0.2 and len(self.wanted) < 20:
            prompt = rng.choice(self.shared)[: rng.randrange(1, 90)]
            prompt = [*prompt, *(rng.randrange(VOCAB) for _ in range(rng.randrange(10)))]
            count = rng.randrange(1, 12)
            request = engine.add_request(
                prompt, max_new_tokens=count, priority=rng.randint(0, self.spread)
            )
            self.wanted[request] = expected_output(prompt, count)
            self.got[request] = []
            self.opened += 1
        elif dice < 0.28 and self.wanted:
            request = rng.choice(list(self.wanted))
            with suppress(HandleError):  # aborted already, its event is still to come
                (engine.preempt if dice < 0.25 else engine.abort)(request)
        else:
            self.take(engine.step())

    def end_one(self) -> None:
        """Now and then, from inside the runner: abort or preempt any request."""
        if self.rng.random() < 0.03 and self.wanted:
            engine, request = self.r.engine, self.rng.choice(list(self.wanted))
            with suppress(HandleError):
                (engine.preempt if self.rng.random() < 0.5 else engine.abort)(request)


LONGEST_TOKENS = 90 + 10 + 12
"""Of the requests that `Play` opens."""


@pytest.mark.parametrize(
    ("steps", "blocks", "pages", "states", "retention", "tier", "failing"),
    [
        (10_000, (16,), [14], 0, Sparse(), None, 0.0),
        (10_000, (16,), [14, 4], 1, Sparse(32), 10, 0.1),
        (2_000, (4, 8), [28, 14, 5], 1, Dense(), 3, 0.0),
        (2_000, (8,), [28, 3, 5], 2, Sparse(), 2, 0.05),
    ],
)
def test_random_steps_leak_no_block(
    steps: int,
    blocks: tuple[int, ...],
    pages: list[int],
    states: int,
    retention: RetentionPolicy,
    tier: int | None,
    failing: float,
) -> None:
    rng, faults = random.Random(steps + len(pages)), random.Random(0)
    copies = {"copy": Failing(lambda: faults.random() < failing), "batch_bytes": 256}
    with rig(
        pages,
        *blocks,
        states=states,
        retention=retention,
        tier_pages=None if tier is None else [n * tier for n in pages],
        tier=copies if failing else {"queue_depth": 4},
        token_budget=rng.choice([11, 40, 200]),
        debug=False,
    ) as r:
        play = Play(r, rng)
        for step in range(steps):
            play.act()
            if step % 11 == 0 and r.offload is not None:  # copies get to run
                assert r.offload.drain(DRAIN_SECONDS) or r.manager.stats().frozen
            if step % 97 == 0:
                r.manager.check()
        play.take(list(r.engine.stream()))
        assert not play.wanted
        assert sum(play.reasons.values()) == play.opened == r.engine.counters.finished_requests
        assert set(play.reasons) == {Reason.LENGTH, Reason.ABORT}
        assert r.engine.counters.preemptions > 0
        assert (r.engine.counters.restored_tokens > 0) == (tier is not None)
        assert (r.engine.counters.failed_loads > 0) == (failing > 0)
        assert r.held == 0
        assert r.manager.stats()[:4] == (0, 0, 0, 0)


@pytest.mark.parametrize("movable", [False, True])
@pytest.mark.parametrize(
    ("blocks", "states", "window", "spare", "tier", "failing"),
    [
        ((16, 8), 1, 20, 0, None, 0.0),
        ((8,), 2, 40, 1, 2, 0.1),
        ((16,), 1, 0, 5, 10, 0.05),
        ((4, 8), 0, 1, 12, 10, 0.1),
    ],
)
def test_whatever_fits_alone_ends_in_the_smallest_arena(
    blocks: tuple[int, ...],
    states: int,
    window: int,
    spare: int,
    tier: int | None,
    failing: float,
    movable: bool,
) -> None:
    """Memory moves between groups; a request that stood still would be given up as stalled."""
    rng, faults = random.Random(spare), random.Random(0)
    geometry = stamp_geometry(*blocks, states=states, window=window)
    slabs = geometry.slabs_needed(LONGEST_TOKENS) + spare
    with rig(
        slabs,
        *blocks,
        states=states,
        window=window,
        movable=movable,
        tier_pages=None if tier is None else [10 * tier] * len(geometry.groups),
        tier={"copy": Failing(lambda: faults.random() < failing), "batch_bytes": 256},
        token_budget=rng.choice([11, 40, 200]),
        debug=False,
        stall_seconds=30.0,
    ) as r:
        play = Play(r, rng)
        for step in range(1000):
            play.act()
            if step % 41 == 0:
                r.manager.check()
        play.take(list(r.engine.stream()))
        assert not play.wanted
        assert set(play.reasons) == {Reason.LENGTH, Reason.ABORT}
        assert r.engine.counters.preemptions > 0
        classes = len(geometry.pages_per_slab)
        assert (r.runner.moved_pages > 0) == (movable and classes > 1)
        assert r.held == 0


@pytest.mark.parametrize(
    ("blocks", "states", "window", "tier"),
    [((16,), 0, 0, None), ((8,), 1, 0, 4), ((4, 8), 1, 20, 4)],
)
def test_priorities_guesses_sleep_and_new_weights_leak_nothing_and_change_no_token(
    blocks: tuple[int, ...], states: int, window: int, tier: int | None
) -> None:
    """Wrong guesses are in no page that anybody reads; `reload` gives the weights another epoch."""
    rng = random.Random(len(blocks) + states)
    geometry = stamp_geometry(*blocks, states=states, window=window, drafts=DRAFT_TOKENS)
    with rig(
        geometry.slabs_needed(LONGEST_TOKENS) + 8,
        *blocks,
        states=states,
        window=window,
        drafts=DRAFT_TOKENS,
        tier_pages=None if tier is None else [20 * tier] * len(geometry.groups),
        token_budget=40,
        runner_type=Sleeper,
        debug=False,
        stall_seconds=30.0,
    ) as r:
        play, epoch = Play(r, rng, spread=3), 0
        assert isinstance(r.runner, Sleeper)
        r.runner.inside = play.end_one
        for step in range(1200):
            play.act()
            if step % 150 == 140:
                assert r.engine.sleep(DRAIN_SECONDS)
                r.engine.wake()
            if step % 400 == 399:
                epoch += 1
                r.engine.reload(epoch, lambda: None)
            if step % 37 == 0:
                r.manager.check()
        play.take(list(r.engine.stream()))
        assert not play.wanted
        assert set(play.reasons) == {Reason.LENGTH, Reason.ABORT}
        counters = r.engine.counters
        assert counters.preemptions > 0
        assert 0 < counters.accepted_tokens < counters.proposed_tokens
        assert (counters.restored_tokens > 0) == (tier is not None)
        assert r.held == 0
        assert r.manager.stats()[:4] == (0, 0, 0, 0)
