"""A hypothesis state machine over the manager: anything an engine may do, at any moment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import note, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from laws import cases
from laws.engine import Engine
from laws.oracle import Prefix
from laws.records import Request

from kvcache.core.errors import MisuseError

LONGEST = 56
"""Tokens that a request may reach, prompt and output."""
MOST_REQUESTS = 7
picks = st.integers(0, 2**16)
sizes = st.lists(st.integers(0, 24), min_size=1, max_size=4)
tails = cases.texts(20)
outputs = st.integers(0, 16)
cuts = st.sampled_from([0, 0, 12, LONGEST])


class ManagerMachine(RuleBasedStateMachine):
    """Each rule asserts what the laws say of it; `verify` runs after every rule."""

    engine: Engine

    @initialize(
        name=cases.names,
        interval=cases.intervals,
        spare=st.sampled_from([None, None, 0, 1, 2, 4, 8]),
        longest=st.sampled_from([24, LONGEST]),
        max_open_steps=st.integers(1, 3),
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
        first: list[int],
        output: int,
        elsewhere: int,
    ) -> None:
        """`spare` pages beyond what one request of `longest` tokens needs; None: no bound."""
        geometry = cases.GEOMETRIES[name]
        pages = None if spare is None else [n + spare for n in geometry.pages_needed(longest)]
        policy = cases.policy_of(geometry, interval)
        self.engine = Engine(geometry, policy, pages=pages, max_open_steps=max_open_steps)
        self.tier: list[set[Prefix]] = [set() for _ in self.engine.groups]
        self.items = self.engine.manager.take_keyed()
        self.history: list[Request] = []
        self.longest = longest
        self.open(first, output, elsewhere)

    # ---- who

    def some(self, pick: int, *states: str) -> Request:
        found = [r for r in self.engine.requests if r.state in states]
        return found[pick % len(found)]

    def any_in(self, *states: str) -> bool:
        return any(r.state in states for r in self.engine.requests)

    def has_room(self) -> bool:
        return len(self.engine.requests) < MOST_REQUESTS

    # ---- requests come

    def open(
        self,
        tokens: Sequence[int],
        output: int,
        elsewhere: int,
        *,
        salt: str = "",
        foreign: bool = False,
        boundaries: Sequence[int] = (),
    ) -> None:
        """Another replica may have stored a head of the prompt: blocks to a cut, the state there."""
        tokens = tokens[: max(self.longest - output, 1)]
        request = self.engine.open(
            tokens,
            max_tokens=len(tokens) + output,
            salt=salt,
            foreign=foreign,
            boundaries=[b for b in boundaries if b <= len(tokens)],
        )
        if request:
            self.history.append(request)
            end = min(elsewhere, request.prompt) // self.engine.oracle.grid
            for g in self.engine.groups:
                needed = self.engine.oracle.needs(g, end * self.engine.oracle.grid)
                self.tier[g].update(request.prefix(e) for e in needed if request.has_key(e))

    @precondition(has_room)
    @rule(
        pick=picks,
        cut=st.integers(0, LONGEST),
        tail=tails,
        output=outputs,
        elsewhere=cuts,
        salt=st.sampled_from(["", "", "", "s"]),
        boundaries=st.lists(st.integers(0, LONGEST), max_size=2),
    )
    def open_with_a_shared_head(
        self,
        pick: int,
        cut: int,
        tail: list[int],
        output: int,
        elsewhere: int,
        salt: str,
        boundaries: list[int],
    ) -> None:
        head = self.history[pick % len(self.history)].tokens[:cut] if self.history else []
        self.open([*head, *tail], output, elsewhere, salt=salt, boundaries=boundaries)

    @precondition(lambda self: self.has_room() and self.history)
    @rule(pick=picks, output=outputs, elsewhere=cuts, foreign=st.booleans())
    def open_again(self, pick: int, output: int, elsewhere: int, foreign: bool) -> None:
        """The same prompt: a resend, or a twin. With foreign keys it shares with no native one."""
        old = self.history[pick % len(self.history)]
        prompt = old.tokens[: old.prompt]
        self.open(prompt, output, elsewhere, salt=old.space[1], foreign=foreign)

    @precondition(lambda self: self.any_in("running"))
    @rule(pick=picks, tail=tails, output=outputs)
    def next_turn(self, pick: int, tail: list[int], output: int) -> None:
        old = self.some(pick, "running")
        self.engine.finish(old)
        foreign = old.space[0] == "foreign"
        self.open([*old.tokens, *tail], output, 0, salt=old.space[1], foreign=foreign)

    @precondition(lambda self: self.engine.requests)
    @rule(pick=picks, count=st.integers(1, 5), sample=cases.token)
    def extend(self, pick: int, count: int, sample: int) -> None:
        request = self.some(pick, "running", "waiting", "loading")
        room = request.max_tokens - len(request.tokens)
        self.engine.extend(request, [sample] * min(count, room))

    # ---- lookup and allocation

    def lookup(self, request: Request, tier: Sequence[set[Prefix]]) -> None:
        """Law 4: the hit equals brute force over the keys that are there. Losses add up."""
        engine = self.engine
        hit = engine.lookup(request, tier)
        resident = engine.resident()
        walk = engine.walk(request, resident, tier)
        junction = walk.attention if engine.attention and engine.recurrent else 0
        note(f"{hit} {walk}")
        assert hit.hit_tokens == walk.hit
        assert hit.device_tokens == engine.walk(request, resident).hit
        pending = engine.pending(orphans=True)
        assert hit.pending_tokens >= walk.hit
        assert hit.pending_tokens <= engine.walk(request, resident, tier, pending).hit
        assert hit.junction == (junction if junction > walk.hit else 0)
        n = len(request.tokens)
        assert hit.hit_tokens + sum(hit.lost.values()) == n
        assert min(hit.lost.values()) >= 0
        assert hit.lost["last_block"] == n - engine.oracle.limit(n)
        if engine.unlimited:
            assert hit.lost["evicted"] == 0
        elif not any(pending):
            once = engine.walk(request, engine.ever).hit
            assert hit.hit_tokens + hit.lost["evicted"] >= once, f"{hit}, without eviction {once}"

    @precondition(lambda self: self.any_in("waiting"))
    @rule(pick=picks, use_tier=st.booleans())
    def lookup_twice(self, pick: int, use_tier: bool) -> None:
        request = self.some(pick, "waiting")
        for _ in range(2):
            self.lookup(request, self.tier if use_tier else [])

    @precondition(lambda self: any(r.hit for r in self.engine.requests))
    @rule(pick=picks, size=st.integers(0, 30))
    def admit_on_an_old_lookup(self, pick: int, size: int) -> None:
        """Pages may have come and gone since; then the hit is looked up again."""
        known = [r for r in self.engine.requests if r.hit]
        self.grant(known[pick % len(known)], size)

    @precondition(lambda self: self.any_in("running"))
    @rule(pick=picks, size=st.integers(0, 30))
    def grant_outside_a_step(self, pick: int, size: int) -> None:
        """Also replaces a grant that was not committed."""
        self.grant(self.some(pick, "running"), size)

    def grant(self, request: Request, size: int) -> None:
        """At most one token beyond the known ones (it is being sampled)."""
        start = request.committed
        if request.state == "waiting":
            sources = (self.engine.resident(), request.present)
            start = self.engine.walk(request, *sources).hit if request.hit else 0
        most = min(request.max_tokens, len(request.tokens) + 1) - start
        self.engine.allocate(request, max(0, min(size, most)))

    # ---- steps

    @precondition(lambda self: self.engine.requests)
    @rule(
        pick=picks,
        grants=sizes,
        short=st.integers(0, 3),
        use_tier=st.booleans(),
        join=st.sampled_from([False, False, True]),
    )
    def schedule(
        self, pick: int, grants: list[int], short: int, use_tier: bool, join: bool = False
    ) -> None:
        """A step for some requests in turn, which stays open; or more work for the newest one."""
        if not (join and self.engine.steps):
            if len(self.engine.steps) == self.engine.max_open_steps:
                self.end_step(0)
            self.engine.begin_step()
        self.fill_step(pick, grants, short, use_tier)

    @precondition(lambda self: self.engine.requests)
    @rule(
        pick=picks,
        grants=sizes,
        steps=st.integers(1, 3),
        sample=cases.token,
        bad=st.sets(st.integers(0, 40), max_size=2),
        use_tier=st.booleans(),
    )
    def run_steps(
        self,
        pick: int,
        grants: list[int],
        steps: int,
        sample: int,
        bad: set[int],
        use_tier: bool,
    ) -> None:
        """The same, to their end; loads in flight end before."""
        for load in sorted(self.engine.loads):
            count = len(self.engine.loads[load].items)
            self.engine.end_load(load, [i not in bad for i in range(count)])
        for _ in range(steps):
            self.schedule(pick, grants, 0, use_tier=use_tier)
        while self.engine.steps:
            self.end_step(sample)

    def fill_step(self, pick: int, grants: list[int], short: int, use_tier: bool) -> None:
        engine = self.engine
        for i, size in enumerate(grants):
            request = engine.requests[(pick + i) % len(engine.requests)]
            if request.state == "waiting":
                self.lookup(request, self.tier if use_tier else [])
            if request.state == "loading" or request.last_step == engine.steps[-1][0]:
                continue
            self.grant(request, size)
            if request.state == "running" and request.granted > request.committed:
                upto = request.granted
                if not engine.recurrent:
                    upto = max(request.committed + 1, upto - short)
                engine.commit(request, upto)

    @precondition(lambda self: self.engine.steps)
    @rule(sample=cases.token)
    def end_step(self, sample: int) -> None:
        """A token that the step's predecessor sampled is known by now."""
        for work in self.engine.steps[0][1]:
            request = work.request
            if work.live and work.end > len(request.tokens):
                self.engine.extend(request, [sample] * (work.end - len(request.tokens)))
        self.engine.end_step()

    # ---- requests go

    @precondition(lambda self: self.any_in("running"))
    @rule(pick=picks)
    def finish(self, pick: int) -> None:
        self.engine.finish(self.some(pick, "running"))

    @precondition(lambda self: self.engine.requests)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        self.engine.abort(self.some(pick, "waiting", "running", "loading"))

    @precondition(lambda self: self.any_in("running", "loading"))
    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        """Law 9: what was computed is there again, to the grid; one token is always left."""
        engine, request = self.engine, self.some(pick, "running", "loading")
        point = request.computed // engine.oracle.grid * engine.oracle.grid
        engine.preempt(request)
        self.lookup(request, [])
        assert request.hit
        if engine.unlimited and point < len(request.tokens) and point <= request.key_limit:
            assert request.hit.hit_tokens >= point

    # ---- tiers

    @precondition(lambda self: self.engine.loads)
    @rule(pick=picks, bad=st.sets(st.integers(0, 8), max_size=2), late=st.booleans())
    def end_load(self, pick: int, bad: set[int], late: bool) -> None:
        loads = self.engine.loads
        load = sorted(loads)[pick % len(loads)]
        if late and loads[load].request:
            self.engine.abandon_load(load)
            return
        self.engine.end_load(load, [i not in bad for i in range(len(loads[load].items))])

    @rule(pick=picks, count=st.integers(1, 12), keep=st.booleans())
    def store(self, pick: int, count: int, keep: bool) -> None:
        """Pages that have their key still are pinned and read; the pins end now or later."""
        engine = self.engine
        fresh = engine.manager.take_keyed()
        self.items = np.concatenate([self.items, fresh]).astype(fresh.dtype)
        first = pick % max(len(self.items), 1)
        chosen = self.items[first : first + count]
        pages = [(int(i["group"]), int(i["page"])) for i in chosen]
        keys = [self.key_of(item) for item in chosen]
        there = [engine.find(p[0], key) == p[1] for p, key in zip(pages, keys, strict=True)]
        assert engine.manager.pin(chosen).tolist() == there
        for page, key, good in zip(pages, keys, there, strict=True):
            if good:
                assert engine.content.pages[page] == engine.content.expected(page[0], key)
                self.tier[page[0]].add(key)
                engine.pinned.append(page)
        while engine.pinned and not keep:
            self.unpin(pick)

    def key_of(self, item: np.void) -> Prefix:
        """The prefix that a key stands for. Equal digests may occur in several namespaces."""
        engine = self.engine
        ns = engine.manager.namespaces[int(item["ns"])]
        return next(
            p
            for p in engine.ever[int(item["group"])]
            if engine.keys.digest(p) == bytes(item["digest"]) and engine.keys.namespace(p[0]) == ns
        )

    @precondition(lambda self: self.engine.pinned)
    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        pinned = self.engine.pinned
        group, page = pinned.pop(pick % len(pinned))
        self.engine.manager.unpin(group, np.array([page], np.int32))
        if (group, page) not in pinned:
            with pytest.raises(MisuseError):
                self.engine.manager.unpin(group, np.array([page], np.int32))

    # ---- always

    @precondition(lambda self: len(self.engine.requests) > 3)
    @rule(forget=st.booleans())
    def everyone_leaves(self, forget: bool) -> None:
        """Law 1: then nothing is held."""
        engine = self.engine
        for request in list(engine.requests):
            engine.abort(request)
        while engine.steps:
            engine.end_step()
        for load in list(engine.loads):
            engine.end_load(load, [False] * len(engine.loads[load].items))
        while engine.pinned:
            self.unpin(0)
        assert engine.held() == [0] * len(engine.groups)
        if forget:
            engine.clear()
            self.items = self.items[:0]

    @invariant()
    def laws_hold(self) -> None:
        self.engine.verify()
