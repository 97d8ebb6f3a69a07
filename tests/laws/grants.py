"""Allocation through the toy engine, with everything that the laws say of it.

Pages counted are the pages taken (law 13); None changes nothing and is said only where space
really lacks; what is handed out is idle (18), was not part of the hit (19); what is adopted was
written for this prefix (3).
"""

from __future__ import annotations

from typing import NamedTuple

from laws.counting import count
from laws.engine import Engine
from laws.oracle import Key
from laws.prompts import Covered
from laws.records import Load, Page, Request, ceil_div

from kvcache.core.records import Grant

Taken = list[tuple[int, int]]
"""Group and page."""


class Before(NamedTuple):
    """What was there when a grant was asked for."""

    resident: list[set[Key]]
    """Only where the request held nothing."""
    counts: tuple[object, ...]
    need: list[int]
    first: bool
    """The request held nothing."""
    in_use: set[Page]
    owned: list[int]
    planned: set[tuple[int, int]]
    """States of a grant that was not committed: this one replaces it."""
    tables: dict[int, list[int]]
    holds: set[Page]
    """Of the request."""
    fence: int
    """The step with whose end it gives up what this grant leaves out of one not committed."""


def allocate(engine: Engine, request: Request, tokens: int, drafts: int = 0) -> Grant | None:
    count("allocate")
    waiting = request.state == "waiting"
    before = _before(engine, request, tokens, drafts)
    hits = _possible_hits(engine, request, before)
    adopted = _adopted(engine, request, before, hits[-1])
    could_end = engine.arena.keeps_quota(request.max_tokens, request.pages())
    grant = engine.manager.allocate(request.handle, tokens, drafts=drafts)
    engine.apply_moves(before.in_use if request.restarts else before.in_use | adopted)
    if grant is None:
        _check_refusal(engine, request, before, adopted)
        return None
    assert engine.frozen in (None, request), "a younger request was served while one is frozen"
    engine.frozen = None
    assert grant.hit_tokens in (hits if waiting else [0])
    engine.saw("hit", grant.hit_tokens > 0)
    engine.saw("cut hit", grant.hit_tokens < hits[-1])
    covered = any(isinstance(token, Covered) for token in request.tokens[: grant.hit_tokens])
    engine.saw("image or embeddings in a hit", covered)
    start = grant.hit_tokens if waiting else request.committed
    assert grant.start == start
    request.granted = grant.end
    request.state = "loading" if grant.load else "running"
    if waiting:
        request.began, request.hit = start, None
    if grant.load:
        taken = _start_load(engine, request, grant, before)
    else:
        _check_end(engine, request, grant, start, tokens + drafts)
        if waiting:
            request.computed = request.committed = start
        request.drafts = max(0, grant.end - start - tokens)
        taken = _take_pages(engine, request, before)
        engine.give_up(request, before.holds, before.fence)
    if request is engine.requests[0] and could_end:
        can = engine.arena.keeps_quota(request.max_tokens, request.pages())
        assert can, "the oldest request took pages in too many slabs"
    shortened = not grant.load and grant.end - start < tokens + drafts
    _check_taken(engine, before, taken, shortened=shortened)
    if waiting and not grant.load:
        engine.content.verify_reads(engine.work(request, start, start))
    return grant


def _before(engine: Engine, request: Request, tokens: int, drafts: int) -> Before:
    uncommitted = request.granted > request.committed
    return Before(
        engine.resident() if request.state == "waiting" else [],
        engine.counts(),
        engine.manager.need(request.handle, tokens, drafts=drafts),
        request.state == "waiting",
        engine.in_use(),
        engine.owned(),
        set(request.planned()) if uncommitted else set(),
        {g: list(table) for g, table in request.tables.items()},
        set(request.pages()),
        engine.fence(request),
    )


def _possible_hits(engine: Engine, request: Request, before: Before) -> list[int]:
    """What is left of the lookup's, by the tokens of then or those known now.

    The oldest request may restart from a shorter hit, where that is what its quota allows.
    """
    if request.hit is None or request.retired:
        return [0]
    keys = engine.union(before.resident, request.present)
    found = []
    for text in (request.tokens[: request.looked_at], request.tokens):
        points = engine.oracle.hits(request.space, text, keys, request.key_limit)
        points = [p for p in points if p <= request.hit.hit_tokens]
        found += points if request.restarts else points[-1:]
    return sorted(set(found))


def _adopted(engine: Engine, request: Request, before: Before, hit: int) -> set[Page]:
    """Pages of the hit that are on the device."""
    if request.state != "waiting":
        return set()
    pages = set()
    for g in engine.groups:
        for end in engine.oracle.needs(g, hit):
            key = request.key(engine.oracle, g, end)
            if key in before.resident[g]:
                pages.add(engine.group_page(g, engine.find(g, key)))
    return pages


def _check_refusal(engine: Engine, request: Request, before: Before, adopted: set[Page]) -> None:
    assert engine.counts() == before.counts
    if before.first:
        assert engine.resident() == before.resident
    why = engine.manager.blockage(request.handle)
    engine.saw("space refused")
    engine.saw(f"refused: {why}")
    oldest = request is engine.requests[0]
    if engine.frozen not in (None, request):
        assert why == "frozen"
        return
    younger = engine.requests[engine.requests.index(request) + 1 :]
    assert why in ("preempt", "wait", "restart")
    assert (why == "preempt") == any(r.state != "waiting" for r in younger), "whom to preempt"
    if oldest:
        engine.frozen = request
        if why == "wait":
            assert engine.steps or engine.loads or engine.pinned, "there is nothing to wait for"
    wanted = engine.arena.by_class(before.need)
    holds = adopted.union(request.pages())
    if oldest and not engine.arena.free_choice(request.max_tokens, holds, wanted):
        return
    held = before.in_use.union(adopted, *engine.touched.values())
    assert not engine.arena.can_take(wanted, held, before.owned), (
        f"no space was said ({why}), though {before.need} pages fit beside {held}"
    )


