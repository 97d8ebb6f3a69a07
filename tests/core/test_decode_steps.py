"""A decode step that stays within a block and a state does next to nothing in the manager. What it
leaves is what the long way leaves, and what the same tokens leave in one piece."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from core.managing import Equal
from hypothesis import given, strategies as st
from laws import cases

from kvcache import Geometry, Manager
from kvcache.core.records import UNLIMITED
from kvcache.core.retain import PlanArrays, plan_of
from kvcache.retention import Sparse

LONGEST = 72
TRIED = [
    "coprime",
    "deepseek",
    "full",
    "gpt-oss",
    "hybrid",
    "private",
    "speculative",
    "three kinds",
    "two sizes",
]


def piece_of(geometry: Geometry) -> int:
    """Tokens within which neither a block nor a link of the chain nor a grid unit ends."""
    return math.gcd(geometry.hash_unit_tokens, *geometry.block_tokens)


class Remembering(Manager):
    """Knows what each request was told to keep last."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.plans: dict[int, PlanArrays] = {}
        super().__init__(*args, **options)

    def _retain(self, handle: int, plan: PlanArrays) -> None:
        super()._retain(handle, plan)
        self.plans[handle] = plan

    def told(self, handle: int) -> PlanArrays:
        return self.plans.get(handle) or plan_of(self.retention, self._shapes[handle])

    def keep(self, handle: int, position: int) -> None:
        """This position beside what it keeps."""
        old = self.told(handle)
        positions = np.union1d(old.positions, [position])
        declared = np.isin(positions, old.positions[old.declared == 1]).astype(np.uint8)
        self._retain(handle, PlanArrays(old.intervals, positions, declared))

    def keep_as_before(self, handle: int) -> None:
        self._retain(handle, self.told(handle))


