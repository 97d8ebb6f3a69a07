from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import found_keys, run
from laws.engine import Engine

boundaries = st.lists(st.integers(0, 40), max_size=3)


def computed_by(prompt: list[int], output: list[int]) -> int:
    return len(prompt) + max(0, len(output) - 1)


def kept_positions(
    engine: Engine, group: int, prompt: list[int], output: list[int], inside: list[int]
) -> set[int]:
    """What the policy names for a group, and the end of the turn."""
    end = computed_by(prompt, output)
    kept = engine.oracle.kept(engine.policy, group, len(prompt), inside, 0, end)
    return {*kept, engine.oracle.floor(end)} - {0}


@cases.law(120)
@given(
    name=cases.with_sparse,
    interval=cases.intervals,
    prompt=cases.prompts,
    output=cases.texts(12, least=0),
    declared=boundaries,
    chunks=cases.chunk_plans,
    overlap=st.booleans(),
)
def test_law_10_the_keys_kept_are_those_that_a_lookup_at_a_boundary_reads(
    name: str,
    interval: int | None,
    prompt: list[int],
    output: list[int],
    declared: list[int],
    chunks: list[int],
    overlap: bool,
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    inside = [b for b in declared if b <= len(prompt)]
    text = run(engine, prompt, output=output, boundaries=inside, chunks=chunks, overlap=overlap)
    found = found_keys(engine, [text])
    for g in engine.oracle.sparse:
        positions = kept_positions(engine, g, prompt, output, inside)
        needed = {end for p in positions for end in engine.oracle.needs(g, p)}
        assert {key.end for key in found[g]} == needed


@cases.law(50)
@given(
    name=cases.with_sparse,
    interval=st.sampled_from([None, 0, 1, 2, 3]),
    prompt=cases.prompts,
    declared=boundaries,
)
def test_law_10_with_what_is_kept_each_boundary_hits_and_without_one_key_some_do_not(
    name: str, interval: int | None, prompt: list[int], declared: list[int]
) -> None:
    """The judge is another manager's lookup, to which the keys are those of a tier."""
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    inside = [b for b in declared if b <= len(prompt)]
    text = run(engine, prompt, boundaries=inside)
    positions = kept_positions(engine, engine.oracle.sparse[0], prompt, [], inside)
    tier = found_keys(engine, [text])
    judge = Engine(geometry, cases.policy_of(geometry, None))

    def served() -> list[int]:
        hits = []
        for position in sorted(positions):
            request = judge.open([*text[:position], 7])
            assert request
            hits.append(judge.lookup(request, tier).hit_tokens)
            judge.abort(request)
        return hits

    assert served() == sorted(positions)
    for g in engine.oracle.sparse:
        for key in list(tier[g]):
            tier[g].remove(key)
            assert served() != sorted(positions), f"{key.end} of group {g} serves nothing"
            tier[g].add(key)
