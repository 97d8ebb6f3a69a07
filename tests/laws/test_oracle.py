"""The oracle itself, by hand: what it says is what the laws are measured against."""

from __future__ import annotations

import hashlib

import pytest
from laws import cases
from laws.content import Digests
from laws.oracle import Key, Keys, Oracle, Walk
from laws.space import Arena

from kvcache.retention import Dense, Sparse

NATIVE = ("native", "")
TEXT = list(range(100, 160))


def oracle(name: str) -> Oracle:
    return Oracle.of(cases.GEOMETRIES[name])


def ends(oracle: Oracle, group: int, *ends: int) -> set[Key]:
    keys = {oracle.key(group, NATIVE, TEXT, end) for end in ends}
    assert None not in keys
    return {key for key in keys if key}


@pytest.mark.parametrize(
    ("name", "unit", "grid"),
    [
        ("full", 4, 4),
        ("two sizes", 2, 4),
        ("coprime", 2, 12),
        ("gpt-oss", 4, 4),
        ("deepseek", 8, 16),
        ("three kinds", 8, 8),
        ("window", 2, 2),
        ("recurrent", 4, 4),
        ("dcp", 8, 8),
    ],
)
def test_units_and_grids_of_the_cases(name: str, unit: int, grid: int) -> None:
    assert (oracle(name).unit, oracle(name).grid) == (unit, grid)


def test_slabs_of_the_cases_hold_one_two_three_and_seven_pages() -> None:
    held = {k for g in cases.GEOMETRIES.values() for k in g.pages_per_slab}
    assert {1, 2, 3, 7} <= held


def test_a_window_reads_the_window_less_the_query_before_it() -> None:
    o = oracle("gpt-oss")  # window 8, blocks of 2
    assert o.begin(1, 16) == 9
    assert o.needs(1, 16) == [10, 12, 14, 16]
    assert o.needs(1, 4) == [2, 4]
    assert o.needs(1, 0) == []


def test_a_chunk_reads_from_its_start_and_nothing_at_its_end() -> None:
    o = oracle("chunked")  # chunks of 12, blocks of 4
    assert o.needs(1, 8) == [4, 8]
    assert o.needs(1, 12) == []
    assert o.needs(1, 20) == [16, 20]


def test_an_overlapping_pooling_state_reads_one_ratio_more() -> None:
    o = oracle("deepseek")  # group 3: ratio 4, blocks of 2; group 4: ratio 16 without overlap
    assert o.needs(3, 16) == [14, 16]
    assert o.begin(3, 18) == 12
    assert o.needs(4, 32) == []
    assert o.begin(4, 37) == 32


def test_full_groups_read_everything_and_states_one_page() -> None:
    o = oracle("hybrid")
    assert o.needs(0, 12) == [4, 8, 12]
    assert o.needs(1, 12) == [12]
    assert o.needs(1, 0) == []


def test_a_block_smaller_than_a_unit_is_known_with_its_whole_unit() -> None:
    o = oracle("gpt-oss")  # unit 4
    assert o.key(1, NATIVE, TEXT[:7], 6) is None
    assert o.key(1, NATIVE, TEXT[:8], 6) == Key(NATIVE, tuple(TEXT[:8]), 6)
    assert o.key(0, NATIVE, TEXT[:8], 8, 7) is None


def test_a_draft_block_is_known_with_the_tokens_that_it_looks_ahead_to() -> None:
    o = oracle("hybrid + draft")  # lookahead 1, unit 4
    assert o.key(2, NATIVE, TEXT[:5], 4) is None
    assert o.key(2, NATIVE, TEXT[:8], 4) == Key(NATIVE, tuple(TEXT[:8]), 4)


def test_parts_of_a_unit_share_its_digest_but_for_their_place() -> None:
    d = Digests(oracle("gpt-oss"))
    key = Key(NATIVE, tuple(TEXT[:4]), 4)
    link = hashlib.sha256(
        b"kvcache/block/2".ljust(64, b"\0")
        + b"".join(t.to_bytes(4, "little") for t in TEXT[:4])
        + d.root(NATIVE)
    ).digest()
    assert d.of(0, key) == d.of(1, key) == link
    first = d.of(1, key._replace(end=2))
    assert first[:28] == link[:28]
    assert first[28:] == bytes([link[28] ^ 1, *link[29:]])


