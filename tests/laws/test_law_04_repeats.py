"""Law 4 for a request that waits: it is looked up again and again while others come and go, and
each time the answer is that of a first lookup."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from laws import cases
from laws.engine import Engine
from laws.machine import ManagerMachine
from laws.machine_base import LONGEST, chunks, cuts, outputs, picks, tails
from laws.oracle import Key
from laws.records import Request

from kvcache.core.records import Hit

STRANGE = 9
"""A token that no other prompt has."""
AT_A_TIME = 3
"""Waiting requests that are looked up after each rule."""


def found(hit: Hit) -> tuple[int, ...]:
    """All but the losses."""
    return hit.hit_tokens, hit.device_tokens, hit.pending_tokens, hit.junction


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
    """Whoever waits is looked up after each rule, by the tier or without.

    Those that wait stay, the arena is small, and pages are often taken by what leaves no key.
    """

    turn = 0
    everyone_leaves = None

    @initialize(
        name=cases.names,
        interval=cases.intervals,
        spare=st.sampled_from([0, 1, 2, 4, 8]),
        longest=st.sampled_from([24, LONGEST]),
        max_open_steps=st.integers(1, 2),
        movable=st.booleans(),
        first=tails,
        output=outputs,
        elsewhere=cuts,
    )
    def build(
        self,
        name: str,
        interval: int | None,
        spare: int | None,
        longest: int,
        max_open_steps: int,
        movable: bool,
        first: list[int],
        output: int,
        elsewhere: int,
    ) -> None:
        super().build(
            name, interval, spare, longest, max_open_steps, movable, first, output, elsewhere
        )

    @precondition(lambda self: self.any_in("running", "loading"))
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        self.engine.abort(self.some(pick, "running", "loading"))

    @precondition(lambda self: self.has_room())
    @rule(tokens=st.integers(1, LONGEST), share=st.integers(1, LONGEST))
    def press(self, tokens: int, share: int) -> None:
        """Takes pages from the cache, and gives them back empty."""
        request = self.open([STRANGE] * tokens, 0, 0)
        if request:
            self.lookup(request, [])
            self.grant(request, share)
            self.engine.abort(request)

    @precondition(lambda self: self.has_room() and self.history)
    @rule(pick=picks, chunk=chunks)
    def store_again(self, pick: int, chunk: int) -> None:
        """A text of before, from open to finish, as far as there is space."""
        prompt = self.history[pick % len(self.history)].prompt
        self.whole_turn(pick=pick, cut=prompt, tail=[0], output=0, chunk=chunk)

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
TestWaitingMachine.settings = cases.law(100, steps=40)
