"""A toy engine that drives the manager and remembers what each page's bytes would be.

Pages are stamped when a step's writes would land, at the latest moment that the contract allows
(its `end_step`); a page is scribbled over at the earliest, when a grant or a load hands it out; the
content of a moved page moves when the manager says so. So a key on a page whose bytes are not
there, a page handed out while it is read, or a hit of another prefix shows up as a wrong stamp
(see `content`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from laws.audit import Audit
from laws.content import Content, Digests
from laws.counting import count, seen
from laws.oracle import Key, Oracle, Space, Walk
from laws.records import Load, Page, Request, Work, ceil_div
from laws.space import Arena

from kvcache.core.errors import CapacityError
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.records import UNLIMITED, Hit, StatePlan
from kvcache.core.retain import RetentionPolicy

KeySets = Sequence[set[Key]]


class Engine:
    """See the module. `ever` holds what got a key so far; without eviction that is the index."""

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
        self.audit = Audit(self.oracle, self.digests)
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

    @property
    def unlimited(self) -> bool:
        return self.slabs == UNLIMITED

    # ---- keys

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

    def add_keys(self, request: Request, start: int, end: int, keys: list[set[Key]]) -> None:
        """What gets a key when a request goes from `start` to `end`."""
        for g in self.groups if not request.muted else ():
            ends = self.oracle.keyed(g, self.kept(request, g, start, end), start, end)
            found = (request.writes(self.oracle, g, e) for e in ends)
            keys[g].update(k for k in found if k)

    def kept(self, request: Request, group: int, start: int, end: int) -> list[int]:
        return self.oracle.kept(self.policy, group, request.prompt, request.marks, start, end)

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
        n, unit = len(tokens), self.oracle.unit
        most = n if max_tokens is None else max_tokens
        space = ("foreign" if foreign else "native", salt)
        fits = self.arena.admits(most)
        try:
            if foreign:
                units = [
                    self.digests.unit(space, tuple(tokens[:e])) for e in range(unit, n + 1, unit)
                ]
                handle = self.manager.open_foreign(
                    np.frombuffer(b"".join(units), np.uint8).reshape(-1, 32),
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
            assert not fits, f"{most} tokens need {self.arena.needed(most)} of {self.slabs} slabs"
            return None
        assert fits, f"{most} tokens need {self.arena.needed(most)} of {self.slabs} slabs: admitted"
        count("open")
        limit = n // unit * unit if foreign else most
        request = Request(
            handle, space, list(tokens), n, most, limit, list(boundaries), self.classes
        )
        self.requests.append(request)
        return request

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        count("extend")
        before = len(request.tokens)
        if request.space[0] == "foreign":
            self.manager.extend_foreign(request.handle, len(tokens))
        else:
            self.manager.extend(request.handle, list(tokens))
        request.tokens.extend(tokens)
        self.content.complete_drafts(request, before)
        self._note_keys(request)

    def _note_keys(self, request: Request) -> None:
        """Keys of what is computed may become known only when its tokens are told."""
        self.add_keys(request, request.began, request.computed, self.ever)

    # ---- lookup

    def present(self, request: Request, tier: KeySets) -> list[np.ndarray]:
        """A tier's answer: one byte per block or grid point whose key is known."""
        known = min(len(request.tokens), request.key_limit)
        return [
            np.array(
                [request.key(self.oracle, g, e) in tier[g] for e in range(block, known + 1, block)]
                if block
                else [],
                np.uint8,
            )
            for g, block in enumerate(self.oracle.blocks)
        ]

    def lookup(self, request: Request, tier: KeySets = ()) -> Hit:
        count("lookup")
        maps = self.present(request, tier) if tier else None
        hit = self.manager.lookup(request.handle, maps)
        request.hit, request.looked_at = hit, len(request.tokens)
        request.present = [set(keys) for keys in tier]
        if hit.junction and hit.junction not in request.marks:
            request.marks.append(hit.junction)
        return hit

    def walk(self, request: Request, *sources: KeySets, tokens: int | None = None) -> Walk:
        """Longest hit of the first `tokens` (all), by brute force over a union of key sets."""
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

    def give_up(self, request: Request, before: set[Page]) -> None:
        """What it no longer holds of `before` is held by its newest open step."""
        if request.last_step in (step for step, _ in self.steps):
            self.freed.setdefault(request.last_step, set()).update(before - set(request.pages()))

    def apply_moves(self, in_use: set[Page]) -> None:
        for size_class, old, new in self.manager.take_moves().tolist():
            pages = ((size_class, old), (size_class, new))
            assert not in_use.intersection(pages), f"a held page was moved or overwritten: {pages}"
            self.content.move(*pages)
            seen["moved page"] += 1

    # ---- steps

    def begin_step(self) -> int:
        count("begin_step")
        step = self.manager.begin_step()
        self.steps.append((step, []))
        return step

    def commit(self, request: Request, upto: int | None = None) -> None:
        count("commit")
        step, works = self.steps[-1]
        end = request.granted if upto is None else upto
        self.manager.commit(request.handle, end)
        works.append(self.work(request, request.committed, end))
        before = set(request.pages())
        request.committed = end
        request.last_step = step
        for g, plan in request.plans.items():  # states after drafts that were wrong are let go
            right = plan.positions <= end
            request.plans[g] = StatePlan(plan.source, plan.positions[right], plan.pages[right])
            kept = request.snapshots[g]
            for position in [p for p in kept if p > end]:
                del kept[position]
            request.granted = end
        self.give_up(request, before)

    def work(self, request: Request, start: int, end: int) -> Work:
        blocks = self.oracle.blocks
        tables = {g: t[: ceil_div(end, blocks[g])] for g, t in request.tables.items()}
        private = {g: list(table) for g, table in request.private.items()}
        return Work(request, blocks, start, end, tables, private, dict(request.plans))

    def end_step(self) -> None:
        """The oldest step's reads and writes happen; then its keys become visible."""
        count("end_step")
        step, works = self.steps.popleft()
        writers: dict[Page, Work] = {}
        for work in works:
            if work.live:
                self.content.verify_reads(work)
            for page in work.written():
                assert writers.setdefault(page, work) is work, f"{page} has two writers"
        for work in works:
            self.content.write(work)
        self.manager.end_step(step)
        self.freed.pop(step, None)
        self.touched.pop(step, None)
        for work in works:
            if work.live:
                self._advance(work)

    def _advance(self, work: Work) -> None:
        request = work.request
        before = set(request.pages())
        request.computed = work.end
        request.wrote_private = True
        self._note_keys(request)
        for kept in request.snapshots.values():
            newest = max((p for p in kept if p <= request.computed), default=0)
            for position in [p for p in kept if p < newest]:
                del kept[position]
        self.read_tables(request)
        self.give_up(request, before)

    def read_tables(self, request: Request) -> None:
        """Tables as they are now: they grow at grants, and lose their heads at ends of steps."""
        for g in self.oracle.tabled:
            table = self.manager.block_table(request.handle, g).tolist()
            at = max(request.computed, request.began)
            first = self.oracle.first_block(g, self.oracle.floor(at))
            gone = [i for i, number in enumerate(table) if number < 0]
            assert gone == list(range(min(first, len(table)))), (
                f"group {g} at {request.computed} holds {table}: expected from block {first} on"
            )
            old = request.tables.get(g, [])
            used = min(len(old), -(-request.committed // self.oracle.blocks[g]))
            assert table[first:used] == old[first:used], "a table changed under a running request"
            request.tables[g] = table
        for g in self.oracle.private:
            table = self.manager.block_table(request.handle, g).tolist()
            assert request.private.get(g, table) == table
            request.private[g] = table

    # ---- closing

    def finish(self, request: Request) -> None:
        count("finish")
        self.manager.finish(request.handle)
        self._close(request)

    def abort(self, request: Request) -> None:
        count("abort")
        self.manager.abort(request.handle)
        self._close(request)

    def preempt(self, request: Request) -> None:
        count("preempt")
        self.manager.preempt(request.handle)
        self._leave(request)

    def _close(self, request: Request) -> None:
        self._leave(request)
        self.requests.remove(request)

    def _leave(self, request: Request) -> None:
        """What a resume at the last grid point needs gets its keys; open writes are dropped."""
        self._touch(request)
        point = self.point(request)
        for g in self.oracle.kept_in_part if not request.muted else ():
            found = (request.writes(self.oracle, g, e) for e in self.oracle.needs(g, point))
            self.ever[g].update(k for k in found if k)
        for _, works in self.steps:
            for work in works:
                if work.request is request:
                    work.live = False
        if request.load:
            self.loads[request.load].request = None
        if self.frozen is request:
            self.frozen = None
        self.reset(request)

    def _touch(self, request: Request) -> None:
        """What the request kept at its boundaries goes back together with its pages."""
        for g in self.oracle.kept_in_part:
            for position in self.kept(request, g, 0, request.computed):
                found = (request.key(self.oracle, g, e) for e in self.oracle.needs(g, position))
                numbers = {self.find(g, key) for key in found if key} - {-1}
                pages = {self.group_page(g, number) for number in numbers}
                self.touched.setdefault(request.last_step, set()).update(pages)

    def reset(self, request: Request) -> None:
        """It holds nothing any more; what it held under an open step stays until that ends."""
        before = set(request.pages())
        request.computed = request.committed = request.granted = request.began = 0
        request.tables, request.private, request.plans = {}, {}, {}
        request.snapshots, request.holes = {}, {}
        request.wrote_private = request.muted = False
        request.state, request.hit = "waiting", None
        self.give_up(request, before)
        request.load = 0

    def clear(self, salt: str | None = None) -> None:
        """Every key goes, or those under one salt; who holds pages leaves none until it restarts."""
        count("clear")
        self.audit.learn(self.ever)
        if salt is None:
            self.manager.clear()
        else:
            self.manager.clear(salt=salt)
        self.ever = [{k for k in keys if not cleared(k.space, salt)} for keys in self.ever]
        for request in self.requests:
            if request.state != "waiting" and cleared(request.space, salt):
                request.muted = True
        for load in self.loads.values():
            if cleared(load.items[0][2].space, salt):
                load.muted = True


def cleared(space: Space, salt: str | None) -> bool:
    return salt is None or space[1] == salt
