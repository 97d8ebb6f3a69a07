from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute, drain, hit_of, open_request
from laws.engine import Engine
from laws.grants import allocate
from laws.verify import verify


@pytest.mark.parametrize("end", ["preempt", "abort"])
@cases.law(100)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompt=cases.prompts,
    done=st.integers(0, 40),
    chunks=cases.chunk_plans,
    in_flight=st.integers(0, 12),
    output=st.integers(0, 8),
)
def test_law_09_a_resume_hits_at_least_the_last_completed_grid_point(
    end: str,
    name: str,
    interval: int | None,
    prompt: list[int],
    done: int,
    chunks: list[int],
    in_flight: int,
    output: int,
) -> None:
    """Also with a step in flight, whose writes are dropped. A token is left to recompute."""
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    request = open_request(engine, prompt, output=output)
    engine.lookup(request)
    engine.extend(request, [1] * output)
    text = list(request.tokens)
    done = min(done, len(text) - 1)
    compute(engine, request, upto=done, chunks=chunks)
    in_flight = min(in_flight, len(text) - done)
    assert allocate(engine, request, in_flight)
    if in_flight:
        engine.begin_step()
        engine.commit(request)
    getattr(engine, end)(request)
    verify(engine)
    point = done // engine.oracle.grid * engine.oracle.grid
    assert hit_of(engine, text) == point  # no more either: the open step leaves no key
    drain(engine)
    verify(engine)
    assert hit_of(engine, text) == point
