"""A hypothesis state machine over the manager: anything an engine may do, at any moment."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from laws import cases
from laws.loads import abandon_load, end_load
from laws.machine_base import (
    LONGEST,
    MachineBase,
    chunks,
    cuts,
    items,
    outputs,
    picks,
    sizes,
    tails,
)
from laws.prompts import cover, whole
from laws.records import Request
from laws.verify import verify


class ManagerMachine(MachineBase):
    """Each rule asserts what the laws say of it; `verify` runs after every rule."""

    # ---- requests come

    @precondition(lambda self: self.has_room())
    @rule(
        pick=picks,
        cut=st.integers(0, LONGEST),
        tail=tails,
        output=outputs,
        elsewhere=cuts,
        item=items,
        salt=st.sampled_from(["", "", "", "s"]),
        lora=st.sampled_from(["", "", "", "l"]),
        boundaries=st.lists(st.integers(0, LONGEST), max_size=2),
    )
    def open_with_a_shared_head(
        self,
        pick: int,
        cut: int,
        tail: list[int],
        output: int,
        elsewhere: int,
        item: str,
        salt: str,
        lora: str,
        boundaries: list[int],
    ) -> None:
        """Images and embeddings stand at the start of the tail, and soon in heads of others."""
        head = self.history[pick % len(self.history)].tokens[:cut] if self.history else []
        tokens = [*whole(head), *cover(tail, item, pick % 3)]
        self.open(tokens, output, elsewhere, salt=salt, lora=lora, boundaries=boundaries)

    @precondition(lambda self: self.has_room() and self.history)
    @rule(pick=picks, output=outputs, elsewhere=cuts, foreign=st.booleans())
    def open_again(self, pick: int, output: int, elsewhere: int, foreign: bool) -> None:
        """The same prompt: a resend, or a twin. With foreign keys it shares with no native one."""
        old = self.history[pick % len(self.history)]
        prompt = old.tokens[: old.prompt]
        self.open(prompt, output, elsewhere, salt=old.space[1], lora=old.lora, foreign=foreign)

    @precondition(lambda self: self.has_room() and self.history)
    @rule(pick=picks, cut=st.integers(0, LONGEST), tail=tails, output=outputs, chunk=chunks)
    def whole_turn(self, pick: int, cut: int, tail: list[int], output: int, chunk: int) -> None:
        """From open to finish, as far as there is space: fills the cache."""
        head = self.history[pick % len(self.history)].tokens[:cut]
        request = self.open([*whole(head), *tail], output, 0)
        while request and request.committed < request.max_tokens:
            if len(self.engine.steps) == self.engine.max_open_steps:
                self.end_step(pick % 3)
            if request.state == "waiting":
                self.lookup(request, [])
            if not self.grant(request, chunk):
                break
            self.engine.begin_step()
            if request.granted > request.committed:
                self.engine.commit(request)
        while self.engine.steps:
            self.end_step(pick % 3)
        if request:
            self.engine.finish(request)

    @precondition(lambda self: self.any_in("running"))
    @rule(pick=picks, tail=tails, output=outputs)
    def next_turn(self, pick: int, tail: list[int], output: int) -> None:
        old = self.some(pick, "running")
        self.engine.finish(old)
        foreign = old.space[0] == "foreign"
        tokens = [*old.tokens, *tail]
        self.open(tokens, output, 0, salt=old.space[1], lora=old.lora, foreign=foreign)

    @precondition(lambda self: self.engine.requests)
    @rule(pick=picks, more=st.integers(1, 5), sample=cases.token)
    def extend(self, pick: int, more: int, sample: int) -> None:
        request = self.some(pick, "running", "waiting", "loading")
        room = request.max_tokens - len(request.tokens)
        self.engine.extend(request, [sample] * min(more, room))

    # ---- lookup and allocation

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
            end_load(self.engine, load, [i not in bad for i in range(count)])
        for _ in range(steps):
            self.schedule(pick, grants, 0, use_tier=use_tier)
        while self.engine.steps:
            self.end_step(sample)

    @precondition(lambda self: self.engine.steps)
    @rule(sample=cases.token)
    def end_step(self, sample: int) -> None:
        """A token that the step's predecessor sampled is known by now."""
        for work in self.engine.steps[0][1]:
            request = work.request
            if work.live and work.end > len(request.tokens):
                self.engine.extend(request, [sample] * (work.end - len(request.tokens)))
        self.engine.end_step()

    @precondition(lambda self: self.engine.requests)
    @rule(size=st.integers(1, 12))
    def serve_the_oldest(self, size: int) -> None:
        """Law 12: whatever is in its way goes when the manager's advice is followed."""
        engine, request = self.engine, self.engine.requests[0]
        if request.state == "loading":
            end_load(engine, request.load, [True] * len(engine.loads[request.load].items))
        for _ in range(100):
            if request.state == "waiting":
                self.lookup(request, [])
            if self.grant(request, size):
                return
            self.make_room(request)
        raise AssertionError("the oldest request is never served")

    def make_room(self, request: Request) -> None:
        """One thing that `blockage` names goes away."""
        engine = self.engine
        why = engine.manager.blockage(request.handle)
        if why == "preempt":
            younger = [r for r in engine.requests[1:] if r.state != "waiting"]
            engine.preempt(younger[-1])
        elif why == "restart":
            engine.restart(request)
        elif engine.steps:
            self.end_step(0)
        elif engine.loads:
            load = min(engine.loads)
            end_load(engine, load, [False] * len(engine.loads[load].items))
        else:
            self.unpin(0)

    @precondition(lambda self: self.history)
    @rule(salt=st.sampled_from([None, "", "s"]), dice=st.integers(0, 3))
    def clear(self, salt: str | None, dice: int) -> None:
        """At any moment; seldom, since little is left then."""
        if not dice:
            self.engine.clear(salt)
            self.items = self.engine.manager.take_keyed()[:0]

    @precondition(lambda self: len(self.history) > 2)
    @rule(lora=st.sampled_from([None, "l"]), dice=st.integers(0, 5))
    def change_weights(self, lora: str | None, dice: int) -> None:
        """The model's, or an adapter's: at any moment, but seldom."""
        if not dice:
            self.engine.retire(lora)
            self.items = self.engine.manager.take_keyed()[:0]

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
        point = 0 if request.keyless else engine.point(request)
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
            abandon_load(self.engine, load)
            return
        end_load(self.engine, load, [i not in bad for i in range(len(loads[load].items))])

    @rule(pick=picks, most=st.integers(1, 12), keep=st.sampled_from([False, False, True]))
    def store(self, pick: int, most: int, keep: bool) -> None:
        """Pages that have their key still are pinned and read; the pins end now or later."""
        self.pin_some(pick, most)
        while self.engine.pinned and not keep:
            self.unpin(pick)

    @precondition(lambda self: self.engine.pinned)
    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        pinned = self.engine.pinned
        self.unpin_one(*pinned[pick % len(pinned)])

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
            end_load(engine, load, [False] * len(engine.loads[load].items))
        while engine.pinned:
            self.unpin(0)
        assert not any(engine.held())
        if forget:
            engine.clear()
            self.items = self.items[:0]

    @invariant()
    def laws_hold(self) -> None:
        verify(self.engine)
