"""Runs requests through the toy engine, one at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from laws.cases import Turn
from laws.engine import Engine
from laws.grants import allocate
from laws.oracle import Key
from laws.records import Request
from laws.verify import verify

ONE_CHUNK = (10**6,)


def open_request(
    engine: Engine, tokens: Sequence[int], *, output: int = 0, boundaries: Sequence[int] = ()
) -> Request:
    request = engine.open(tokens, max_tokens=len(tokens) + output, boundaries=boundaries)
    assert request, "this test gives its arena room for one request"
    return request


def hit_of(engine: Engine, tokens: Sequence[int], salt: str = "") -> int:
    """The hit that a prompt would get now."""
    request = engine.open(tokens, salt=salt)
    assert request
    hit = engine.lookup(request).hit_tokens
    engine.abort(request)
    return hit


def compute(
    engine: Engine,
    request: Request,
    *,
    upto: int | None = None,
    chunks: Sequence[int] = ONE_CHUNK,
    overlap: bool = False,
) -> None:
    """Computes known tokens up to `upto` (all), one chunk a step; the steps' ends may overlap.

    Where there is no room for a chunk, the open steps are ended; then it must fit, wholly or in
    part, or the request must start again, once.
    """
    end = len(request.tokens) if upto is None else upto
    sizes = itertools.cycle(chunks)
    while request.committed < end:
        if request.state == "waiting":
            engine.lookup(request)
        at = request.hit.hit_tokens if request.hit else request.committed
        size = max(0, min(next(sizes), end - at))  # 0: the hit reaches beyond the end
        engine.begin_step()
        if allocate(engine, request, size) is None:
            drain(engine)
            if allocate(engine, request, size) is None:
                restart(engine, request)
                continue
            engine.begin_step()
        if request.granted > request.committed:
            engine.commit(request)
        verify(engine)
        while engine.steps and (not overlap or len(engine.steps) == engine.max_open_steps):
            engine.end_step()
    drain(engine)
    verify(engine)


def restart(engine: Engine, request: Request) -> None:
    """What the manager asks the oldest request for, when only its own pages are in its way."""
    why = engine.manager.blockage(request.handle)
    assert why == "restart", f"a lone request is blocked by {why!r}"
    assert request.state == "running", "a lone request cannot even start"
    engine.restart(request)


def compute_twins(
    engine: Engine, requests: Sequence[Request], *, chunks: Sequence[int], lead: int = 0
) -> None:
    """All known tokens of requests that do not find what the others write; each `lead` steps behind."""
    for request in requests:
        if request.state == "waiting":
            engine.lookup(request)
    sizes = itertools.cycle(chunks)
    for step in itertools.count():
        left = [r for r in requests if r.committed < len(r.tokens)]
        if not left:
            return
        engine.begin_step()
        size = next(sizes)
        for request in left:
            at = request.hit.hit_tokens if request.hit else request.committed
            more = min(size, len(request.tokens) - at)
            if step >= lead * requests.index(request):
                assert allocate(engine, request, more)
                engine.commit(request)
        engine.end_step()
        verify(engine)


def drain(engine: Engine) -> None:
    while engine.steps:
        engine.end_step()


def decode(engine: Engine, request: Request, output: Sequence[int]) -> None:
    """Each token is sampled by the step before; the last one is never computed."""
    for sample in output:
        compute(engine, request)
        engine.extend(request, [sample])


def run(
    engine: Engine,
    tokens: Sequence[int],
    *,
    output: Sequence[int] = (),
    chunks: Sequence[int] = ONE_CHUNK,
    boundaries: Sequence[int] = (),
    overlap: bool = False,
) -> list[int]:
    """A request from open to finish; returns its tokens, prompt and output."""
    request = open_request(engine, tokens, output=len(output), boundaries=boundaries)
    compute(engine, request, chunks=chunks, overlap=overlap)
    decode(engine, request, output)
    engine.finish(request)
    verify(engine)
    return request.tokens


def replay(engine: Engine, history: Sequence[Turn]) -> list[list[int]]:
    """Runs a history one request after the other; returns what each one's tokens were."""
    done: list[list[int]] = []
    for turn in history:
        done.append(run(engine, turn.prompt(done), output=turn.output, chunks=turn.chunks))
    return done


def found_keys(engine: Engine, texts: Sequence[Sequence[int]]) -> list[set[Key]]:
    """Of all prefixes of these texts, those that have a key, group by group."""
    found: list[set[Key]] = []
    for g, block in enumerate(engine.oracle.blocks):
        keys = {
            engine.oracle.key(g, ("native", ""), text, end)
            for text in texts
            for end in (range(block, len(text) + 1, block) if block else ())
        }
        found.append({key for key in keys if key and engine.find(g, key) >= 0})
    return found
