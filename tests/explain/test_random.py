"""Random lives of requests: losses always add up, and token differences are those of a naive comparison."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from core.managing import FULL, HYBRID
from explain.explained import regions, require_sum

from kvcache import Geometry, Manager, Sparse
from kvcache.core.explanation import Explanation, NotStored, TokensDiffer
from kvcache.core.media import Media
from kvcache.core.records import Hit

SEEDS = range(40 * int(os.environ.get("KVCACHE_TEST_SCALE", "1")))
GRID = 4


@dataclass(eq=False)
class Life:
    """One request as the test knows it."""

    handle: int
    tokens: list[int]
    hit: Hit | None = None
    looked_up: int = 0
    """Tokens that it had then."""
    elders: tuple[Life, ...] = ()
    """Opened before its first lookup with this find."""


class Lives:
    """Requests that branch off from one another, in a pool that is too small for them."""

    def __init__(self, seed: int, geometry: Geometry, **settings: Any) -> None:
        self.random = random.Random(seed)
        self.slabs = self.random.choice([10, 14, 40])
        self.m = Manager(geometry, slabs=self.slabs, retention=Sparse(), **settings)
        self.open: list[Life] = []
        self.all: list[Life] = []
        self.steps: list[int] = []

    def prompt(self) -> list[int]:
        chance = self.random
        if self.all and chance.random() < 0.8:
            old = chance.choice(self.all).tokens
            head = old[: chance.randint(1, len(old))]
        else:
            head = []
        tail = [chance.randint(0, 2) for _ in range(chance.randint(0 if head else 1, 10))]
        return [*head, *tail][:26]

    def start(self, **how: Any) -> Life:
        tokens = self.prompt()
        life = Life(self.m.open(tokens, max_tokens=30, **how), tokens)
        self.open.append(life)
        self.all.append(life)
        return life

    def look_up(self, life: Life) -> None:
        if self.m.info(life.handle).state != "waiting":
            return
        hit = self.m.lookup(life.handle)
        if (life.hit, life.looked_up) != (hit, len(life.tokens)):
            life.elders = tuple(other for other in self.all if other is not life)
        life.hit, life.looked_up = hit, len(life.tokens)
        require_sum(hit, self.m.explain(life.handle))

    def run(self, life: Life) -> None:
        """A grant, and a commit to the newest open step."""
        self.look_up(life)
        if not self.steps:
            self.steps.append(self.m.begin_step())
        info = self.m.info(life.handle)
        if info.state == "loading" or info.committed >= len(life.tokens):
            return
        if info.state == "waiting":
            left = len(life.tokens) - (life.hit.hit_tokens if life.hit else 0)
        else:
            left = len(life.tokens) - info.committed
        grant = self.m.allocate(life.handle, self.random.randint(1, left))
        if grant is not None and not grant.load and grant.end > grant.start:
            self.m.commit(life.handle, grant.end)

    def end(self, life: Life, *, abort: bool) -> None:
        self.open.remove(life)
        (self.m.abort if abort else self.m.finish)(life.handle)

    def end_step(self) -> None:
        if self.steps:
            self.m.end_step(self.steps.pop(0))

    def check(self) -> None:
        self.m.check()
        for life in self.open:
            if life.hit is not None:
                require_sum(life.hit, self.m.explain(life.handle))


@pytest.mark.parametrize("geometry", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("seed", SEEDS)
def test_losses_add_up_whatever_happened_since(seed: int, geometry: Geometry) -> None:
    lives = Lives(seed, geometry, history_tokens=random.Random(seed).choice([0, 40, 10**6]))
    chance = lives.random
    for _ in range(120):
        operation = chance.randint(0, 11)
        life = chance.choice(lives.open) if lives.open else None
        if life is None or operation < 3:
            how: dict[str, Any] = {"session": chance.choice(["", "a", "b"])}
            how |= {"salt": chance.choice(["", "", "x"]), "lora": chance.choice(["", "", "l"])}
            if chance.random() < 0.2:
                how["media"] = [
                    Media(identifier=chance.choice("ij"), offset_tokens=0, length_tokens=1)
                ]
            lives.start(**how)
        elif operation < 7:
            lives.run(life)
        elif operation < 9:
            lives.end_step()
        elif operation == 9:
            lives.end(life, abort=chance.random() < 0.5)
        elif operation == 10 and lives.m.info(life.handle).state == "running":
            lives.m.preempt(life.handle)
        elif chance.random() < 0.1:
            lives.m.clear(salt=chance.choice([None, "x"]))
        lives.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_tier_holds_adds_up_too(seed: int) -> None:
    lives = Lives(seed, HYBRID)
    for _ in range(40):
        life = lives.start()
        lives.look_up(life)
        assert life.hit is not None
        units = len(life.tokens) // GRID
        held = [np.array([lives.random.random() < 0.8] * units, np.uint8) for _ in range(2)]
        before = lives.m.explain(life.handle)
        found = lives.m.explain(life.handle, elsewhere=held)
        require_sum(life.hit, found)
        there = sum(loss.tokens for loss in found.losses if loss.cause == "elsewhere")
        assert lives.m.lookup(life.handle, held).hit_tokens == found.hit_tokens + there
        assert found.hit_tokens == before.hit_tokens
        lives.run(life)
        lives.end_step()
        lives.end(life, abort=False)


# ---- the naive comparison ----------------------------------------------------------------------------


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def floor(tokens: int) -> int:
    return tokens // GRID * GRID


def expect_differences(life: Life, found: Explanation) -> str:
    """Compares token by token with every request that there was; what the comparison said."""
    split = [loss for loss in found.losses if loss.told == "not_stored"]
    if not split:
        return "nothing"
    start, end = split[0].start, split[-1].end
    own = life.tokens[: life.looked_up]
    lengths = {other.handle: common(own, other.tokens) for other in life.elders}
    best = max(lengths.values(), default=0)
    beyond = [loss for loss in split if loss.start >= max(floor(best), start)]
    if best == 0 or best < start:
        assert regions(found._replace(losses=tuple(split))) == [("not_stored", start, end)]
        assert isinstance(split[0].evidence, NotStored)
        assert split[0].evidence.why == "new"
        return "unrelated"
    nearest = {other for other in life.elders if lengths[other.handle] == best}
    for loss in split:
        if loss.start < floor(best):
            assert loss.end <= floor(best)
            assert loss.cause in {"not_stored", "evicted"}
            assert loss.evidence.other.handle in {o.handle for o in nearest}  # type: ignore[union-attr]
    differing = {other for other in nearest if len(other.tokens) > best and best < len(own)}
    if not differing:
        assert all(loss.cause == "not_stored" for loss in beyond)
        return "the end"
    for loss in beyond:
        if loss.cause == "tokens_differ":
            assert isinstance(loss.evidence, TokensDiffer)
            assert loss.evidence.position == best
            (other,) = [o for o in differing if o.handle == loss.evidence.other.handle]
            assert loss.start == max(floor(best), start)
            assert loss.end == min(floor(len(other.tokens)), end)
            assert loss.evidence.own == tuple(own[best : best + 8])
            assert loss.evidence.others == tuple(other.tokens[best : best + 8])
            assert loss.evidence.before == tuple(own[max(best - 8, 0) : best])
            return "tokens"
    if floor(best) < end:
        assert any(floor(len(other.tokens)) <= max(floor(best), start) for other in differing)
    return "too short"


def test_token_differences_are_those_of_a_naive_comparison() -> None:
    said: dict[str, int] = {}
    for seed in SEEDS:
        lives = Lives(seed, FULL, history_tokens=10**6)
        for _ in range(60):
            operation = lives.random.randint(0, 8)
            life = lives.random.choice(lives.open) if lives.open else None
            if life is None or operation < 3:
                life = lives.start()
                lives.look_up(life)
                words = expect_differences(life, lives.m.explain(life.handle))
                said[words] = said.get(words, 0) + 1
            elif operation < 6:
                lives.run(life)
            elif operation < 8:
                lives.end_step()
            else:
                lives.end(life, abort=lives.random.random() < 0.3)
            for life in lives.open:
                if life.hit is not None:
                    expect_differences(life, lives.m.explain(life.handle))
    assert set(said) == {"nothing", "unrelated", "the end", "tokens", "too short"}, said
