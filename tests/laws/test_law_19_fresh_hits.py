from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import open_request, run
from laws.engine import Engine
from laws.grants import allocate
from laws.pressure import release
from laws.verify import verify


@cases.law(200)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompt=cases.texts(40, least=6),
    more=cases.texts(30),
    others=st.lists(cases.prompts, max_size=4),
    spare=st.integers(0, 5),
    movable=st.booleans(),
)
def test_law_19_what_a_lookup_found_is_what_the_grant_after_it_has(
    name: str,
    interval: int | None,
    prompt: list[int],
    more: list[int],
    others: list[list[int]],
    spare: int,
    movable: bool,
) -> None:
    """However many pages of other groups the grant takes from an arena full of cached ones.

    `allocate` compares the stamps of all that the hit reads.
    """
    geometry = cases.GEOMETRIES[name]
    longest = max(len(prompt) + len(more), *map(len, others), 1) + 1
    engine = Engine(
        geometry,
        cases.policy_of(geometry, interval),
        slabs=geometry.slabs_needed(longest) + spare,
        movable=movable,
    )
    for i, other in enumerate(others):
        run(engine, [50 + i, *other])
    text = run(engine, prompt)
    request = open_request(engine, [*text, *more])
    hit = engine.lookup(request)
    for size in (len(request.tokens) - hit.hit_tokens, 1):
        grant = allocate(engine, request, size)
        if grant:
            assert grant.hit_tokens == hit.hit_tokens
            break
    else:
        assert engine.manager.blockage(request.handle) == "restart"
    verify(engine)
    release(engine)
