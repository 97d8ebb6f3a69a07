from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.specs import (
    ChunkedLocal,
    Compressed,
    CrossAttention,
    FullAttention,
    GroupRules,
    PoolingState,
    RecurrentState,
    RingBuffer,
    SlidingWindow,
)
from kvcache.retention import Dense


def full(name: str, block_tokens: int, **more: int) -> FullAttention:
    return FullAttention(
        name=name, layers=1, kv_heads=1, head_dim=8, block_tokens=block_tokens, **more
    )


def window(name: str, block_tokens: int, tokens: int) -> SlidingWindow:
    return SlidingWindow(
        name=name, layers=1, kv_heads=1, head_dim=8, window=tokens, block_tokens=block_tokens
    )


STATE = RecurrentState(name="state", layers=1, state_bytes_per_layer=64)
RING = RingBuffer(name="ring", layers=1, ring_tokens=4, token_bytes=8)


@dataclass(frozen=True)
class AnySpec:
    """A spec of someone else."""

    rules: Any
    name: Any = "own"
    page_bytes: int = 64
    alignment_bytes: int = 1
    kind: str = "unknown"
    layers: int = 1


@pytest.mark.parametrize(
    ("groups", "grid", "unit"),
    [
        ((full("a", 128),), 128, 128),
        ((full("a", 128), full("b", 48)), 384, 16),
        ((full("a", 128), window("w", 16, 128)), 128, 128),
        ((full("a", 128), window("w", 96, 128)), 384, 32),
        ((full("a", 16), window("w", 128, 128)), 128, 16),
        ((window("w", 16, 8), window("v", 24, 8)), 48, 48),
        ((full("a", 128), window("w", 96, 8), window("v", 64, 8), window("u", 12, 8)), 384, 4),
        ((full("a", 8), STATE), 8, 8),
        ((STATE,), 16, 16),
        ((STATE, RING), 16, 16),
        ((full("a", 8, dcp_shards=4), window("w", 16, 8)), 32, 32),
        ((full("a", 16), full("draft", 4, lookahead_tokens=1)), 16, 4),
    ],
)
def test_grid_and_hash_unit_follow_from_the_blocks(
    groups: tuple[FullAttention, ...], grid: int, unit: int
) -> None:
    geometry = Geometry(groups)
    assert (geometry.grid_tokens, geometry.hash_unit_tokens) == (grid, unit)


block = st.builds(
    lambda a, b, c: 2**a * 3**b * 5**c, st.integers(0, 5), st.integers(0, 2), st.integers(0, 1)
)
blocks = st.lists(block, max_size=4)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(blocks, blocks)
def test_every_block_divides_the_hash_unit_or_is_a_multiple(
    dense: list[int], sparse: list[int]
) -> None:
    groups = [full(f"f{i}", b) for i, b in enumerate(dense)]
    groups += [window(f"w{i}", b, 5) for i, b in enumerate(sparse)]  # type: ignore[misc]
    geometry = Geometry((*groups, STATE))
    unit, grid = geometry.hash_unit_tokens, geometry.grid_tokens
    assert grid % unit == 0
    assert all(b % unit == 0 for b in dense)
    assert all(b % unit == 0 or unit % b == 0 for b in sparse)
    assert all(grid % b == 0 for b in (*dense, *sparse))
    assert Geometry((STATE, *reversed(groups))).hash_unit_tokens == unit


def test_a_state_has_the_grid_for_a_block_and_a_private_group_none() -> None:
    geometry = Geometry((full("a", 8), STATE, RING, window("w", 4, 6)))
    assert geometry.block_tokens == (8, 8, 0, 4)
    assert Geometry((STATE,), state_grid_tokens=3).block_tokens == (3,)


SPANS = [
    GroupRules("span", block_tokens=b, chunk_tokens=c, lead_tokens=lead)
    for b, c, lead in product((1, 2, 4), (1, 4, 8, 12), (0, 1, 3, 4, 7))
    if c == 1 or c % b == 0
]


