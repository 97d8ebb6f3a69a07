"""Guessed tokens: what was granted for wrong ones may still be written until the step has ended."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute, drain, open_request
from laws.engine import Engine
from laws.grants import allocate
from laws.pressure import release, squeeze
from laws.verify import verify


@pytest.mark.parametrize("name", cases.chosen)
@cases.law(8)
@given(
    interval=cases.intervals,
    prompt=cases.prompts,
    guesses=st.integers(1, 9),
    right=st.integers(0, 8),
    spare=st.integers(0, 6),
    movable=st.booleans(),
    younger=st.booleans(),
)
def test_law_18_pages_of_wrong_guesses_are_handed_out_after_the_step_that_may_write_them(
    name: str,
    interval: int | None,
    prompt: list[int],
    guesses: int,
    right: int,
    spare: int,
    movable: bool,
    younger: bool,
) -> None:
    """`allocate` asserts that what it hands out was not in use, `verify` that nothing stays held."""
    geometry = cases.GEOMETRIES[name]
    engine = Engine(
        geometry,
        cases.policy_of(geometry, interval),
        slabs=2 * geometry.slabs_needed(60) + spare,
        movable=movable,
    )
    if younger:  # the oldest request's pages are counted apart
        open_request(engine, [9])
    request = open_request(engine, prompt, output=12)
    compute(engine, request)
    engine.extend(request, [1])
    engine.begin_step()
    assert allocate(engine, request, 1, guesses)
    granted = set(request.pages())
    engine.commit(request, min(request.committed + 1 + right, request.granted))
    verify(engine)
    dropped = granted - set(request.pages())
    for _ in squeeze(engine):
        assert dropped <= engine.in_use()
        verify(engine)
    engine.extend(request, [2] * (request.committed - len(request.tokens)))
    engine.end_step()
    verify(engine)
    assert dropped.isdisjoint(request.pages())
    for _ in squeeze(engine, 5000):
        verify(engine)
    drain(engine)
    release(engine)
    verify(engine)
    assert not any(engine.held())
