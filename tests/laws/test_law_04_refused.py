"""Law 4 for requests that wait for space: asked whenever it pleases, with refused allocates in between, each is told
what a first lookup tells."""

from __future__ import annotations

import os
import random

import pytest

from kvcache import (
    ChunkedLocal,
    FullAttention,
    Geometry,
    Manager,
    RecurrentState,
    SlidingWindow,
    Sparse,
)
from kvcache.core.specs import GroupSpec

SEEDS = range(15 * int(os.environ.get("KVCACHE_TEST_SCALE", "1")))
LONGEST = 60
ASKED = 30
MOST = LONGEST + ASKED
TEXTS = [list(range(first, first + LONGEST)) for first in (0, 1000)]

FULL = FullAttention(name="full", layers=1, kv_heads=1, head_dim=64, block_tokens=4)
STATE = RecurrentState(name="state", layers=1, state_bytes_per_layer=2048)
WINDOW = SlidingWindow(name="window", layers=1, kv_heads=1, head_dim=64, block_tokens=4, window=10)
NARROW = SlidingWindow(name="narrow", layers=1, kv_heads=1, head_dim=64, block_tokens=2, window=5)
CHUNKED = ChunkedLocal(
    name="chunked", layers=1, kv_heads=1, head_dim=64, block_tokens=4, chunk_tokens=16
)
GROUPS = [
    (FULL, STATE),
    (FULL, WINDOW, NARROW),
    (FULL, STATE, WINDOW),
    (FULL, CHUNKED),
    (STATE,),
    (WINDOW, NARROW),
]


class World:
    """Requests that compute, and requests that wait while these take the space."""

    def __init__(self, seed: int, geometry: Geometry) -> None:
        self.random = random.Random(seed)
        slabs = geometry.slabs_needed(MOST) * self.random.randint(1, 3)
        policy = Sparse(self.random.choice([0, 0, 16]))
        movable = self.random.random() < 0.5
        self.m = Manager(geometry, slabs=slabs, retention=policy, movable=movable, seed=0)
        self.waiting: dict[int, list[int]] = {}
        self.running: dict[int, list[int]] = {}
        self.steps: list[int] = []

    def prompt(self) -> list[int]:
        tail = [self.random.randint(5000, 5003) for _ in range(self.random.randint(0, 5))]
        return [*self.random.choice(TEXTS)[: self.random.randint(1, LONGEST - 5)], *tail]

    def arrive(self, where: dict[int, list[int]]) -> None:
        tokens = self.prompt()
        marks = [self.random.randint(0, len(tokens)) for _ in range(self.random.randint(0, 2))]
        handle = self.m.open(tokens, max_tokens=MOST, boundaries=marks)
        self.m.lookup(handle)
        where[handle] = tokens

    def compute(self) -> None:
        handle = self.random.choice(list(self.running))
        if not self.steps:
            self.steps.append(self.m.begin_step())
        info = self.m.info(handle)
        at = self.m.lookup(handle).hit_tokens if info.state == "waiting" else info.committed
        left = len(self.running[handle]) - at
        if left:
            grant = self.m.allocate(handle, self.random.randint(1, left))
            if grant is not None:
                self.m.commit(handle, grant.end)

    def leave(self) -> None:
        handle = self.random.choice(list(self.running))
        del self.running[handle]
        (self.m.finish if self.random.random() < 0.8 else self.m.abort)(handle)

    def ask_for_space(self) -> bool:
        """Without a lookup before it; whether it was refused."""
        handle = self.random.choice(list(self.waiting))
        refused = self.m.allocate(handle, self.random.choice([1, ASKED])) is None
        if not refused:
            del self.waiting[handle]
            self.m.abort(handle)
        return refused

    def operate(self) -> bool:
        """Something happens; whether a request was refused."""
        operation = self.random.randint(0, 11)
        if operation < 2 and len(self.waiting) < 4:
            self.arrive(self.waiting)
        elif operation < 5:
            self.arrive(self.running)
        elif operation < 8 and self.running:
            self.compute()
        elif operation == 8 and self.steps:
            self.m.end_step(self.steps.pop(0))
        elif operation == 9 and self.running:
            self.leave()
        elif operation > 9 and self.waiting:
            return self.ask_for_space()
        return False

    def compare(self) -> int:
        """Some of those that wait with a new request of the same tokens; how many hit something."""
        hits = 0
        for handle, tokens in self.waiting.items():
            if self.random.random() < 0.3:
                found = self.m.lookup(handle)
                twin = self.m.open(tokens, max_tokens=MOST)
                first = self.m.lookup(twin)
                self.m.abort(twin)
                assert found[:4] == first[:4]
                hits += found.hit_tokens > 0
        return hits


@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(g.name for g in groups))
def test_law_04_a_request_that_was_refused_finds_what_a_new_one_does(
    groups: tuple[GroupSpec, ...],
) -> None:
    refused = hits = 0
    for seed in SEEDS:
        world = World(seed, Geometry(groups))
        for _ in range(120):
            refused += world.operate()
            hits += world.compare()
        world.m.check()
    assert min(refused, hits) > len(SEEDS)
