"""Law 4 for a request that waits: it is looked up again and again while others come and go, and
each time the answer is that of a first lookup."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis.stateful import invariant
from laws import cases
from laws.drive import compute, hit_of, open_request, run
from laws.engine import Engine
from laws.grants import allocate
from laws.machine import ManagerMachine
from laws.oracle import Key
from laws.records import Request
from laws.verify import verify

from kvcache.core.records import UNLIMITED, Hit

AT_A_TIME = 3
"""Waiting requests that are looked up after each rule."""
FOUND = ("hit_tokens", "device_tokens", "pending_tokens", "junction")


def found(hit: Hit) -> tuple[int, ...]:
    return tuple(getattr(hit, name) for name in FOUND)


def fresh_hit(engine: Engine, request: Request, tier: Sequence[set[Key]]) -> Hit:
    """What a new request with the same tokens is told."""
    twin = engine.open(
        request.tokens[: request.prompt],
        max_tokens=request.max_tokens,
        salt=request.space[1],
        lora=request.lora,
        foreign=request.space[0] == "foreign",
    )
    assert twin, "its twin was admitted"
    assert twin.space == request.space
    engine.extend(twin, [int(token) for token in request.tokens[request.prompt :]])
    hit = engine.lookup(twin, tier)
    engine.abort(twin)
    return hit


class WaitingMachine(ManagerMachine):
    """The same rules; whoever waits is looked up after each of them, by the tier or without."""

    turn = 0

    def lookup(self, request: Request, tier: Sequence[set[Key]]) -> None:
        before = self.told.get(request.handle) if request.state == "waiting" else None
        super().lookup(request, tier)
        hit = request.hit
        assert hit
        self.told[request.handle] = (len(request.tokens), hit)
        if request.retired:
            assert found(hit) == (0, 0, 0, 0)
            return
        fresh = fresh_hit(self.engine, request, tier)
        assert found(hit) == found(fresh), f"repeated: {hit}, first: {fresh}"
        if hit.lost != fresh.lost:  # what was told before of the same find stands
            assert before
            assert (before[0], found(before[1])) == (len(request.tokens), found(hit))
            assert hit.lost == before[1].lost, f"repeated: {hit}, before: {before}, first: {fresh}"
        self.notice(request, hit, before)

    def notice(self, request: Request, hit: Hit, before: tuple[int, Hit] | None) -> None:
        """Counts what came about between two lookups."""
        engine = self.engine
        pages = {
            (g, key): engine.find(g, key)
            for g in engine.oracle.full
            for end in engine.oracle.needs(g, hit.device_tokens)
            if (key := request.key(engine.oracle, g, end))
        }
        old = self.pages.get(request.handle, {})
        self.pages[request.handle] = pages
        if before:
            tokens, last = before
            engine.saw("repeated hit: longer", hit.device_tokens > last.device_tokens)
            engine.saw("repeated hit: shorter", hit.device_tokens < last.device_tokens)
            engine.saw("repeated hit: more tokens", len(request.tokens) > tokens)
            engine.saw("repeated hit: pending", hit.pending_tokens != last.pending_tokens)
            moved = any(old.get(key, page) != page for key, page in pages.items())
            engine.saw("repeated hit: other pages", moved)

    @property
    def told(self) -> dict[int, tuple[int, Hit]]:
        """Of each request that waits: the tokens known at its last lookup, and the answer."""
        return self.__dict__.setdefault("_told", {})

    @property
    def pages(self) -> dict[int, dict[tuple[int, Key], int]]:
        return self.__dict__.setdefault("_pages", {})

    @invariant()
    def who_waits_is_told_what_is_there(self) -> None:
        waiting = [r for r in self.engine.requests if r.state == "waiting"]
        for handle in set(self.told) - {r.handle for r in waiting}:
            self.told.pop(handle)
            self.pages.pop(handle, None)
        self.turn += 1
        for i in range(min(AT_A_TIME, len(waiting))):
            request = waiting[(self.turn + i) % len(waiting)]
            self.lookup(request, self.tier if (self.turn + i) % 4 == 0 else [])


TestWaitingMachine = WaitingMachine.TestCase
TestWaitingMachine.settings = cases.law(120, steps=40)
