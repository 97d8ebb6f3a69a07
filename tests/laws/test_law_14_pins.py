"""Readers outside (a tier that stores or loads) leave the order of eviction as it is."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from laws import cases
from laws.counting import count
from laws.drive import compute, decode, open_request
from laws.engine import Engine
from laws.pressure import Snapshot, release, squeeze
from laws.verify import verify

MOMENTS = 4
"""In a turn: before it, in its middle, before its end, after it."""


class Readers:
    """Pin pages as a tier does, and let go of them later, in another order."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.random = engine, random.Random(seed)
        self.items = engine.manager.take_keyed()

    def come_and_go(self) -> None:
        engine, draw = self.engine, self.random
        fresh = engine.manager.take_keyed()
        self.items = np.concatenate([self.items, fresh]).astype(fresh.dtype)
        self.leave(draw.randint(0, len(engine.pinned)))
        chosen = self.items[[draw.random() < 0.4 for _ in self.items]].copy()
        count("pin")
        for item, page in zip(chosen, engine.manager.pin(chosen).tolist(), strict=True):
            if page >= 0:
                engine.pinned.append((int(item["group"]), page))

    def leave(self, many: int) -> None:
        pinned = self.engine.pinned
        for _ in range(many):
            group, page = pinned.pop(self.random.randrange(len(pinned)))
            count("unpin")
            self.engine.manager.unpin(group, np.array([page], np.int32))


def play(engine: Engine, history: Sequence[cases.Turn], readers: Readers | None) -> None:
    done: list[list[int]] = []
    for turn in history:
        prompt = turn.prompt(done)
        for moment in range(MOMENTS):
            if readers:
                readers.come_and_go()
            if moment == 0:
                request = open_request(engine, prompt, output=len(turn.output))
                compute(engine, request, upto=len(prompt) // 2, chunks=turn.chunks)
            elif moment == 1:
                compute(engine, request, chunks=turn.chunks)
                decode(engine, request, turn.output)
            elif moment == 2:
                engine.finish(request)
        done.append([*prompt, *turn.output])
    if readers:
        readers.leave(len(engine.pinned))


def evictions(engine: Engine, history: Sequence[cases.Turn], seed: int | None) -> list[Snapshot]:
    """What is resident, while an arena fills that was large enough for a history. None: no readers."""
    play(engine, history, None if seed is None else Readers(engine, seed))
    assert not engine.manager.arena_stats().evictions
    order = [engine.resident(), *squeeze(engine)]
    release(engine)
    return order


histories = st.lists(cases.turns, min_size=1, max_size=4)
seeds = st.integers(0, 2**16)


@cases.law(80)
@example(  # the last prompt and its output are more tokens than all pages that the history filled
    name="full",
    interval=3,
    history=[
        cases.Turn(3, 44, [0, 1, 1, 1, 1, 0, 0, 2, 0], [0, 2, 2, 0], [28, 11, 28, 3]),
        cases.Turn(0, 21, [2] * 19, [0, 1, 1, 1, 1, 0], [1, 3, 30, 16]),
        cases.Turn(3, 36, [1] * 17, [2, 2, 1, 0, 0, 1, 1, 2], [20]),
    ],
    seed=129,
)
@given(
    name=st.sampled_from(sorted(cases.ONE_SIZE)),
    interval=cases.intervals,
    history=histories,
    seed=seeds,
)
def test_law_14_pins_do_not_change_what_goes_when(
    name: str, interval: int | None, history: list[cases.Turn], seed: int
) -> None:
    """Pinned while cached: the page goes back to its place. Pinned while a request holds it: it gets
    the place of the time at which the request let go.
    """
    geometry = cases.ONE_SIZE[name]
    policy = cases.policy_of(geometry, interval)
    engine = Engine(geometry, policy)
    play(engine, history, Readers(engine, seed))
    longest = geometry.slabs_needed(cases.LONGEST_TURN_TOKENS)
    slabs = max(engine.manager.arena_stats().created, longest)
    with_readers, without = (
        evictions(Engine(geometry, policy, slabs=slabs), history, readers)
        for readers in (seed, None)
    )
    assert with_readers == without


@pytest.mark.parametrize("name", cases.chosen)
@cases.law(5)
@given(interval=cases.intervals, history=histories, seed=seeds, movable=st.booleans())
def test_law_14_pins_leave_all_there_and_nothing_held_in_every_geometry(
    name: str, interval: int | None, history: list[cases.Turn], seed: int, movable: bool
) -> None:
    """Where a slab holds many pages, which ones share one depends on what was held meanwhile: so no
    order is compared.
    """
    geometry = cases.GEOMETRIES[name]
    policy = cases.policy_of(geometry, interval)
    alone, engine = Engine(geometry, policy), Engine(geometry, policy, movable=movable)
    play(alone, history, None)
    play(engine, history, Readers(engine, seed))
    verify(engine)
    assert engine.resident() == alone.resident()
    assert not any(engine.held())
