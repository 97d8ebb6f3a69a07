from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import found_keys, hit_of, replay
from laws.engine import Engine

from kvcache import Geometry


def sharded(block_tokens: int, shards: int, kind: str) -> Geometry:
    """Shards of a block each, beside a group that is not sharded."""
    full = cases.full("a", block_tokens, shards=shards)
    beside = {
        "alone": (),
        "state": (cases.state("s"),),
        "window": (cases.window("w", 9, 2),),
        "replicated draft": (cases.full("d", 4, draft=1),),
    }
    return cases.geometry(full, *beside[kind])


@cases.law(80)
@given(
    kind=st.sampled_from(["alone", "state", "window", "replicated draft"]),
    block_tokens=st.sampled_from([1, 2, 4]),
    shards=st.sampled_from([2, 3, 4]),
    interval=cases.intervals,
    history=cases.histories,
)
def test_law_20_so_many_shards_of_a_block_hit_as_one_block_of_all_their_tokens(
    kind: str, block_tokens: int, shards: int, interval: int | None, history: list[cases.Turn]
) -> None:
    hits, keys, units = [], [], []
    for geometry in (
        sharded(block_tokens, shards, kind),
        sharded(block_tokens * shards, 1, kind),
    ):
        engine = Engine(geometry, cases.policy_of(geometry, interval))
        texts = replay(engine, history)
        hits.append([hit_of(engine, text[:n]) for text in texts for n in range(1, len(text) + 1)])
        keys.append(found_keys(engine, texts))
        units.append((geometry.hash_unit_tokens, geometry.grid_tokens))
    assert units[0] == units[1]
    assert hits[0] == hits[1]
    assert keys[0] == keys[1]