@pytest.mark.parametrize("grid", [4, 8, 12])
@pytest.mark.parametrize("rules", SPANS, ids=str)
def test_the_need_of_a_span_is_what_a_decoding_request_holds(rules: GroupRules, grid: int) -> None:
    geometry = Geometry((AnySpec(rules), full("a", grid)))
    assert geometry.grid_tokens == grid
    block = rules.block_tokens
    for longest in (1, 5, 3 * grid, 100):
        most = 0
        for computed in range(longest):
            begin = rules.need_begin(computed // grid * grid) // block
            most = max(most, computed // block + 1 - begin)  # the block of the next token included
        assert most <= geometry.pages_needed(longest)[0]
    assert most == geometry.pages_needed(longest)[0]


def blocks_read(rules: GroupRules, position: int) -> set[int]:
    begin, block = rules.need_begin(position), rules.block_tokens
    return set(range(begin // block, -(-position // block))) if begin < position else set()


@pytest.mark.parametrize("grid", [4, 8, 12])
@pytest.mark.parametrize("rules", [r for r in SPANS if r.chunk_tokens > 1], ids=str)
def test_the_need_of_a_transient_span_is_bounded_by_what_two_positions_read(
    rules: GroupRules, grid: int
) -> None:
    transient = rules._replace(transient=True)
    geometry = Geometry((AnySpec(transient), full("a", grid)))
    for longest in (1, 5, 3 * grid, 100):
        most = 0
        for computed in range(longest):
            held = blocks_read(rules, computed // grid * grid) | blocks_read(rules, computed)
            fresh = -(-computed // rules.block_tokens)
            new = {b for b in blocks_read(rules, computed + 1) if b >= fresh}
            most = max(most, len(held | new))
        assert most <= geometry.pages_needed(longest)[0]
    if rules.lead_tokens >= rules.block_tokens and grid % rules.chunk_tokens == 0:
        assert most == geometry.pages_needed(longest)[0]


def test_only_spans_with_chunks_are_transient() -> None:
    for rules in (
        GroupRules("full", block_tokens=4, transient=True),
        GroupRules("span", block_tokens=4, lead_tokens=7, transient=True),
    ):
        with pytest.raises(ConfigError, match="spans with chunks"):
            Geometry((AnySpec(rules),))


def test_the_need_of_the_other_kinds() -> None:
    cross = CrossAttention(
        name="cross", layers=1, kv_heads=1, head_dim=8, max_encoder_tokens=9, block_tokens=4
    )
    speculative = RecurrentState(name="s", layers=1, state_bytes_per_layer=64, speculative_tokens=3)
    geometry = Geometry((full("a", 8), STATE, speculative, RING, cross))
    assert geometry.pages_needed(1) == (1, 2, 5, 1, 3)
    assert geometry.pages_needed(17) == (3, 2, 5, 1, 3)


def test_chunked_and_pooled_groups_are_bounded_by_their_chunk() -> None:
    chunked = ChunkedLocal(
        name="c", layers=1, kv_heads=1, head_dim=8, chunk_tokens=32, block_tokens=8
    )
    light = PoolingState(name="p", layers=1, ratio=4, token_bytes=8, block_tokens=4, overlap=True)
    compressed = Compressed(name="k", layers=1, ratio=4, entry_bytes=8, block_tokens=16)
    geometry = Geometry((chunked, light, compressed))
    assert geometry.grid_tokens == 16
    assert geometry.pages_needed(1000) == ((32 - 16 + 16) // 8, 3, 63)


def test_slabs_needed_rounds_up_for_each_size_class() -> None:
    # Pages of 64 bytes (state) and 32 (a block of one token, two in a slab).
    geometry = Geometry((full("a", 1), STATE), page_alignment_bytes=1)
    assert geometry.pages_per_slab == (1, 2)
    assert geometry.class_of_group == (1, 0)
    assert [geometry.slabs_needed(n) for n in (1, 2, 3, 100)] == [3, 3, 4, 52]
    assert geometry.slabs_in(64 * 7 + 63) == 7
    assert geometry.pool_bytes((3, 2)) == 3 * 32 + 2 * 64
    assert geometry.padding() == (0, 0)


def test_a_spec_of_the_callers_own_is_fine() -> None:
    own = AnySpec(GroupRules("full", block_tokens=4))
    assert Geometry((own,)).grid_tokens == 4


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([full("a", 8)], "is a list: give a tuple"),
        ((), "is empty"),
        ((full("a", 8), full("a", 4)), "two groups of one name"),
        (("a",), "has a str: give group specs"),
        (tuple(full(f"g{i}", 8) for i in range(65)), "65 groups, at most 64"),
        ((AnySpec(GroupRules("full", block_tokens=4), name=""),), "name is ''"),
        ((AnySpec(GroupRules("full", block_tokens=4), name=3),), "name is 3"),
        ((AnySpec(GroupRules("other", block_tokens=4)),), "kind 'other'"),  # type: ignore[arg-type]
        ((AnySpec(GroupRules("full")),), "blocks of 0 tokens"),
        ((AnySpec(GroupRules("span", block_tokens=-4)),), "blocks of -4 tokens"),
        ((AnySpec(GroupRules("state", block_tokens=4)),), "blocks of 4 tokens"),
        ((AnySpec(GroupRules("span", block_tokens=4, chunk_tokens=6)),), "must divide the chunk"),
        ((AnySpec(GroupRules("span", block_tokens=4, chunk_tokens=0)),), "must divide the chunk"),
        ((AnySpec(GroupRules("state", chunk_tokens=6)),), "must divide the chunk"),
        ((AnySpec(GroupRules("span", block_tokens=4, lead_tokens=-1)),), "lead_tokens -1"),
        ((AnySpec(GroupRules("state", request_pages=2**31)),), "request_pages 2147483648"),
        ((AnySpec(GroupRules("state"), page_bytes=0),), "pages of 0 bytes"),
        ((AnySpec(GroupRules("state"), page_bytes=2**50),), "pages of 1125899906842624 bytes"),
        ((full("a", 2**16), full("b", 2**16 - 1)), "hit grid would be 4294901760 tokens"),
    ],
)
def test_a_geometry_refuses_groups_that_cannot_work(groups: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Geometry(groups)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("state_grid_tokens", 0, "state_grid_tokens is 0"),
        ("page_alignment_bytes", 0, "page_alignment_bytes is 0"),
        ("page_alignment_bytes", 96, "power of two"),
    ],
)
def test_a_geometry_refuses_odd_settings(field: str, value: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Geometry((STATE,), **{field: value})


TWO = Geometry((full("a", 4), STATE))  # pages of 128 and 64 bytes


def test_an_arena_too_small_for_a_slab_has_none() -> None:
    slab = TWO.slab_bytes
    found = [TWO.slabs_in(n) for n in (0, slab - 1, slab, 3 * slab - 1, np.int64(3 * slab))]
    assert found == [0, 0, 1, 2, 3]
    with pytest.raises(ConfigError, match="the arena has 0 slabs"):
        Manager(TWO, slabs=TWO.slabs_in(slab - 1), retention=Dense())


def test_sizes_of_a_geometry_count_whole_things() -> None:
    assert TWO.pages_needed(0) == (0, 2)
    assert TWO.pages_needed(np.int32(5)) == (2, 2)
    assert TWO.pool_bytes(np.array([3, 2])) == 3 * TWO.groups[0].page_bytes + 2 * 64


@pytest.mark.parametrize("value", [-1, -(2**40), 8e9, "8", None, True, 2**63, [4]])
@pytest.mark.parametrize(
    ("call", "named"),
    [
        (TWO.slabs_in, "arena_bytes is"),  # -1 would be UNLIMITED
        (TWO.slabs_needed, "tokens is"),
        (TWO.pages_needed, "tokens is"),
        (lambda value: TWO.pool_bytes([1, value]), "pages of group 'state' is"),
    ],
)
def test_sizes_of_a_geometry_refuse_what_is_no_whole_number_from_0_on(
    call: Callable[[Any], Any], named: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=named):
        call(value)


@pytest.mark.parametrize(
    ("pages", "message"), [(5, "pages is 5"), ([1], "1 numbers for 2 groups"), ([], "0 numbers")]
)
def test_pool_bytes_takes_a_number_for_each_group(pages: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TWO.pool_bytes(pages)


@pytest.mark.parametrize("slabs", [7812500.0, "4", None, True])
def test_a_number_of_slabs_is_whole(slabs: Any) -> None:
    with pytest.raises(ConfigError, match=r"slabs is .*: give a whole number, or UNLIMITED"):
        Manager(TWO, slabs=slabs, retention=Dense())
