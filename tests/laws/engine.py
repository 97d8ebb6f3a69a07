"""A toy engine that drives the manager and remembers what each page's bytes would be.

Pages are stamped when a step's writes would land, at the latest moment that the contract allows
(its `end_step`); a page is scribbled over at the earliest, when a grant or a load hands it out; the
content of a moved page moves when the manager says so. So a key on a page whose bytes are not
there, a page handed out while it is read, or a hit of another prefix shows up as a wrong stamp
(see `content`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from laws.counting import count
from laws.oracle import Space
from laws.prompts import Token, embeddings_of, media_of, plain
from laws.records import Page, Request, Work, ceil_div
from laws.state import EngineState, KeySets

from kvcache.core.errors import CapacityError
from kvcache.core.records import Hit, StatePlan


class Engine(EngineState):
    """See the module."""

    # ---- opening

    def open(
        self,
        tokens: Sequence[Token],
        *,
        max_tokens: int | None = None,
        salt: str = "",
        lora: str = "",
        foreign: bool = False,
        boundaries: Sequence[int] = (),
    ) -> Request | None:
        """None where the request can never fit; asserts that exactly those are refused."""
        n, unit = len(tokens), self.oracle.unit
        most = n if max_tokens is None else max_tokens
        space = self.space(foreign=foreign, salt=salt, lora=lora)
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
                    lora=lora,
                    boundaries=boundaries,
                )
            else:
                handle = self.manager.open(
                    np.array(plain(tokens), np.int32),
                    max_tokens=most,
                    salt=salt,
                    lora=lora,
                    media=media_of(tokens),
                    embeddings=embeddings_of(tokens),
                    boundaries=boundaries,
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
        self.saw("junction", hit.junction > 0)
        request.junction = hit.junction
        return hit

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
        works[-1].told = len(request.tokens)
        works[-1].twin = self.any_twins()
        self.saw("rejected guess", min(request.drafts, request.granted - end))
        before = set(request.pages())
        request.committed = end
        request.last_step = step
        for g, plan in request.plans.items():  # states after drafts that were wrong are let go
            right = plan.positions <= end
            request.plans[g] = StatePlan(plan.source, plan.positions[right], plan.pages[right])
            kept = request.snapshots[g]
            for position in [p for p in kept if p > end]:
                del kept[position]
        if request.drafts and end < request.granted:  # and so are their blocks, once the step ends
            for g, table in request.tables.items():
                del table[ceil_div(end, self.oracle.blocks[g]) :]
        if self.oracle.whole_grants or request.drafts:
            request.granted = end
        self.give_up(request, before)
        request.drafts = 0

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
        self.saw("pin across a step", len(self.pinned))
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
        self._pass_last_key(request)
        self.read_tables(request)
        self.give_up(request, before)

    def _pass_last_key(self, request: Request) -> None:
        """Foreign: the last grid point with a key is complete when its spans are given up."""
        told = self.oracle.floor(min(request.computed, len(request.tokens)))
        point = self.point(request)
        for g in self.oracle.tabled if told > point and not request.keyless else ():
            first = self.oracle.first_block(g, told)
            if any(number >= 0 for number in request.tables.get(g, [])[:first]):
                found = (request.writes(self.oracle, g, e) for e in self.oracle.needs(g, point))
                self.ever[g].update(k for k in found if k)

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
        if request.junction:
            request.marks.append(request.junction)
            request.junction = 0
        self._leave(request)

    def restart(self, request: Request) -> None:
        """Only its own pages are in the oldest request's way: at most once in its life (law 12)."""
        assert not request.restarts, "told to restart twice"
        self.preempt(request)
        request.restarts = True

    def _close(self, request: Request) -> None:
        self._leave(request)
        self.requests.remove(request)

    def _leave(self, request: Request) -> None:
        """What a resume at the last grid point needs gets its keys; open writes are dropped."""
        self.touch(request)
        point = self.point(request)
        pins = {self.group_page(*pin) for pin in self.pinned}
        self.saw("pin that outlived a request", not pins.isdisjoint(request.pages()))
        self.saw("retired request", request.retired and request.computed > 0)
        for g in self.oracle.kept_in_part if not request.keyless else ():
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

    def reset(self, request: Request) -> None:
        """It holds nothing any more; what it held under an open step stays until that ends."""
        before, fence = set(request.pages()), self.fence(request)
        request.computed = request.committed = request.granted = request.began = 0
        request.tables, request.private, request.plans, request.paged = {}, {}, {}, {}
        request.snapshots, request.holes = {}, {}
        request.wrote_private = request.muted = False
        request.state, request.hit = "waiting", None
        self.give_up(request, before, fence)
        request.load = request.drafts = 0

    def clear(self, salt: str | None = None) -> None:
        """Every key goes, or those under one salt; who holds pages leaves none until it restarts."""
        count("clear")
        if salt is None:
            self.manager.clear()
        else:
            self.manager.clear(salt=salt)
        self._forget(lambda space: salt in (None, space[1]))

    def retire(self, lora: str | None = None) -> None:
        """The weights change, or an adapter's: nothing of before is found any more.

        Requests that are open leave no keys, whatever becomes of them.
        """
        count("retire")
        self.saw("retired key", sum(map(len, self.resident())))
        if lora is None:
            self.epoch += 1
            self.manager.set_weights_epoch(self.epoch)
        else:
            self.versions[lora] = self.versions.get(lora, 0) + 1
            self.manager.set_lora_version(lora, str(self.versions[lora]))

        def gone(space: Space) -> bool:
            return lora is None or (*space, "")[2] == lora

        self._forget(gone)
        for request in self.requests:
            if gone(request.space):
                request.retired = True
                self.saw(
                    "hit of other weights", request.hit is not None and request.hit.hit_tokens > 0
                )
                request.hit, request.present = None, []

    def _forget(self, gone: Callable[[Space], bool]) -> None:
        self.audit.learn(self.ever)
        self.ever = [{k for k in keys if not gone(k.space)} for keys in self.ever]
        for request in self.requests:
            request.muted |= request.state != "waiting" and gone(request.space)
        for load in self.loads.values():
            load.muted |= gone(load.items[0][2].space)
