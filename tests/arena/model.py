"""A model of the arena in which an adversary answers every choice.

A request of length L computes one page of every group in each step. A group keeps all of its pages
(full attention), or the last w of them (a window; a state is a window of one page), so while it
writes it holds L, or w + 1. Pages are found again by key after a preemption, and by other requests
that share the prefix. One engine step: transfers tick, the adversary pins pages for new ones, then
the requests try, oldest first. Whenever a page may be taken in several places, all are followed.

    state   slabs      (size class, pages) of every slab that a class owns; empty ones are not listed
            progress   of each request: -1 finished, 0 waiting, else tokens computed
            flags      bit r: request r restarted once, and keeps its quota since
            frozen     the guaranteed request was refused and has not been served since
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from arena.pages import COPY, HOLDERS, KEY, PIN, USED, Slabs, aged, change, let_go, put, tidy
from arena.rules import Instance, Rule, slabs_needed, smallest_arena


class State(NamedTuple):
    slabs: Slabs
    progress: tuple[int, ...]
    flags: int
    frozen: bool


class Model:
    """All states that one engine step can lead to, under one rule."""

    def __init__(self, instance: Instance, rule: Rule) -> None:
        self.instance, self.rule = instance, rule
        self.total = smallest_arena(instance)
        self.requests = range(len(instance.lengths))
        self.nothing = (0,) * len(instance.pages_per_slab)
        self.needs = [slabs_needed(instance, n, rule) for n in instance.lengths]
        self.key = lru_cache(maxsize=None)(self._key)
        self.turn = lru_cache(maxsize=1 << 16)(self._turn)
        self.taken = lru_cache(maxsize=1 << 16)(self._taken)

    def start(self) -> State:
        return State((), (0,) * len(self.requests), 0, frozen=False)

    def ended(self, state: State) -> bool:
        return all(p < 0 for p in state.progress[: 1 if self.instance.stream else None])

    def successors(self, state: State) -> set[State]:
        states = {state._replace(slabs=self._tick(state))}
        if not (state.frozen and self.rule.freeze_pins):
            states = {after for s in states for after in self._pins(s)}
        for request in self._order(state):
            states = {after for s in states for after in self.turn(s, request)}
        return states

    # ---- keys and pages

    def _key(self, request: int, group: int, index: int) -> int:
        owner = 0 if index <= self.instance.shared else request + 1
        return 1 + (index * 8 + owner) * len(self.instance.groups) + group

    def _read(self, request: int, at: int) -> list[int]:
        """Keys that a request holds after `at` tokens."""
        return [
            self.key(request, g, i)
            for g, group in enumerate(self.instance.groups)
            for i in range(max(1, at - group.window + 1) if group.window else 1, at + 1)
        ]

    def _tick(self, state: State) -> Slabs:
        """A step has ended; keys that nobody will ask for again are all the same, zero."""
        alive = {
            self.key(r, g, i) << KEY
            for r in self.requests
            if state.progress[r] >= 0
            for g in range(len(self.instance.groups))
            for i in range(1, self.instance.lengths[r] + 1)
        }
        junk = bool(self.instance.transfers)
        return tidy(
            [
                (c, tuple(p for q in pages for p in aged(q, alive, junk=junk)))
                for c, pages in state.slabs
            ]
        )

    def _pins(self, state: State) -> set[State]:
        reached, last = {state}, {state}
        for _ in range(self.instance.transfers):
            last = {
                s._replace(slabs=tidy(put(s.slabs, at, (c, change(pages, p, p + 2 - (p & PIN))))))
                for s in last
                if sum(p & PIN in {1, 2} for _, pages in s.slabs for p in pages)
                < self.instance.transfers
                for at, (c, pages) in enumerate(s.slabs)
                for p in set(pages)
                if p & PIN not in {1, 2} and not p & COPY
            }
            reached |= last
        return reached

    # ---- the turn of one request

    def guaranteed(self, state: State) -> int:
        wanted = [r for r in self.requests if state.progress[r] >= 0]
        running = [r for r in wanted if state.progress[r] > 0]
        if self.rule.guaranteed == "running":
            return running[0] if running else -1
        return wanted[0] if wanted else -1

    def _order(self, state: State) -> list[int]:
        """By age; where running ones are guaranteed they also come first."""
        late = self.rule.guaranteed == "running"
        return sorted(self.requests, key=lambda r: (late and state.progress[r] <= 0, r))

    def _turn(self, state: State, request: int) -> set[State]:
        if state.progress[request] < 0:
            return {state}
        first = self.guaranteed(state) == request
        if not first:
            return {state} if state.frozen and self.rule.freeze else self._younger(state, request)
        quota = self._slab_sum(state.slabs, request)
        if self.rule.quota == "eager" and quota > self.total:
            return {self._give_back(state, request)}
        served = self._serve(state, request, first=True)
        if served:
            return {s._replace(frozen=False) for s in served}
        return {self._refused(state, request)}

    def _younger(self, state: State, request: int) -> set[State]:
        return self._serve(state, request, first=False) or {state}

    def _serve(self, state: State, request: int, *, first: bool) -> set[State]:
        """All outcomes of its next token; younger ones are preempted until it can be had."""
        never = self.guaranteed(state)
        running = [r for r in self.requests if state.progress[r] > 0 and r > request and r != never]
        while not (outcomes := self._advance(state, request, first=first)):
            if not running:
                return set() if first else {state}
            state = self._give_back(state, running.pop())
        return outcomes

    def _refused(self, state: State, request: int) -> State:
        """The guaranteed request got nothing: all younger ones are preempted, pins may be left."""
        for younger in self.requests[request + 1 :]:
            if state.progress[younger] > 0:
                state = self._give_back(state, younger)
        pinned = any(p & PIN for _, pages in state.slabs for p in pages)
        if pinned or self.rule.quota != "lazy" or state.flags >> request & 1:
            return state._replace(frozen=True)
        state = self._give_back(state, request)
        return state._replace(flags=state.flags | 1 << request, frozen=False)

    def _advance(self, state: State, request: int, *, first: bool) -> set[State]:
        """One more token: adopt the hit if it starts, take a page of every group, let go."""
        slabs, done = state.slabs, state.progress[request]
        if done == 0:
            again = self.rule.quota == "lazy" and bool(state.flags >> request & 1)
            cut = first and self.rule.cut_hits and (again or self.rule.quota == "eager")
            slabs, done = self._adopt(slabs, request, cut=cut)
        at = done + 1
        last = at == self.instance.lengths[request]
        progress = (0 if self.instance.stream and request else -1) if last else at
        keep = set() if last else set(self._read(request, at))
        changed = list(state.progress)
        changed[request] = progress
        return {
            State(self._let_go(s, request, keep), tuple(changed), state.flags, state.frozen)
            for s in self.taken(slabs, request, at, first)
        }

    def _adopt(self, slabs: Slabs, request: int, *, cut: bool) -> tuple[Slabs, int]:
        """The longest hit, or the longest one that keeps the quota."""
        resident = {p >> KEY for _, pages in slabs for p in pages if not p & COPY}
        for at in range(self.instance.lengths[request] - 1, 0, -1):
            keys = set(self._read(request, at))
            if keys <= resident:
                adopted = tidy(
                    (c, tuple(self._with_holder(p, request, keys) for p in pages))
                    for c, pages in slabs
                )
                if not cut or self._slab_sum(adopted, request) <= self.total:
                    return adopted, at
        return slabs, 0

    @staticmethod
    def _with_holder(page: int, request: int, keys: set[int]) -> int:
        found = page >> KEY in keys and not page & COPY
        return page | 1 << (HOLDERS + request) if found else page

    def _taken(self, slabs: Slabs, request: int, at: int, first: bool) -> set[Slabs]:
        """Every way to take one page of each group."""
        bounded = first and self.rule.quota != "off" and self.rule.take_in_quota
        bounded = bounded and self._slab_sum(slabs, request) <= self.total
        new = list(self.nothing)
        for group in self.instance.groups:
            new[group.size_class] += 1
        own = bounded and self.rule.whole_slabs
        own = own and self._slab_sum(slabs, request, new) > self.total
        reached = {slabs}
        for g, group in enumerate(self.instance.groups):
            key = self.key(request, g, at)
            reached = {
                after
                for s in reached
                for after in self._places(s, group.size_class, request, key, own=own)
                if not bounded or self._slab_sum(after, request) <= self.total
            }
        return reached

    def _places(
        self, slabs: Slabs, size_class: int, request: int, key: int, *, own: bool
    ) -> list[Slabs]:
        """Arenas with one page more: in its own slabs, in slabs nobody holds anything of, elsewhere."""
        bit = 1 << (HOLDERS + request)
        copy = any(p >> KEY == key and not p & COPY for _, pages in slabs for p in pages)
        page = key << KEY | bit | (COPY if copy else 0)
        mine, whole, others = [], [], []
        for at, (c, pages) in enumerate(slabs):
            if not any(p & USED for p in pages):
                whole.append(tidy(put(slabs, at, (size_class, (page,)))))
                where = whole
            else:
                where = mine if any(p & bit for p in pages) else others
            if c != size_class:
                continue
            if len(pages) < self.instance.pages_per_slab[c]:
                where.append(tidy(put(slabs, at, (c, (*pages, page)))))
            where += [
                tidy(put(slabs, at, (c, change(pages, p, page))))
                for p in set(pages)
                if not p & USED
            ]
        if len(slabs) < self.total:
            whole.append(tidy((*slabs, (size_class, (page,)))))
        if own:
            return mine or whole
        return mine + whole + others

    def _give_back(self, state: State, request: int) -> State:
        """Preempted: its pages stay under their keys, without it."""
        changed = list(state.progress)
        changed[request] = 0
        return state._replace(
            slabs=self._let_go(state.slabs, request, set()), progress=tuple(changed)
        )

    def _let_go(self, slabs: Slabs, request: int, keep: set[int]) -> Slabs:
        bit, fence = 1 << (HOLDERS + request), self.instance.fence
        return tidy(
            [
                (c, tuple(q for p in pages for q in let_go(p, bit, keep, fence)))
                for c, pages in slabs
            ]
        )

    def _slab_sum(self, slabs: Slabs, request: int, new: list[int] | None = None) -> int:
        """The sum over classes of max(slabs with a page of the request's, slabs it needs)."""
        bit = 1 << (HOLDERS + request)
        held = list(new or self.nothing)
        for c, pages in slabs:
            for page in pages:
                if page & bit:
                    held[c] += 1
                    break
        return sum(map(max, held, self.needs[request]))
