"""Law 4 for requests that wait, in arenas of some hundred pages: whatever others do meanwhile, a
lookup tells what a first one tells, and a grant adopts the pages that have the keys now."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st
from laws import cases
from numpy.typing import NDArray

from kvcache import Manager
from kvcache.core.records import Hit

TEXT_TOKENS = 400
WAITING = 3
ROUNDS = 60
TRIED = ["full", "two sizes", "hybrid", "coprime", "gpt-oss", "kimi", "three kinds", "deepseek"]


class Crowd:
    """Some requests wait, others come, compute and go. All have heads of the same few texts."""

    def __init__(
        self, name: str, interval: int | None, room: int, movable: bool, seed: int
    ) -> None:
        geometry = cases.GEOMETRIES[name]
        self.random = random.Random(seed)
        need = geometry.slabs_needed(TEXT_TOKENS + 40)
        self.m = Manager(
            geometry,
            slabs=need * (4 + room) // 4,
            retention=cases.policy_of(geometry, interval),
            max_open_steps=2,
            movable=movable,
        )
        self.full = [g for g, r in enumerate(geometry.rules) if r.kind == "full"]
        self.texts = [self.random.choices(range(50), k=TEXT_TOKENS) for _ in range(2)]
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.steps: list[int] = []
        self.tokens: dict[int, list[int]] = {}
        self.pinned: list[tuple[int, int]] = []
        self.last: dict[int, tuple[int, Hit]] = {}
        self.seen: Counter[str] = Counter()

    def head(self) -> list[int]:
        text = self.random.choice(self.texts)
        return text[: self.random.choice([150, 300, TEXT_TOKENS, self.random.randint(1, 400)])]

    def open(self, tokens: list[int]) -> int:
        handle = self.m.open(tokens, max_tokens=TEXT_TOKENS + 40)
        self.tokens[handle] = list(tokens)
        return handle

    # ---- what others do

    def step(self, handle: int, most: int) -> bool:
        """Grants and commits what is known; the step stays open."""
        if len(self.steps) == 2:
            self.end_step()
        if self.m.info(handle).state == "waiting":
            self.m.lookup(handle)
        info = self.m.info(handle)
        at = info.committed
        grant = self.m.allocate(handle, 0) if info.state == "waiting" else None
        at = grant.end if grant else at
        if info.state == "waiting" and not grant:
            return False
        size = min(most, len(self.tokens[handle]) - at)
        if size <= 0 or not self.m.allocate(handle, size):
            return size <= 0
        self.steps.append(self.m.begin_step())
        self.m.commit(handle, self.m.info(handle).granted)
        return True

    def end_step(self) -> None:
        if self.steps:
            self.m.end_step(self.steps.pop(0))

    def store(self, text: list[int] | None = None) -> None:
        """From open to finish, as far as there is space."""
        handle = self.open(text or self.head())
        chunk = self.random.choice([16, 100, TEXT_TOKENS])
        while self.m.info(handle).committed < len(self.tokens[handle]):
            if not self.step(handle, chunk):
                break
        while self.steps:
            self.end_step()
        self.m.finish(handle)

    def blocks_return(self) -> None:
        """Full blocks leave and come back, while what is kept beside them is pinned and stays."""
        text = self.tokens[self.random.choice(self.waiting)]
        self.store(text)
        self.unpin()
        keyed = self.m.take_keyed()
        self.pin_items(keyed[np.isin(keyed["group"], self.full, invert=True)])
        for call in (
            self.press,
            lambda: self.store(text[: len(text) // 2]),
            lambda: self.store(text),
        ):
            self.look_at_all()
            call()

    def begin(self) -> None:
        """Computes later, side by side with others of the same text."""
        if len(self.running) < 3:
            handle = self.open(self.head())
            if self.step(handle, self.random.choice([1, 60, TEXT_TOKENS])):
                self.running.append(handle)
            else:
                self.m.abort(handle)

    def go_on(self) -> None:
        for handle in self.running:
            self.step(handle, self.random.choice([1, 16, 100]))

    def leave(self) -> None:
        if self.running:
            handle = self.running.pop(self.random.randrange(len(self.running)))
            self.random.choice([self.m.finish, self.m.abort])(handle)

    def press(self) -> None:
        """Takes pages from the cache, and gives them back empty."""
        handle = self.open([99] * self.random.choice([20, 100, 300]))
        self.m.lookup(handle)
        self.seen["pressed"] += self.m.allocate(handle, len(self.tokens[handle])) is not None
        self.m.abort(handle)

    def pin(self) -> None:
        items = self.m.take_keyed()
        self.pin_items(items[self.random.randrange(len(items) + 1) :][:30])

    def pin_items(self, items: NDArray[np.void]) -> None:
        if len(self.pinned) < 40:
            groups = items["group"].tolist()
            pages = self.m.pin(items).tolist()
            self.pinned += [(g, p) for g, p in zip(groups, pages, strict=True) if p >= 0]

    def unpin(self) -> None:
        for group, page in self.pinned:
            self.m.unpin(group, np.array([page], np.int32))
        self.pinned = []

    def clear(self) -> None:
        if self.random.random() < 0.1:
            self.m.clear()

    def more_tokens(self) -> None:
        handle = self.random.choice(self.waiting)
        known = len(self.tokens[handle])
        more = self.texts[0][known : known + self.random.randint(1, 9)]
        self.m.extend(handle, more)
        self.tokens[handle] += more

    def another_waits(self) -> None:
        if len(self.waiting) >= WAITING:
            self.m.abort(self.waiting.pop(0))
        self.waiting.append(self.open(self.head()))

    # ---- the law

    def look_at_all(self) -> None:
        for handle in self.waiting:
            self.look(handle)

    def look(self, handle: int) -> None:
        known, tier = len(self.tokens[handle]), self.tier() if self.random.random() < 0.2 else None
        hit = self.m.lookup(handle, tier)
        fresh = self.m.open(self.tokens[handle], max_tokens=TEXT_TOKENS + 40)
        first = self.m.lookup(fresh, tier)
        self.m.abort(fresh)
        assert hit[:4] == first[:4], f"repeated: {hit}, first: {first}"
        assert hit.hit_tokens + sum(hit.lost.values()) == known
        told, before = self.last.get(handle, (0, None))
        self.last[handle] = known, hit
        if hit.lost != first.lost:  # what was told before of the same find stands
            assert (told, before) == (known, hit), f"first: {first}"
        if before:
            self.seen["longer"] += hit.device_tokens > before.device_tokens
            self.seen["shorter"] += hit.device_tokens < before.device_tokens

    def tier(self) -> list[NDArray[np.uint8]]:
        """Heads of what a tier may hold, with holes."""
        n = self.random.randint(0, TEXT_TOKENS // 4)
        maps = [np.ones(n, np.uint8) for _ in self.m.geometry.groups]
        for present in maps:
            if n and self.random.random() < 0.3:
                present[self.random.randrange(n)] = 0
        return maps

    def admit(self, handle: int) -> None:
        """For a moment: then it waits again, and was never looked up."""
        hit = self.m.lookup(handle)
        digests = self.m.group_digests(handle)
        expected = {g: [self.m.find_key(g, bytes(d)) for d in digests[g]] for g in self.full}
        grant = self.m.allocate(handle, 0)
        if grant is None:
            return
        self.m.take_moves()
        assert grant.hit_tokens <= hit.hit_tokens
        self.seen["admitted"] += grant.hit_tokens > 0
        for g in self.full:
            table = self.m.block_table(handle, g).tolist()
            assert table == expected[g][: len(table)]
            assert -1 not in table
        self.m.preempt(handle)
        self.last.pop(handle, None)

    def round(self) -> None:
        calls = [self.store, self.begin, self.go_on, self.go_on, self.end_step, self.leave]
        calls += [self.press, self.press, self.pin, self.unpin, self.clear, self.more_tokens]
        self.random.choice([*calls, self.another_waits, self.blocks_return])()
        self.look_at_all()
        for handle in self.waiting:
            if self.random.random() < 0.15:
                self.admit(handle)
        self.seen["moved"] += len(self.m.take_moves())
        self.m.check()

    def run(self) -> None:
        for _ in range(WAITING):
            self.another_waits()
        for _ in range(ROUNDS):
            self.round()


@cases.law(60)
@given(
    name=st.sampled_from(TRIED),
    interval=cases.intervals,
    room=st.integers(0, 6),
    movable=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_law_04_a_repeated_lookup_is_as_good_as_a_first_one(
    name: str, interval: int | None, room: int, movable: bool, seed: int
) -> None:
    Crowd(name, interval, room, movable, seed).run()


@pytest.mark.parametrize("name", ["hybrid", "three kinds"])
def test_law_04_crowds_meet_what_the_law_is_about(name: str) -> None:
    totals: Counter[str] = Counter()
    for seed in range(8):
        crowd = Crowd(name, 1, seed % 4, True, seed)
        crowd.run()
        totals += crowd.seen
    assert min(totals[what] for what in ("longer", "shorter", "admitted", "moved")) > 8, totals


def test_law_04_what_an_open_step_writes_is_pending_in_each_lookup() -> None:
    m = Manager(cases.GEOMETRIES["hybrid"], slabs=200, retention=cases.Dense(), max_open_steps=2)
    text = list(range(41))
    waiting, writer = m.open(text), m.open(text)
    m.lookup(writer)
    found = [m.lookup(waiting)[:4]]
    for end in (16, 32):
        assert m.allocate(writer, 16)
        m.begin_step()
        m.commit(writer, end)
        found += [m.lookup(waiting)[:4] for _ in range(2)]
    m.end_step(1)
    found += [m.lookup(waiting)[:4] for _ in range(2)]
    m.abort(writer)
    found += [m.lookup(waiting)[:4] for _ in range(2)]
    wanted = [(0, 0), *[(0, 16)] * 2, *[(0, 32)] * 2, *[(16, 32)] * 2, *[(16, 16)] * 2]
    assert found == [(hit, hit, pending, 0) for hit, pending in wanted]
