"""What the rules of the state machine are made of: opening, lookups, grants, and who is who."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import note, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize
from laws import cases
from laws.counting import count
from laws.engine import Engine
from laws.grants import allocate
from laws.oracle import Key
from laws.prompts import IMAGES, ROWS, Token, whole
from laws.records import Request

from kvcache.core.errors import MisuseError
from kvcache.core.records import UNLIMITED, Grant, Hit

LONGEST = 56
"""Tokens that a request may reach, prompt and output."""
MOST_REQUESTS = 7
picks = st.integers(0, 2**16)
sizes = st.lists(st.integers(0, 24), min_size=1, max_size=4)
tails = cases.texts(20)
outputs = st.integers(0, 16)
chunks = st.integers(1, 24)
cuts = st.sampled_from([0, 0, 12, LONGEST])
items = st.sampled_from(["", "", *IMAGES, *ROWS])
"""What stands in a prompt beside tokens."""


def told_again(last: tuple[int, Hit | None], now: tuple[int, Hit]) -> bool:
    """With the same find among the same tokens, what was said of the losses stands."""
    return last == now


class MachineBase(RuleBasedStateMachine):
    """Each step asserts what the laws say of it."""

    engine: Engine

    @initialize(
        name=cases.names,
        interval=cases.intervals,
        spare=st.sampled_from([None, None, 0, 1, 2, 4, 8]),
        longest=st.sampled_from([24, LONGEST]),
        max_open_steps=st.integers(1, 3),
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
        """`spare` slabs beyond what one request of `longest` tokens needs; None: no bound."""
        geometry = cases.GEOMETRIES[name]
        slabs = UNLIMITED if spare is None else geometry.slabs_needed(longest) + spare
        policy = cases.policy_of(geometry, interval)
        self.engine = Engine(
            geometry, policy, slabs=slabs, max_open_steps=max_open_steps, movable=movable
        )
        self.tier: list[set[Key]] = [set() for _ in self.engine.groups]
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

    # ---- what rules are made of

    def open(
        self,
        tokens: Sequence[Token],
        output: int,
        elsewhere: int,
        *,
        salt: str = "",
        lora: str = "",
        foreign: bool = False,
        boundaries: Sequence[int] = (),
    ) -> Request | None:
        """Another replica may have stored a head of the prompt: blocks to a cut, the state there."""
        tokens = whole(tokens[: max(self.longest - output, 1)])
        request = self.engine.open(
            tokens,
            max_tokens=len(tokens) + output,
            salt=salt,
            lora=lora,
            foreign=foreign,
            boundaries=[b for b in boundaries if b <= len(tokens)],
        )
        if request:
            self.history.append(request)
            end = min(elsewhere, request.prompt) // self.engine.oracle.grid
            for g in self.engine.groups:
                needed = self.engine.oracle.needs(g, end * self.engine.oracle.grid)
                keys = (request.key(self.engine.oracle, g, e) for e in needed)
                self.tier[g].update(key for key in keys if key)
        return request

    def lookup(self, request: Request, tier: Sequence[set[Key]]) -> None:
        """Law 4: the hit equals brute force over the keys that are there. Losses add up."""
        engine = self.engine
        last = request.looked_at, request.hit
        hit = engine.lookup(request, tier)
        resident = engine.resident()
        walk = engine.walk(request, resident, tier)
        note(f"{hit} {walk}")
        assert hit.hit_tokens == walk.hit
        assert hit.device_tokens == engine.walk(request, resident).hit
        pending = engine.pending(orphans=True)
        later = engine.walk(request, resident, tier, pending)
        sooner = engine.walk(request, resident, tier, engine.pending())
        assert walk.hit <= hit.pending_tokens <= later.hit
        junctions = {engine.oracle.junction(w) for w in (sooner, later)}
        if any(pending) and (engine.any_twins() or engine.any_told_late() or not engine.unlimited):
            # A key is not pending where another page had it, or was to have it, at the commit, nor
            # where its tokens were not known.
            reach = {w.full for w in (walk, sooner, later)}
            junctions |= {0, *(at for at in reach if at > walk.hit)}
        assert hit.junction in junctions
        n = len(request.tokens)
        assert hit.hit_tokens + sum(hit.lost.values()) == n
        assert min(hit.lost.values()) >= 0
        assert hit.lost["last_block"] == n - engine.oracle.limit(n)
        if engine.unlimited:
            assert hit.lost["evicted"] == 0
        elif not any(pending) and not told_again(last, (n, hit)):
            once = engine.walk(request, engine.ever).hit
            assert hit.hit_tokens + hit.lost["evicted"] >= once, f"{hit}, without eviction {once}"

    def grant(self, request: Request, size: int, drafts: int = 0) -> Grant | None:
        """At most one token beyond the known ones (it is being sampled)."""
        start = request.committed
        if request.state == "waiting":
            sources = (self.engine.resident(), request.present)
            start = self.engine.walk(request, *sources).hit if request.hit else 0
        most = min(request.max_tokens, len(request.tokens) + 1) - start
        size = max(0, min(size, most))
        room = request.max_tokens - start - size
        known = start + size >= len(request.tokens)  # what is known needs no guess
        guesses = max(0, min(drafts, room)) if size and known else 0
        return allocate(self.engine, request, size, guesses)

    def fill_step(self, pick: int, grants: list[int], short: int, use_tier: bool) -> None:
        engine = self.engine
        for i, size in enumerate(grants):
            request = engine.requests[(pick + i) % len(engine.requests)]
            if request.state == "waiting":
                self.lookup(request, self.tier if use_tier else [])
            if request.state == "loading" or request.last_step == engine.steps[-1][0]:
                continue
            self.grant(request, size, drafts=short)
            if request.state == "running" and request.granted > request.committed:
                least = request.committed + 1
                if engine.oracle.whole_grants:
                    least = request.granted - request.drafts
                engine.commit(request, max(least, request.granted - pick % 4))

    def key_of(self, item: np.void) -> Key:
        """What a journal entry stands for. Equal digests may occur in several namespaces."""
        engine, group = self.engine, int(item["group"])
        ns, digest = engine.manager.namespaces[int(item["ns"])], bytes(item["digest"])
        return next(
            key
            for key in engine.ever[group]
            if engine.digests.of(group, key) == digest and engine.digests.namespace(key.space) == ns
        )

    def pin_some(self, pick: int, most: int) -> None:
        """As a tier that stores: by key, of all that got one so far. What is read is what belongs there."""
        engine = self.engine
        fresh = engine.manager.take_keyed()
        self.items = np.concatenate([self.items, fresh]).astype(fresh.dtype)
        first = pick % max(len(self.items), 1)
        chosen = self.items[first : first + most].copy()
        keys = [self.key_of(item) for item in chosen]
        groups = [int(item["group"]) for item in chosen]
        there = [engine.find(g, key) for g, key in zip(groups, keys, strict=True)]
        if engine.frozen:
            there = [-1] * len(there)
        count("pin")
        assert engine.manager.pin(chosen).tolist() == there
        for g, key, number in zip(groups, keys, there, strict=True):
            if number >= 0:
                page = engine.group_page(g, number)
                assert engine.content.pages[page] == engine.content.expected(g, key)
                self.tier[g].add(key)
                engine.pinned.append((g, number))

    def unpin_one(self, group: int, page: int) -> None:
        """Law 15: through its own group, and once. Groups of one class share the page numbers."""
        engine = self.engine
        numbers = np.array([page], np.int32)
        for other in engine.groups:
            if (
                engine.classes[other] == engine.classes[group]
                and (other, page) not in engine.pinned
            ):
                with pytest.raises(MisuseError):
                    engine.manager.unpin(other, numbers)
        count("unpin")
        engine.pinned.remove((group, page))
        engine.manager.unpin(group, numbers)
        if (group, page) not in engine.pinned:
            with pytest.raises(MisuseError):
                engine.manager.unpin(group, numbers)
