"""Laws 1, 2, 3 and 16 at any moment: what the manager counts and finds is what the engine knows."""

from __future__ import annotations

from laws.engine import Engine
from laws.oracle import Key


def verify(engine: Engine) -> None:
    """Pages are conserved, and every key leads to a page with its bytes."""
    engine.manager.check()
    _verify_arena(engine)
    _verify_keys(engine)
    for request in engine.requests:
        info = engine.manager.info(request.handle)
        counts = (info.computed, info.committed, info.granted)
        assert counts == (request.computed, request.committed, request.granted)
        assert (info.tokens, info.prompt) == (len(request.tokens), request.prompt)
        assert info.state == request.state
    stats = engine.manager.stats()
    assert stats.open_requests == len(engine.requests)
    assert stats.open_steps == len(engine.steps)
    assert stats.open_loads == len(engine.loads)
    assert stats.pinned == len(engine.pinned)


def _verify_arena(engine: Engine) -> None:
    """Law 1. Every slab belongs to one class or to none; held pages are those that are in use."""
    stats = engine.manager.arena_stats()
    in_use = engine.in_use()
    most = in_use.union(*(engine.touched.get(step, set()) for step, _ in engine.steps))
    for c, counts in enumerate(stats.classes):
        pages = counts.slabs * engine.arena.k[c]
        assert counts.free + counts.cached + counts.held == pages
        used = {number for size_class, number in in_use if size_class == c}
        extra = {number for size_class, number in most if size_class == c} - used
        assert len(used) <= counts.held <= len(used | extra), (
            f"class {c}: {counts.held} pages held, {used} are in use, {extra} may be"
        )
    assert sum(c.slabs for c in stats.classes) + stats.empty == stats.created
    assert engine.unlimited or stats.created <= engine.slabs


def _verify_keys(engine: Engine) -> None:
    pending, possible = engine.pending(), engine.pending(orphans=True)
    pages = set()
    there: list[set[Key]] = []
    evictions = engine.manager.arena_stats().evictions
    engine.saw("evicted key", evictions - engine.evictions)
    engine.evictions = evictions
    for g in engine.groups:
        resident = {k: page for k in engine.ever[g] if (page := engine.find(g, k)) >= 0}
        there.append(set(resident))
        for key, number in resident.items():
            page = engine.group_page(g, number)
            assert page not in pages, "two keys on one page"
            pages.add(page)
            expected = engine.content.expected(g, key)
            assert engine.content.pages[page] == expected, f"wrong bytes on page {page}"
        for key in pending[g] - engine.ever[g]:
            assert engine.find(g, key) < 0, "a key is visible before its bytes are written"
        unwritten = possible[g] - set(resident)
        keyed = engine.manager.group_stats(g).keyed
        assert len(resident) <= keyed <= len(resident) + len(unwritten)
        if engine.unlimited:
            assert len(resident) == len(engine.ever[g]), "a key is missing"
    engine.audit.check(engine.manager.take_events(), engine.ever, there)
