from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute, hit_of, open_request
from laws.engine import Engine
from laws.grants import allocate
from laws.verify import verify


@cases.law(100)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompt=cases.prompts,
    done=st.integers(0, 39),
)
def test_law_11_no_key_is_found_before_the_step_that_wrote_it_has_ended(
    name: str, interval: int | None, prompt: list[int], done: int
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    request, twin = open_request(engine, prompt), open_request(engine, [*prompt, 1])
    done = min(done, len(prompt) - 1)
    compute(engine, request, upto=done)
    before = engine.lookup(twin).hit_tokens
    resident = engine.resident()
    if request.state == "waiting":
        engine.lookup(request)
    engine.begin_step()
    allocate(engine, request, len(prompt) - done)
    engine.commit(request)
    hit = engine.lookup(twin)
    assert hit.hit_tokens == before
    assert engine.resident() == resident
    assert hit.pending_tokens == engine.walk(twin, resident, engine.pending()).hit
    engine.end_step()
    assert engine.lookup(twin).hit_tokens == hit.pending_tokens


@cases.law(100)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompt=cases.prompts,
    chunks=st.lists(st.integers(1, 16), min_size=1, max_size=2),
    end=st.sampled_from(["abort", "preempt", "finish"]),
)
def test_law_11_an_end_between_schedule_and_completion_leaves_no_key(
    name: str, interval: int | None, prompt: list[int], chunks: list[int], end: str
) -> None:
    """With one or two steps in flight; their pages stay out of use until they have ended."""
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    request = open_request(engine, prompt)
    engine.lookup(request)
    for chunk in chunks:
        size = min(chunk, len(prompt) - request.committed)
        if size:
            engine.begin_step()
            allocate(engine, request, size)
            engine.commit(request)
    held = engine.held()
    getattr(engine, end)(request)
    assert engine.held() == held, "pages of a step in flight were given away"
    while engine.steps:
        assert hit_of(engine, [*prompt, 1]) == 0
        engine.end_step()
        verify(engine)
    assert engine.resident() == [set() for _ in engine.groups]
    assert hit_of(engine, [*prompt, 1]) == 0
    if end == "preempt":
        engine.abort(request)
    assert not any(engine.held())
