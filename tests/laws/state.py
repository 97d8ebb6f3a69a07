"""What the toy engine knows at any moment: keys that are there or coming, pages that are held."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from laws import cases
from laws.audit import Audit
from laws.content import Content, Digests
from laws.counting import seen
from laws.oracle import Key, Oracle, Space, Walk
from laws.records import Load, Page, Request, Work, ceil_div
from laws.space import Arena

from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.records import UNLIMITED
from kvcache.core.retain import RetentionPolicy

KeySets = Sequence[set[Key]]


class EngineState:
    """`ever` holds what got a key so far; without eviction that is the index."""

    def __init__(
        self,
        geometry: Geometry,
        policy: RetentionPolicy,
        *,
        slabs: int = UNLIMITED,
        max_open_steps: int = 2,
        movable: bool = False,
    ) -> None:
        self.geometry, self.policy, self.slabs = geometry, policy, slabs
        self.manager = Manager(
            geometry,
            slabs=slabs,
            retention=policy,
            max_open_steps=max_open_steps,
            movable=movable,
            events=True,
        )
        self.oracle = Oracle.of(geometry)
        self.arena = Arena(geometry, slabs)
        self.content = Content(self.oracle)
        self.digests = Digests(self.oracle)
        self.name = cases.name_of(geometry)
        self.audit = Audit(self.oracle, self.digests, self.name)
        self.groups = range(len(geometry.groups))
        self.classes = list(geometry.class_of_group)
        self.max_open_steps, self.movable = max_open_steps, movable
        self.requests: list[Request] = []
        """In the order of their opening: the first is the guaranteed one."""
        self.frozen: Request | None = None
        """The guaranteed request, while its last allocation found no space."""
        self.steps: deque[tuple[int, list[Work]]] = deque()
        self.freed: dict[int, set[Page]] = {}
        """Pages given up under an open step, by step."""
        self.touched: dict[int, set[Page]] = {}
        """Cached pages that may be held until a step ends, so that they get their place then."""
        self.loads: dict[int, Load] = {}
        self.ever: list[set[Key]] = [set() for _ in self.groups]
        self.pinned: list[tuple[int, int]] = []
        """Group and page of each pin."""
        self.epoch = 0
        """Of the weights."""
        self.versions: dict[str, int] = {}
        """Of the adapters that were loaded again."""
        self.evictions = 0
        """So many were counted."""

    def saw(self, what: str, times: int = 1) -> None:
        """Something came about."""
        if times:
            seen[what, self.name] += times

    @property
    def unlimited(self) -> bool:
        return self.slabs == UNLIMITED

    # ---- keys

    def space(self, *, foreign: bool, salt: str, lora: str) -> Space:
        """Who shares with a request that is opened now."""
        who = ("foreign" if foreign else "native", salt)
        version = self.versions.get(lora, 0)
        return (*who, lora, str(version), str(self.epoch)) if lora or self.epoch else who

    def find(self, group: int, key: Key) -> int:
        """The page under which a lookup would find a key, or -1."""
        namespace = self.digests.namespace(key.space)
        return self.manager.find_key(group, self.digests.of(group, key), namespace=namespace)

    def resident(self) -> list[set[Key]]:
        """Of the keys that ever were, those that are there now."""
        return [{k for k in self.ever[g] if self.find(g, k) >= 0} for g in self.groups]

    def pending(self, *, orphans: bool = False) -> list[set[Key]]:
        """Keys that open steps and loads are writing now.

        With `orphans` also those of loads whose request has left: their keys may still come.
        """
        keys: list[set[Key]] = [set() for _ in self.groups]
        for _, works in self.steps:
            for work in works:
                if work.live:
                    self.add_keys(work.request, work.start, work.end, keys)
        for load in self.loads.values():
            if (load.request or orphans) and not load.muted:
                for group, _, key in load.items:
                    keys[group].add(key)
        return keys

    def any_twins(self) -> bool:
        """Do open steps write a key twice, or did when they were committed, for requests that may have left?"""
        if any(work.twin for _, works in self.steps for work in works):
            return True
        seen_keys: list[set[Key]] = [set() for _ in self.groups]
        for _, works in self.steps:
            for work in works:
                keys: list[set[Key]] = [set() for _ in self.groups]
                self.add_keys(work.request, work.start, work.end, keys)
                if any(a & b for a, b in zip(keys, seen_keys, strict=True)):
                    return True
                for a, b in zip(seen_keys, keys, strict=True):
                    a.update(b)
        return False

    def any_told_late(self) -> bool:
        """Was a token told after the commit of an open step that computes it?"""
        works = (work for _, works in self.steps for work in works)
        return any(work.told < min(work.end, len(work.request.tokens)) for work in works)

    def add_keys(self, request: Request, start: int, end: int, keys: list[set[Key]]) -> None:
        """What gets a key when a request goes from `start` to `end`."""
        for g in self.groups if not request.keyless else ():
            ends = self.oracle.keyed(g, self.kept(request, g, start, end), start, end)
            found = (request.writes(self.oracle, g, e) for e in ends)
            keys[g].update(k for k in found if k)

    def kept(self, request: Request, group: int, start: int, end: int) -> list[int]:
        marks = [*request.marks, request.junction]
        return self.oracle.kept(self.policy, group, request.prompt, marks, start, end)

    def stops(self, request: Request, start: int, end: int) -> list[int]:
        """Where a state must be snapshotted: what is kept, and the last grid point."""
        end = min(end, request.key_limit)
        last = self.oracle.floor(end)
        points = {p for g in self.oracle.state for p in self.kept(request, g, start, end)}
        points |= {last} if last > start else set()
        return sorted(points) if self.oracle.state else []

    def point(self, request: Request) -> int:
        """The last completed grid point that can have keys: where a resume would start."""
        return self.oracle.floor(min(request.computed, request.key_limit))

    def walk(self, request: Request, *sources: KeySets, tokens: int | None = None) -> Walk:
        """Longest hit of the first `tokens` (all), by brute force over a union of key sets."""
        if request.retired:
            return Walk(0, 0)
        text, keys = request.tokens[:tokens], self.union(*sources)
        return self.oracle.walk(request.space, text, keys, request.key_limit)

    def union(self, *sources: KeySets) -> list[set[Key]]:
        return [set().union(*(s[g] for s in sources if s)) for g in self.groups]

    # ---- pages

    def group_page(self, group: int, number: int) -> Page:
        return self.classes[group], int(number)

    def held(self) -> list[int]:
        """Held pages of each size class."""
        return [c.held for c in self.manager.arena_stats().classes]

    def counts(self) -> tuple[object, ...]:
        """What a call that changes nothing leaves as it was."""
        groups = [self.manager.group_stats(g) for g in self.groups]
        return (self.manager.arena_stats(), *groups)

    def owned(self) -> list[int]:
        """Slabs of each size class."""
        return [c.slabs for c in self.manager.arena_stats().classes]

    def in_use(self) -> set[Page]:
        """Pages that are held: by requests, open steps, loads and pins."""
        used = {self.group_page(*pin) for pin in self.pinned}
        for request in self.requests:
            used.update(request.pages())
        for step, works in self.steps:
            used.update(page for work in works for page in work.touched())
            used |= self.freed.get(step, set())
        for load in self.loads.values():
            used.update(self.group_page(group, page) for group, page, _ in load.items)
        return used

    def give_up(self, request: Request, before: set[Page], fence: int | None = None) -> None:
        """What it no longer holds of `before` is held by its fence: the one given, or that of now."""
        if fence is None:
            fence = self.fence(request)
        if fence in (step for step, _ in self.steps):
            self.freed.setdefault(fence, set()).update(before - set(request.pages()))

    def fence(self, request: Request) -> int:
        """The newest open step that may touch its pages: with a grant not committed, any."""
        granted = request.state == "running" and request.granted > request.committed
        return self.steps[-1][0] if granted and self.steps else request.last_step

    def apply_moves(self, in_use: set[Page]) -> None:
        for size_class, old, new in self.manager.take_moves().tolist():
            pages = ((size_class, old), (size_class, new))
            assert not in_use.intersection(pages), f"a held page was moved or overwritten: {pages}"
            self.content.move(*pages)
            self.saw("moved page")

    def touch(self, request: Request) -> None:
        """What the request kept at its boundaries goes back together with its pages."""
        for g in self.oracle.kept_in_part:
            for position in self.kept(request, g, 0, request.computed):
                found = (request.key(self.oracle, g, e) for e in self.oracle.needs(g, position))
                numbers = {self.find(g, key) for key in found if key} - {-1}
                pages = {self.group_page(g, number) for number in numbers}
                self.touched.setdefault(self.fence(request), set()).update(pages)

    def _paged(self, request: Request, group: int, at: int) -> set[int]:
        """What a transient group holds at `at`: nothing between its last grid point's and its own."""
        oracle, point = self.oracle, self.oracle.floor(at)
        hit = oracle.blocks_read(group, request.began)
        unread = range(point // oracle.blocks[group], oracle.first_block(group, at))
        request.paged[group] = request.paged.get(group, hit) - set(unread)
        return request.paged[group]

    def grant_pages(self, request: Request) -> None:
        """Which blocks of the transient groups have a page under the new grant."""
        oracle, start = self.oracle, request.committed
        sure = request.granted - request.drafts
        last = oracle.floor(min(sure, len(request.tokens), request.key_limit))
        for g in oracle.transient:
            fresh = ceil_div(start, oracle.blocks[g])
            points = {*self.kept(request, g, start, min(sure, request.key_limit)), last}
            read = [oracle.blocks_read(g, p) for p in points if p > start or p == last]
            tail = range(oracle.first_block(g, sure), ceil_div(request.granted, oracle.blocks[g]))
            wanted = {b for b in {*tail}.union(*read) if b >= fresh}
            hit = oracle.blocks_read(g, request.began)
            held = {b for b in request.paged.get(g, hit) if b < fresh}
            request.paged[g] = held | wanted

    def read_tables(self, request: Request) -> None:
        """Tables as they are now: they grow at grants, and lose their heads at ends of steps."""
        for g in self.oracle.tabled:
            table = self.manager.block_table(request.handle, g).tolist()
            at = max(request.computed, request.began)
            first = self.oracle.first_block(g, self.oracle.floor(at))
            expected = set(range(first, len(table)))
            if g in self.oracle.transient:
                expected &= self._paged(request, g, at)
            assert {i for i, number in enumerate(table) if number >= 0} == expected, (
                f"group {g} at {request.computed} holds {table}: expected {sorted(expected)}"
            )
            old = request.tables.get(g, [])
            used = min(len(old), -(-request.committed // self.oracle.blocks[g]))
            assert all(table[i] == old[i] for i in expected if i < used), (
                "a table changed under a running request"
            )
            request.tables[g] = table
        for g in self.oracle.private:
            table = self.manager.block_table(request.handle, g).tolist()
            assert request.private.get(g, table) == table
            request.private[g] = table
