from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute, open_request
from laws.engine import Engine
from laws.verify import verify

ENDS = ("finish", "abort", "preempt")


@cases.law(80)
@given(
    name=cases.names,
    interval=cases.intervals,
    spare=st.integers(0, 6),
    history=cases.histories,
    ends=st.lists(st.sampled_from(ENDS), min_size=1, max_size=4),
    stop=st.integers(1, 40),
)
def test_law_01_pages_are_conserved_however_requests_end(
    name: str,
    interval: int | None,
    spare: int,
    history: list[cases.Turn],
    ends: list[str],
    stop: int,
) -> None:
    geometry = cases.GEOMETRIES[name]
    slabs = geometry.slabs_needed(80) + spare
    engine = Engine(geometry, cases.policy_of(geometry, interval), slabs=slabs)
    texts: list[list[int]] = []
    for i, turn in enumerate(history):
        texts.append(turn.prompt(texts))
        request = open_request(engine, texts[-1])
        compute(engine, request, upto=min(stop, len(texts[-1])), chunks=turn.chunks)
        end = ends[i % len(ends)]
        getattr(engine, end)(request)
        verify(engine)
        if end == "preempt":
            engine.abort(request)
        assert not any(engine.held())


@cases.law(60)
@given(spare=st.integers(0, 6), history=cases.histories)
def test_law_01_a_request_holds_exactly_the_blocks_of_its_tokens(
    spare: int, history: list[cases.Turn]
) -> None:
    geometry = cases.GEOMETRIES["full"]
    slabs = geometry.slabs_needed(80) + spare
    engine = Engine(geometry, cases.policy_of(geometry, 0), slabs=slabs)
    texts: list[list[int]] = []
    for turn in history:
        texts.append(turn.prompt(texts))
        request = open_request(engine, texts[-1])
        compute(engine, request, chunks=turn.chunks)
        assert engine.held() == [-(-len(texts[-1]) // 4)]
        engine.finish(request)