def test_a_hit_needs_every_group() -> None:
    o = oracle("hybrid")
    keys: Keys = [ends(o, 0, 4, 8, 12, 16), ends(o, 1, 8, 20)]
    assert o.walk(NATIVE, TEXT, keys) == Walk(8, 16)
    assert o.hits(NATIVE, TEXT, keys) == [0, 8]
    assert o.junction(o.walk(NATIVE, TEXT, keys)) == 16
    assert o.walk(NATIVE, TEXT[:8], keys) == Walk(0, 4)  # the last token is recomputed
    assert o.walk(NATIVE, TEXT, keys, 15) == Walk(8, 12)


def test_a_hit_of_a_window_needs_no_more_than_the_window() -> None:
    o = oracle("gpt-oss")
    keys: Keys = [ends(o, 0, *range(4, 33, 4)), ends(o, 1, 18, 20, 22, 24, 26, 28)]
    assert o.walk(NATIVE, TEXT, keys) == Walk(28, 32)
    keys[1].remove(Key(NATIVE, tuple(TEXT[:28]), 28))
    assert o.walk(NATIVE, TEXT, keys) == Walk(24, 32)
    keys[1].remove(Key(NATIVE, tuple(TEXT[:24]), 22))
    assert o.walk(NATIVE, TEXT, keys) == Walk(0, 32)


def test_drafts_and_private_groups_have_no_say() -> None:
    o = oracle("hybrid + draft")
    keys: Keys = [ends(o, 0, 4, 8), ends(o, 1, 8), set()]
    assert o.walk(NATIVE, TEXT, keys) == Walk(8, 8)
    o = oracle("private")
    assert o.walk(NATIVE, TEXT, [ends(o, 0, 4, 8), set(), set()]) == Walk(8, 8)


def test_a_sparse_policy_keeps_marks_and_the_replay_boundary() -> None:
    o = oracle("hybrid")
    assert o.kept(Sparse(), 1, 30, [9, 17], 0, 60) == [8, 16, 28]
    assert o.kept(Sparse(12), 1, 30, [], 8, 40) == [12, 24, 28, 36]
    assert o.kept(Dense(), 1, 30, [], 20, 32) == [24, 28, 32]
    assert o.kept(Sparse(0, {"s": 8}), 1, 30, [], 0, 20) == [8, 16]
    assert o.kept(Sparse(0, {"s": 8}), 0, 30, [], 0, 29) == [28]


def test_sparse_groups_key_what_a_lookup_at_a_kept_position_reads() -> None:
    o = oracle("gpt-oss")
    assert o.keyed(0, [16], 0, 20) == {4, 8, 12, 16, 20}
    assert o.keyed(1, [4, 16], 0, 20) == {2, 4, 10, 12, 14, 16}
    assert o.keyed(1, [16], 16, 20) == set()


def test_pages_that_a_request_holds_at_most() -> None:
    assert [oracle("gpt-oss").pages(g, 100) for g in (0, 1)] == [25, 4 + 2]
    assert [oracle("chunked").pages(g, 100) for g in (0, 1)] == [25, 2 + 1]
    assert [oracle("deepseek").pages(g, 100) for g in range(5)] == [13, 7, 2 + 4, 2 * 2 + 2, 4]
    assert [oracle("speculative").pages(g, 10) for g in (0, 1)] == [3, 4]
    assert [oracle("private").pages(g, 4) for g in range(3)] == [1, 1, 2]


@pytest.mark.parametrize("name", sorted(cases.GEOMETRIES))
@pytest.mark.parametrize("tokens", [1, 7, 40, 1000])
def test_the_geometry_counts_slabs_as_the_oracle_does(name: str, tokens: int) -> None:
    geometry = cases.GEOMETRIES[name]
    arena = Arena(geometry, 1)
    assert geometry.slabs_needed(tokens) == sum(arena.needed(tokens))
    pages = [arena.oracle.pages(g, tokens) for g in arena.oracle.groups]
    assert list(geometry.pages_needed(tokens)) == pages


def test_slabs_without_a_held_page_can_change_their_class() -> None:
    arena = Arena(cases.GEOMETRIES["hybrid"], 3)
    state_class, full_class = arena.class_of[1], arena.class_of[0]
    owned = [0, 0]
    owned[full_class] = 3
    one_state = [0, 0]
    one_state[state_class] = 1
    full_pages = {(full_class, n) for n in (0, 3, 6)}  # one in each slab of three
    assert not arena.can_take(one_state, full_pages, owned)
    assert arena.can_take(one_state, full_pages - {(full_class, 3)}, owned)
