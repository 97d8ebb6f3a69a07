"""Ends of loads through the toy engine: bytes that arrive, or do not."""

from __future__ import annotations

from laws.counting import count
from laws.engine import Engine


def end_load(engine: Engine, load: int, ok: list[bool]) -> None:
    """The good pages have their bytes; with a bad one the request waits again."""
    count("end_load")
    entry = engine.loads.pop(load)
    request = entry.request
    for (group, page, key), good in zip(entry.items, ok, strict=True):
        if good:
            expected = engine.content.expected(group, key)
            engine.content.pages[engine.group_page(group, page)] = expected
            if not entry.muted:
                engine.ever[group].add(key)
    engine.manager.end_load(load, ok)  # type: ignore[arg-type]
    if request is None:
        return
    request.load = 0
    if all(ok):
        request.computed = request.committed = request.granted
        request.state = "running"
        engine.read_tables(request)
        engine.content.verify_reads(engine.work(request, request.computed, request.computed))
    else:
        engine.saw("load that failed")
        engine.reset(request)


def abandon_load(engine: Engine, load: int) -> None:
    count("abandon_load")
    request = engine.loads[load].request
    assert request is not None
    engine.manager.abandon_load(load)
    engine.loads[load].request = None
    engine.reset(request)
