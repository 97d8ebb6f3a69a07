"""A toy engine that drives the manager and remembers what each page's bytes would be.

Pages are stamped when a step's writes would land, at the latest moment that the contract allows
(its `end_step`); a page is scribbled over at the earliest, when a grant or a load hands it out. So
a key on a page whose bytes are not there, a page handed out while it is read, or a hit of another
prefix shows up as a wrong stamp (see `content`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from laws.content import Content, Keys
from laws.oracle import Oracle, Prefix, Walk
from laws.records import Load, Page, Request, Work

from kvcache.core.errors import CapacityError
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.records import UNLIMITED, Grant, Hit
from kvcache.core.retain import RetentionPolicy


class Engine:
    """See the module. `ever` holds what got a key so far; without eviction that is the index."""

    def __init__(
        self,
        geometry: Geometry,
        policy: RetentionPolicy,
        *,
        pages: Sequence[int] | None = None,
        max_open_steps: int = 2,
    ) -> None:
        self.pages = list(pages or [UNLIMITED] * len(geometry.groups))
        self.geometry, self.policy = geometry, policy
        self.manager = Manager(
            geometry, pages=self.pages, retention=policy, max_open_steps=max_open_steps
        )
        self.oracle = Oracle(geometry)
        self.content = Content(self.oracle)
        self.keys = Keys(geometry.hash_unit_tokens)
        self.groups = range(len(geometry.groups))
        self.attention = [g for g in self.groups if self.oracle.is_attention[g]]
        self.recurrent = [g for g in self.groups if not self.oracle.is_attention[g]]
        self.max_open_steps = max_open_steps
        self.requests: list[Request] = []
        self.steps: deque[tuple[int, list[Work]]] = deque()
        self.loads: dict[int, Load] = {}
        self.ever: list[set[Prefix]] = [set() for _ in self.groups]
        self.pinned: list[Page] = []

    @property
    def unlimited(self) -> bool:
        return all(n == UNLIMITED for n in self.pages)

    # ---- keys

    def find(self, group: int, prefix: Prefix) -> int:
        """The page under which a lookup would find a prefix, or -1."""
        digest, namespace = self.keys.digest(prefix), self.keys.namespace(prefix[0])
        return self.manager.find_key(group, digest, namespace=namespace)

    def resident(self) -> list[set[Prefix]]:
        """Of the prefixes that ever got a key, those that have one now."""
        return [{p for p in self.ever[g] if self.find(g, p) >= 0} for g in self.groups]

    def pending(self, *, orphans: bool = False) -> list[set[Prefix]]:
        """Prefixes that open steps and loads are writing now.

        With `orphans` also those of loads whose request has left: their keys may still come.
        """
        keys: list[set[Prefix]] = [set() for _ in self.groups]
        for _, works in self.steps:
            for work in works:
                if work.live:
                    self._add_keys(work, keys)
        for load in self.loads.values():
            if load.request or orphans:
                for group, _, prefix in load.items:
                    keys[group].add(prefix)
        return keys

    def _add_keys(self, work: Work, keys: list[set[Prefix]]) -> None:
        request = work.request
        for g in self.groups:
            block = self.oracle.blocks[g]
            ends: Iterable[int] = range(work.start // block * block + block, work.end + 1, block)
            if g in self.recurrent:
                ends = self.kept(request, work.start, work.end)
            keys[g].update(request.prefix(e) for e in ends if request.has_key(e))

    def kept(self, request: Request, start: int, end: int) -> list[int]:
        return self.oracle.kept(self.policy, request.prompt, request.marks, start, end)

    def stops(self, request: Request, start: int, end: int) -> list[int]:
        """Where a state must be snapshotted: what is kept, and the last grid point."""
        last = end // self.oracle.grid * self.oracle.grid
        points = {*self.kept(request, start, end), last} if last > start else set()
        return sorted(points) if self.recurrent else []

    # ---- opening

    def open(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        salt: str = "",
        foreign: bool = False,
        boundaries: Sequence[int] = (),
    ) -> Request | None:
        """None where the request can never fit; asserts that exactly those are refused."""
        n, unit = len(tokens), self.geometry.hash_unit_tokens
        most = n if max_tokens is None else max_tokens
        space = ("foreign" if foreign else "native", salt)
        needed = self.geometry.pages_needed(most)
        too_big = any(n > have != UNLIMITED for n, have in zip(needed, self.pages, strict=True))
        try:
            if foreign:
                ends = range(unit, n + 1, unit)
                keys = b"".join(self.keys.digest((space, tuple(tokens[:e]))) for e in ends)
                handle = self.manager.open_foreign(
                    np.frombuffer(keys, np.uint8).reshape(-1, 32),
                    prompt_tokens=n,
                    max_tokens=most,
                    salt=salt,
                    boundaries=boundaries,
                )
            else:
                handle = self.manager.open(
                    np.array(tokens, np.int32), max_tokens=most, salt=salt, boundaries=boundaries
                )
        except CapacityError:
            assert too_big, f"{most} tokens need {needed} of {self.pages} pages, yet were refused"
            return None
        assert not too_big, f"{most} tokens need {needed} of {self.pages} pages, yet were admitted"
        limit = n // unit * unit if foreign else most
        request = Request(handle, space, list(tokens), n, most, limit, list(boundaries))
        self.requests.append(request)
        return request

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        if request.space[0] == "foreign":
            self.manager.extend_foreign(request.handle, len(tokens))
        else:
            self.manager.extend(request.handle, list(tokens))
        request.tokens.extend(tokens)

    # ---- lookup and allocation

    def present(self, request: Request, tier: Sequence[set[Prefix]]) -> list[np.ndarray]:
        """A tier's answer: one byte per block or grid point whose key is known."""
        known = min(len(request.tokens), request.key_limit)
        return [
            np.array(
                [request.prefix(e) in tier[g] for e in range(block, known + 1, block)], np.uint8
            )
            for g, block in enumerate(self.oracle.blocks)
        ]

    def lookup(self, request: Request, tier: Sequence[set[Prefix]] = ()) -> Hit:
        maps = self.present(request, tier) if tier else None
        hit = self.manager.lookup(request.handle, maps)
        request.hit, request.looked_at = hit, len(request.tokens)
        request.present = [set(keys) for keys in tier]
        if hit.junction and hit.junction not in request.marks:
            request.marks.append(hit.junction)
        return hit

    def walk(
        self, request: Request, *sources: Sequence[set[Prefix]], tokens: int | None = None
    ) -> Walk:
        """Longest hit of the first `tokens` (all), by brute force over a union of key sets."""
        text, keys = request.tokens[:tokens], self.union(*sources)
        return self.oracle.walk(request.space, text, keys, request.key_limit)

    def union(self, *sources: Sequence[set[Prefix]]) -> list[set[Prefix]]:
        return [set().union(*(s[g] for s in sources if s)) for g in self.groups]

    def allocate(self, request: Request, tokens: int) -> Grant | None:
        """Checks counting (law 13), atomicity, and that only idle pages are handed out (18)."""
        waiting = request.state == "waiting"
        before = self.resident()
        held = self.held()
        need = self.manager.need(request.handle, tokens)
        in_use = self.in_use()
        replaced = set(request.planned()) if request.granted > request.committed else set()
        grant = self.manager.allocate(request.handle, tokens)
        found = 0
        if request.hit:  # as of the lookup's tokens, or looked up again with those known now
            found = self.walk(request, before, request.present, tokens=request.looked_at).hit
            if grant and grant.hit_tokens != found:
                found = self.walk(request, before, request.present).hit
        adopted = [len(self.oracle.needs(g, found)) if waiting else 0 for g in self.groups]
        if grant is None:
            assert self.held() == held
            assert self.resident() == before
            assert any(need[g] + adopted[g] > self.pages[g] - held[g] for g in self.groups), (
                f"no space, though {need} pages fit beside {held} of {self.pages}"
            )
            return None
        assert grant.hit_tokens == (found if waiting else 0)
        start = grant.hit_tokens if waiting else request.committed
        assert grant.start == start
        request.granted = grant.end
        request.state = "loading" if grant.load else "running"
        if waiting:
            request.hit = None
        if grant.load:
            taken = self._start_load(request, grant, before)
        else:
            assert (grant.end, grant.load_pages) == (self._longest(request, start, tokens), 0)
            if waiting:
                request.computed = request.committed = start
            taken = self._take_pages(request, replaced)
        counts = [sum(group == g for group, _ in taken) for g in self.groups]
        assert counts == need, f"{need} pages counted, {counts} taken"
        for page in taken:
            assert page not in in_use, f"page {page} was handed out while in use"
            self.content.scribble(page)
        if waiting and not grant.load:
            self.content.verify_reads(request, start, request.tables, request.plans)
        return grant

    def _longest(self, request: Request, start: int, tokens: int) -> int:
        """Where a grant must end: each point of its plan takes a page, the state at hand one more."""
        end, sizes = start + tokens, [self.pages[g] for g in self.recurrent]
        sizes = [size for size in sizes if size != UNLIMITED]
        if not tokens or not sizes:
            return end
        stops = self.manager.stops(request.handle, start, end)
        points = [*stops, end] if not stops or stops[-1] < end else stops
        return points[: min(sizes) - (start > 0)][-1]

    def _read_pages(self, request: Request, *, plan: bool = True) -> None:
        for g in self.attention:
            table = self.manager.block_table(request.handle, g).tolist()
            old = request.tables.get(g, [])
            used = min(len(old), -(-request.committed // self.oracle.blocks[g]))
            assert table[:used] == old[:used], "a block table changed under a running request"
            request.tables[g] = table
        for g in self.recurrent if plan else ():
            request.plans[g] = self.manager.state_plan(request.handle, g)

    def _take_pages(self, request: Request, replaced: set[Page]) -> list[Page]:
        """Reads tables and plans of a new grant; returns the pages that are new in it."""
        start, end = request.committed, request.granted
        old = {g: len(t) for g, t in request.tables.items()}
        first = {g: len(self.oracle.needs(g, start)) for g in self.attention}
        self._read_pages(request)
        taken = []
        for g, table in request.tables.items():
            assert len(table) == -(-end // self.oracle.blocks[g])
            taken += [(g, page) for page in table[old.get(g, first[g]) :]]
        stops = self.manager.stops(request.handle, start, end)
        assert stops == self.stops(request, start, end)
        for g, plan in request.plans.items():
            assert plan.positions.tolist() == (sorted({*stops, end}) if end > start else [])
            assert (plan.source < 0) == (start == 0)
            pages = plan.pages.tolist()
            assert len(set(pages)) == len(pages), "two states of one grant share a page"
            taken += [(g, p) for p in pages if p != plan.source and (g, p) not in replaced]
        return taken

    # ---- loads

    def _start_load(
        self, request: Request, grant: Grant, resident: list[set[Prefix]]
    ) -> list[Page]:
        """Checks that the load fills exactly what the device lacks; returns its pages."""
        expected = {
            (g, request.prefix(e))
            for g in self.groups
            for e in self.oracle.needs(g, grant.hit_tokens)
            if request.prefix(e) not in resident[g]
        }
        items = []
        for item in self.manager.load_items(grant.load):
            group, page, end = int(item["group"]), int(item["page"]), int(item["end"])
            assert bytes(item["digest"]) == self.keys.digest(request.prefix(end))
            assert int(item["handle"]) == request.handle
            items.append((group, page, request.prefix(end)))
        assert {(g, p) for g, _, p in items} == expected
        assert len(items) == grant.load_pages == len(expected)
        assert grant.end == grant.start
        request.load = grant.load
        self.loads[grant.load] = Load(request, items)
        return [(group, page) for group, page, _ in items]

    def end_load(self, load: int, ok: Sequence[bool]) -> None:
        """Good items' bytes are there now: they get keys, also where the request has left."""
        entry = self.loads.pop(load)
        for (group, page, prefix), good in zip(entry.items, ok, strict=True):
            if good:
                self.content.fill((group, page), prefix)
        self.manager.end_load(load, np.array(ok, np.uint8))
        request = entry.request
        for (group, _, prefix), good in zip(entry.items, ok, strict=True):
            if good:
                self.ever[group].add(prefix)
        if request is None:
            return
        request.load = 0
        if all(ok):
            request.computed = request.committed = request.granted
            request.state = "running"
            self._read_pages(request, plan=False)
            self.content.verify_reads(request, request.computed, request.tables, {})
        else:
            self._reset(request)

    def abandon_load(self, load: int) -> None:
        request = self.loads[load].request
        assert request is not None
        self.manager.abandon_load(load)
        self.loads[load].request = None
        self._reset(request)

    # ---- steps

    def begin_step(self) -> int:
        step = self.manager.begin_step()
        self.steps.append((step, []))
        return step

    def commit(self, request: Request, upto: int | None = None) -> None:
        step, works = self.steps[-1]
        end = request.granted if upto is None else upto
        self.manager.commit(request.handle, end)
        tables = {g: request.tables[g][: -(-end // self.oracle.blocks[g])] for g in self.attention}
        works.append(Work(request, request.committed, end, tables, dict(request.plans)))
        request.committed = end
        request.last_step = step

    def end_step(self) -> None:
        """The oldest step's reads and writes happen; then its keys become visible."""
        step, works = self.steps.popleft()
        writers: dict[Page, Work] = {}
        for work in works:
            if work.live:
                self.content.verify_reads(work.request, work.start, work.tables, work.plans)
            for page in work.written(self.oracle.blocks):
                assert writers.setdefault(page, work) is work, f"{page} has two writers"
        for work in works:
            self.content.write(work)
        self.manager.end_step(step)
        for work in works:
            if work.live:
                self._add_keys(work, self.ever)
                work.request.computed = work.end

    # ---- closing

    def finish(self, request: Request) -> None:
        self.manager.finish(request.handle)
        self._close(request)

    def abort(self, request: Request) -> None:
        self.manager.abort(request.handle)
        self._close(request)

    def preempt(self, request: Request) -> None:
        self.manager.preempt(request.handle)
        self._leave(request)

    def _close(self, request: Request) -> None:
        self._leave(request)
        self.requests.remove(request)

    def _leave(self, request: Request) -> None:
        """The state of the last completed grid point gets its key; open writes are dropped."""
        point = request.computed // self.oracle.grid * self.oracle.grid
        if request.has_key(point):
            for g in self.recurrent:
                self.ever[g].add(request.prefix(point))
        for _, works in self.steps:
            for work in works:
                if work.request is request:
                    work.live = False
        if request.load:
            self.loads[request.load].request = None
        self._reset(request)

    def _reset(self, request: Request) -> None:
        request.computed = request.committed = request.granted = 0
        request.load = request.last_step = 0
        request.tables, request.plans = {}, {}
        request.state, request.hit = "waiting", None

    def clear(self) -> None:
        self.manager.clear()
        self.ever = [set() for _ in self.groups]

    # ---- invariants

    def held(self) -> list[int]:
        return [self.manager.pool_stats(g).held for g in self.groups]

    def in_use(self) -> set[Page]:
        """Pages that someone may read or write now."""
        used = set(self.pinned)
        for request in self.requests:
            used.update(request.pages())
        for _, works in self.steps:
            used.update(page for work in works for page in work.touched())
        for load in self.loads.values():
            used.update((group, page) for group, page, _ in load.items)
        return used

    def verify(self) -> None:
        """Laws 1, 2, 3: pages are conserved, and every key leads to a page with its bytes."""
        manager = self.manager
        manager.check()
        pending, possible = self.pending(), self.pending(orphans=True)
        for g in self.groups:
            stats = manager.pool_stats(g)
            assert stats.free + stats.cached + stats.held == stats.created <= stats.capacity
            resident = {p: page for p in self.ever[g] if (page := self.find(g, p)) >= 0}
            assert len(set(resident.values())) == len(resident), "two keys on one page"
            for prefix, page in resident.items():
                expected = self.content.expected(g, prefix)
                assert self.content.pages[g, page] == expected, f"wrong bytes on page {page}"
            for prefix in pending[g] - self.ever[g]:
                assert self.find(g, prefix) < 0, "a key is visible before its bytes are written"
            unwritten = possible[g] - set(resident)
            assert len(resident) <= stats.keyed <= len(resident) + len(unwritten)
            if self.unlimited:
                assert len(resident) == len(self.ever[g]), "a key is missing"
        for request in self.requests:
            info = manager.info(request.handle)
            counts = (info.computed, info.committed, info.granted)
            assert counts == (request.computed, request.committed, request.granted)
            assert (info.tokens, info.prompt) == (len(request.tokens), request.prompt)
            assert info.state == request.state
        stats_all = manager.stats()
        assert stats_all.open_requests == len(self.requests)
        assert stats_all.open_steps == len(self.steps)
        assert stats_all.open_loads == len(self.loads)
        assert stats_all.pinned == len(self.pinned)
