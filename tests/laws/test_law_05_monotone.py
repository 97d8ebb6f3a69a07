from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import hit_of, replay, run
from laws.engine import Engine


@cases.law(80)
@given(
    name=cases.names,
    interval=cases.intervals,
    history=cases.histories,
    more=cases.turns,
    prompt=cases.prompts,
)
def test_law_05_more_content_never_lowers_a_hit(
    name: str,
    interval: int | None,
    history: list[cases.Turn],
    more: cases.Turn,
    prompt: list[int],
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    texts = replay(engine, history)
    asked = [prompt, *texts]
    before = [hit_of(engine, text) for text in asked]
    run(engine, more.prompt(texts), output=more.output, chunks=more.chunks)
    after = [hit_of(engine, text) for text in asked]
    assert all(a >= b for a, b in zip(after, before, strict=True)), f"{before} {after}"


@cases.law(80)
@given(
    name=cases.names,
    interval=cases.intervals,
    history=cases.histories,
    tail=cases.texts(10, least=0),
)
def test_law_05_a_longer_prompt_never_hits_less(
    name: str, interval: int | None, history: list[cases.Turn], tail: list[int]
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    text = [*replay(engine, history)[-1], *tail]
    hits = [hit_of(engine, text[:n]) for n in range(1, len(text) + 1)]
    assert hits == sorted(hits)


@cases.law(80)
@given(name=cases.with_sparse, n=st.integers(1, 4), history=cases.histories)
def test_law_05_dense_hits_at_least_interval_n_and_n_at_least_interval_zero(
    name: str, n: int, history: list[cases.Turn]
) -> None:
    """Boundaries declared after a longer hit are aside: a state that a hit skips is not made."""
    geometry = cases.GEOMETRIES[name]
    engines = [Engine(geometry, cases.policy_of(geometry, i)) for i in (0, n, None)]
    texts, *_ = [replay(engine, history) for engine in engines]
    for text in texts:
        for end in range(1, len(text) + 1):
            zero, every_n, dense = (hit_of(engine, text[:end]) for engine in engines)
            assert zero <= every_n <= dense
