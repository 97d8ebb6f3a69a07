"""Images and embeddings in prompts: they share by content and place, through every kind of group."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute, open_request, run
from laws.engine import Engine
from laws.grants import allocate
from laws.prompts import IMAGES, ROWS, Token, cover, plain
from laws.verify import verify

items = st.sampled_from([*IMAGES, *ROWS])


@pytest.mark.parametrize("name", cases.chosen)
@cases.law(8)
@given(
    interval=cases.intervals,
    prompt=cases.texts(40, least=34),
    item=items,
    other=items,
    at=st.integers(0, 24),
    moved=st.integers(0, 24),
)
def test_law_17_a_prompt_with_an_item_hits_its_like_and_others_as_far_as_they_are_equal(
    name: str,
    interval: int | None,
    prompt: list[int],
    item: str,
    other: str,
    at: int,
    moved: int,
) -> None:
    """Lookups are compared with brute force over tokens that know what stands at them."""
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    with_item = cover(prompt, item, at)
    assert plain(with_item) == prompt
    run(engine, with_item)
    others: list[list[Token]] = [
        prompt,
        with_item,
        cover(prompt, other, at),
        cover(prompt, item, moved),
        cover(with_item, other, moved),
    ]
    for tokens in others:
        request = open_request(engine, [*tokens, 7])
        hit = engine.lookup(request).hit_tokens
        assert hit == engine.walk(request, engine.resident()).hit
        same = [a == b for a, b in zip(tokens, with_item, strict=True)]
        assert all(same[:hit])
        if all(same):
            assert hit == engine.oracle.floor(len(prompt))
        assert allocate(engine, request, 1)
        engine.abort(request)
    for tokens in others:
        request = open_request(engine, tokens)
        compute(engine, request)
        engine.finish(request)
        verify(engine)