class Pair(Equal):
    """Equal managers. One takes the short way where it can, the other never does: a grant that is
    asked for twice, and a retention that is told anew, have to be looked at in full.

    No two requests have the same text: when a copy takes over another one's key, and frees its
    page, depends on how often that is looked at.
    """

    def __init__(self, name: str, interval: int | None, spare: int | None, seed: int) -> None:
        geometry = cases.GEOMETRIES[name]
        slabs = UNLIMITED if spare is None else geometry.slabs_needed(LONGEST) + spare
        self.short, self.long = (
            Remembering(
                geometry,
                slabs=slabs,
                retention=cases.policy_of(geometry, interval),
                max_open_steps=2,
                events=True,
            )
            for _ in range(2)
        )
        super().__init__(self.short, self.long)
        self.random, self.piece = random.Random(seed), piece_of(geometry)
        self.bounded = spare is not None
        self.opened = 0
        self.foreign: set[int] = set()
        self.steps: list[int] = []
        self.seen: Counter[str] = Counter()

    def look_anew(self) -> None:
        """The long way is taken by what comes next."""
        for handle in self.handles:
            self.long.keep_as_before(handle)

    # ---- calls

    def open(self) -> None:
        self.opened += 1
        tokens = [self.opened, *cases.STORIES[0][: self.random.randint(0, 29)]]
        if self.random.random() < 0.8:
            handle = self.both(lambda m: m.open(tokens, max_tokens=LONGEST))
        else:
            units = len(tokens) // self.short.geometry.hash_unit_tokens
            keys = np.frombuffer(self.random.randbytes(32 * units), np.uint8).reshape(-1, 32)
            handle = self.both(
                lambda m: m.open_foreign(keys, prompt_tokens=len(tokens), max_tokens=LONGEST)
            )
            self.foreign.add(handle)
        self.handles.append(handle)

    def within(self, handle: int, tokens: int, drafts: int) -> bool:
        info = self.long.info(handle)
        start, end = info.committed, info.committed + tokens
        fresh = info.state == "running" and info.granted == start and tokens and not drafts
        return fresh and -(-start // self.piece) == -(-end // self.piece)

    def allocate(self, handle: int, tokens: int, drafts: int) -> bool:
        if self.bounded and self.within(handle, tokens, drafts):
            tokens = 1  # the long way may shorten a grant though it takes no page
        if self.within(handle, tokens, drafts):
            self.seen["within"] += 1
            assert self.long.need(handle, tokens) == [0] * len(self.long.geometry.groups)
            self.long.allocate(handle, tokens)
        grant = self.both(lambda m: m.allocate(handle, tokens, drafts=drafts))
        for g, rule in enumerate(self.short.geometry.rules if grant else ()):
            if rule.kind in ("full", "span"):
                assert len(self.short.block_table(handle, g)) == -(-grant.end // rule.block_tokens)
        return grant is not None

    def tell(self, handle: int, upto: int) -> None:
        known = self.short.info(handle).tokens
        more = [self.random.randrange(2) for _ in range(min(upto, LONGEST) - known)]
        if not more:
            return
        self.look_anew()
        if handle in self.foreign:
            self.both(lambda m: m.extend_foreign(handle, len(more)))
        else:
            self.both(lambda m: m.extend(handle, more))

    def end_step(self) -> None:
        step = self.steps.pop(0)
        self.look_anew()
        self.both(lambda m: m.end_step(step))

    def begin_step(self) -> None:
        if len(self.steps) == 2:
            self.end_step()
        self.steps.append(self.both(lambda m: m.begin_step()))

    # ---- what a request does

    def go_on(self) -> None:
        handle = self.random.choice(self.handles)
        info = self.short.info(handle)
        if info.state == "waiting":
            self.both(lambda m: m.lookup(handle))
            self.allocate(handle, 0, 0)
            return
        drafts = self.random.choice([0] * 8 + [1, 2])
        size = self.random.choice([1] * 8 + [2, 20])
        if info.tokens - info.committed > 1:
            size, drafts = min(size * 10, info.tokens - info.committed), 0
        size = min(size, LONGEST - 2 - info.committed)
        if size <= 0:
            self.leave(handle)
            return
        if self.random.random() < 0.5:  # told before it is computed
            self.tell(handle, info.committed + size)
        if self.random.random() < 0.1:  # and thinks better of it
            self.allocate(handle, min(9, LONGEST - info.committed), 0)
        if not self.allocate(handle, size, drafts) and not self.allocate(handle, size := 1, 0):
            self.leave(handle)
            return
        granted = self.short.info(handle).granted
        if not self.steps or self.random.random() < 0.7:
            self.begin_step()
        sure = min(info.committed + size, granted)  # where space lacks there are fewer
        right = self.random.randint(sure, granted)
        self.both(lambda m: m.commit(handle, right))
        self.seen["commits"] += 1
        if self.random.random() < 0.5:
            self.tell(handle, right)

    def leave(self, handle: int) -> None:
        running = self.short.info(handle).state == "running"
        if running and not self.bounded and self.random.random() < 0.5:
            self.both(lambda m: m.preempt(handle))
            return
        self.both(lambda m: m.finish(handle))
        self.handles.remove(handle)

    def change_what_is_kept(self) -> None:
        """A boundary that comes up soon, as a junction that a lookup has seen."""
        handle, grid = self.random.choice(self.handles), self.short.geometry.grid_tokens
        at = self.short.info(handle).committed // grid + self.random.randint(1, 2)
        self.both(lambda m: m.keep(handle, at * grid))

    def round(self) -> None:
        dice = self.random.random()
        if not self.handles or (len(self.handles) < 3 and dice < 0.1):
            self.open()
        elif dice < 0.8:
            self.go_on()
        elif dice < 0.9 and self.steps:
            self.end_step()
        elif dice < 0.94:
            self.change_what_is_kept()
        elif dice < 0.96:
            self.leave(self.random.choice(self.handles))
        elif dice < 0.97:
            self.both(lambda m: m.clear())
        self.compare()


@cases.law(80)
@given(
    name=st.sampled_from(TRIED),
    interval=cases.intervals,
    spare=st.sampled_from([None, 0, 8]),
    seed=st.integers(0, 2**32),
)
def test_the_short_way_leaves_what_the_long_way_leaves(
    name: str, interval: int | None, spare: int | None, seed: int
) -> None:
    pair = Pair(name, interval, spare, seed)
    for _ in range(60):
        pair.round()


@pytest.mark.parametrize("name", ["full", "hybrid", "gpt-oss", "deepseek"])
def test_the_comparison_meets_the_short_way(name: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(6):
        pair = Pair(name, 1, None, seed)
        for _ in range(60):
            pair.round()
        seen += pair.seen
    assert seen["commits"] > 100
    assert seen["within"] > 10


# ---- the same tokens in one piece


def decode(m: Manager, handle: int, tokens: list[int], dice: random.Random) -> None:
    """Token by token, some of them guessed; each is told early or late, under two open steps."""
    steps: list[int] = []
    told = m.info(handle).tokens
    while m.info(handle).committed < len(tokens):
        at = m.info(handle).committed
        early = dice.choice([at, at + 1, at + 3, at - 2])
        if told < early <= len(tokens):
            m.extend(handle, tokens[told:early])
            told = early
        drafts = min(dice.choice([0, 0, 0, 2]), len(tokens) - at - 1)
        grant = m.allocate(handle, 1, drafts=drafts)
        assert grant
        if len(steps) == 2:
            m.end_step(steps.pop(0))
        steps.append(m.begin_step())
        m.commit(handle, grant.end - dice.randint(0, drafts))
        if dice.random() < 0.5:
            m.end_step(steps.pop(0))
    if dice.random() < 0.5:
        m.extend(handle, tokens[told:])
        told = len(tokens)
    for step in steps:
        m.end_step(step)
    m.extend(handle, tokens[told:])


def left_by(
    name: str, interval: int | None, prompt: int, tokens: list[int], kept: int, dice: int | None
) -> list[list[bool]]:
    """For each group, which keys of a request are there when it has finished."""
    geometry = cases.GEOMETRIES[name]
    policy = cases.policy_of(geometry, interval)
    m = Remembering(geometry, slabs=UNLIMITED, retention=policy, max_open_steps=2)
    handle = m.open(tokens[:prompt], max_tokens=len(tokens) + 4)
    m.lookup(handle)
    assert m.allocate(handle, prompt)
    step = m.begin_step()
    m.commit(handle, prompt)
    m.end_step(step)
    grid = geometry.grid_tokens
    m.keep(handle, (prompt // grid + kept) * grid)
    if dice is None:
        m.extend(handle, tokens[prompt:])
        if len(tokens) > prompt:
            assert m.allocate(handle, len(tokens) - prompt)
            step = m.begin_step()
            m.commit(handle, len(tokens))
            m.end_step(step)
    else:
        decode(m, handle, tokens, random.Random(dice))
    m.check()
    digests = m.group_digests(handle)
    m.finish(handle)
    m.check()
    return [[m.find_key(g, bytes(d)) >= 0 for d in rows] for g, rows in enumerate(digests)]


@cases.law(150)
@given(
    name=st.sampled_from([*TRIED, "deepseek + draft", "gpt-oss + draft", "three kinds + draft"]),
    interval=cases.intervals,
    prompt=st.integers(1, 30),
    output=st.integers(0, 40),
    kept=st.integers(1, 3),
    dice=st.integers(0, 2**32),
)
def test_tokens_one_by_one_leave_the_keys_of_one_piece(
    name: str, interval: int | None, prompt: int, output: int, kept: int, dice: int
) -> None:
    tokens = list(cases.STORIES[0][:64] * 2)[: prompt + output]
    fine = left_by(name, interval, prompt, tokens, kept, dice)
    assert fine == left_by(name, interval, prompt, tokens, kept, None)


@pytest.mark.parametrize(("kept", "wanted"), [(4, [True, False, False]), (8, [True, True, False])])
def test_a_position_that_is_named_within_a_block_is_kept(kept: int, wanted: list[bool]) -> None:
    """The state went on in place until then; at the next grid point it is a snapshot."""
    geometry = cases.GEOMETRIES["hybrid"]
    m = Remembering(geometry, slabs=UNLIMITED, retention=Sparse(0), max_open_steps=2)
    tokens = list(range(16))
    handle = m.open(tokens[:5], max_tokens=16)
    m.lookup(handle)
    for end in range(5, 15):
        assert m.allocate(handle, end - m.info(handle).committed)
        step = m.begin_step()
        m.commit(handle, end)
        m.end_step(step)
        m.extend(handle, tokens[end : end + 1])
        if end == 6:
            m.keep(handle, kept)
    found = [m.find_key(1, bytes(d)) >= 0 for d in m.group_digests(handle)[1]]
    assert found == wanted
