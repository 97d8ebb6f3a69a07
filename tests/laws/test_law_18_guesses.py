"""Guessed tokens: what was granted for wrong ones may still be written until the step has ended."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute, drain, open_request
from laws.engine import Engine
from laws.grants import allocate
from laws.pressure import release, squeeze
from laws.records import Page
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


@pytest.mark.parametrize("name", cases.chosen)
@cases.law(12)
@given(
    interval=cases.intervals,
    prompt=cases.prompts,
    head=st.integers(0, 40),
    grants=st.lists(st.tuples(st.integers(1, 24), st.integers(0, 9)), min_size=2, max_size=3),
    spare=st.integers(0, 6),
    movable=st.booleans(),
    younger=st.booleans(),
)
def test_law_18_pages_of_a_replaced_grant_are_handed_out_after_the_steps_that_may_compute_it(
    name: str,
    interval: int | None,
    prompt: list[int],
    head: int,
    grants: list[tuple[int, int]],
    spare: int,
    movable: bool,
    younger: bool,
) -> None:
    """`allocate` and `verify` as above. An engine may have started on the grant before."""
    geometry = cases.GEOMETRIES[name]
    engine = Engine(
        geometry,
        cases.policy_of(geometry, interval),
        slabs=2 * geometry.slabs_needed(60) + spare,
        movable=movable,
    )
    if younger:
        open_request(engine, [9])
    request = open_request(engine, prompt, output=12)
    compute(engine, request, upto=min(head, len(prompt) - 1))
    if request.state == "waiting":
        engine.lookup(request)
    engine.begin_step()
    granted: set[Page] = set()
    for tokens, guesses in grants:
        sure = min(tokens, len(prompt) - request.committed)
        if allocate(
            engine, request, sure, min(guesses, len(prompt) + 12 - request.committed - sure)
        ):
            granted |= set(request.pages())
        verify(engine)
    dropped = granted - set(request.pages())
    for _ in squeeze(engine):
        assert dropped <= engine.in_use()
        verify(engine)
    engine.end_step()
    verify(engine)
    assert dropped.isdisjoint(engine.in_use())
    for _ in squeeze(engine, 5000):
        verify(engine)
    release(engine)
    verify(engine)
    assert not any(engine.held())