def _check_end(engine: Engine, request: Request, grant: Grant, start: int, tokens: int) -> None:
    """A grant ends where it was asked to; sooner, where the request could never hold all that."""
    assert grant.load_pages == 0
    if grant.end != start + tokens:
        engine.saw("shortened")
        assert start < grant.end < start + tokens
        assert not engine.unlimited


def _take_pages(engine: Engine, request: Request, before: Before) -> Taken:
    """Reads tables and plans of a new grant; returns the pages that are new in it."""
    engine.grant_pages(request)
    taken = _fresh_pages(engine, request, before, []) if before.first else []
    engine.read_tables(request)
    start = request.committed
    for g, table in request.tables.items():
        block = engine.oracle.blocks[g]
        assert len(table) == -(-request.granted // block)
        fresh = ceil_div(start, block)  # what an uncommitted grant had is used again
        old = {-1} if before.first else {-1, *before.tables[g][fresh:]}
        taken += [(g, page) for page in table[fresh:] if page not in old]
    return taken + _state_pages(engine, request, before)


def _fresh_pages(engine: Engine, request: Request, before: Before, loaded: Taken) -> Taken:
    """Pages of a first grant that lie in its hit: private ones, and holes of drafts."""
    engine.read_tables(request)
    fresh = [(g, page) for g, pages in request.private.items() for page in pages]
    for g in engine.oracle.drafts:
        block, table = engine.oracle.blocks[g], request.tables[g]
        request.holes[g] = [
            end // block - 1
            for end in engine.oracle.needs(g, request.began)
            if request.key(engine.oracle, g, end) not in before.resident[g]
            and (g, table[end // block - 1]) not in loaded
        ]
        assert engine.manager.draft_holes(request.handle, g) == request.holes[g]
        engine.saw("hole", len(request.holes[g]))
        fresh += [(g, table[i]) for i in request.holes[g]]
    return fresh


def _state_pages(engine: Engine, request: Request, before: Before) -> Taken:
    start, end = request.committed, request.granted
    if not engine.oracle.state:
        return []
    sure = max(start, end - request.drafts)
    stops: list[int] = []
    for part in ((start, sure), (sure, end)):  # all guesses may be wrong
        found = engine.manager.stops(request.handle, *part)
        assert found == engine.stops(request, *part)
        stops += found
    last = min(end, request.key_limit)  # any guess may be the last that stands
    stops += [p for p in range(sure + 1, last + 1) if p % engine.oracle.grid == 0]
    taken: Taken = []
    for g in engine.oracle.state:
        plan = request.plans[g] = engine.manager.state_plan(request.handle, g)
        assert plan.positions.tolist() == sorted({*stops, *range(sure, end + 1)} - {start})
        assert (plan.source < 0) == (start == 0)
        pages = plan.pages.tolist()
        assert len(set(pages)) == len(pages), "two states of one grant share a page"
        taken += [(g, p) for p in pages if p != plan.source and (g, p) not in before.planned]
        kept = request.snapshots.setdefault(g, {})
        if before.first and start:
            kept[start] = plan.source
        for position in [p for p in kept if p > start]:
            del kept[position]
        kept.update(
            (p, n) for p, n in zip(plan.positions.tolist(), pages, strict=True) if p in stops
        )
    return taken


def _start_load(engine: Engine, request: Request, grant: Grant, before: Before) -> Taken:
    """Checks that the load fills exactly what the device lacks; returns its pages."""
    oracle = engine.oracle
    voters = [*oracle.full, *oracle.sparse]
    expected = {
        (g, request.key(oracle, g, e)) for g in voters for e in oracle.needs(g, grant.hit_tokens)
    }
    expected = {(g, key) for g, key in expected if key not in before.resident[g]}
    items: list[tuple[int, int, Key]] = []
    for item in engine.manager.load_items(grant.load):
        group, page, end = int(item["group"]), int(item["page"]), int(item["end"])
        key = request.key(oracle, group, end)
        assert key
        assert bytes(item["digest"]) == engine.digests.of(group, key)
        assert int(item["handle"]) == request.handle
        items.append((group, page, key))
    assert {(g, key) for g, _, key in items if g in voters} == expected
    assert len(items) == grant.load_pages == len({(g, key) for g, _, key in items})
    assert grant.end == grant.start
    engine.saw("load")
    request.load = grant.load
    engine.loads[grant.load] = Load(request, items)
    pages = [(group, page) for group, page, _ in items]
    for g in oracle.state:
        key = request.key(oracle, g, request.began)
        assert key
        loaded = [page for group, page, _ in items if group == g]
        request.snapshots[g] = {request.began: (loaded or [engine.find(g, key)])[0]}
    return pages + _fresh_pages(engine, request, before, pages)


def _check_taken(engine: Engine, before: Before, taken: Taken, *, shortened: bool) -> None:
    counts = [sum(group == g for group, _ in taken) for g in engine.groups]
    fewer = all(n <= most for n, most in zip(counts, before.need, strict=True))
    assert counts == before.need or (shortened and fewer), (
        f"{before.need} pages counted, {counts} taken"
    )
    pages = [engine.group_page(group, number) for group, number in taken]
    assert len(set(pages)) == len(pages), f"a page was handed out twice: {taken}"
    for page in pages:
        assert page not in before.in_use, f"page {page} was handed out while in use"
        engine.content.scribble(page)
