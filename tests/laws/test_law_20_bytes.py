"""Law 20 in bytes: each rank's arena written and read, one byte string for each token's rows.

A page of a sharded group lies at the same place in every rank's arena. Ranks take turns token by
token, so that each holds 1/d of the rows that the page number stands for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st
from laws import cases

from kvcache import Geometry
from kvcache.core.manager import Manager
from kvcache.core.records import Grant
from kvcache.core.specs import Compressed, FullAttention, IndexedAttention, LatentAttention
from kvcache.core.specs.base import GroupSpec
from kvcache.retention import Sparse

HEADS, WIDTH, RATIO = 4, 2, 4
KINDS = ("full", "latent", "indexed", "compressed")


def group(kind: str, block_tokens: int, *, shards: int = 1, ranks: int = 1) -> GroupSpec:
    """`ranks` share the heads (TP), `shards` the tokens (DCP)."""
    if kind == "latent":
        return LatentAttention(
            name="a",
            layers=1,
            block_tokens=block_tokens,
            rank=3,
            rope_dim=1,
            element_bytes=1,
            dcp_shards=shards,
        )
    if kind == "indexed":
        return IndexedAttention(
            name="a",
            layers=1,
            kv_heads=HEADS // ranks,
            head_dim=WIDTH,
            index_dim=3,
            block_tokens=block_tokens,
            element_bytes=1,
            index_element_bytes=1,
            dcp_shards=shards,
        )
    if kind == "compressed":
        return Compressed(
            name="a",
            layers=1,
            ratio=RATIO,
            entry_bytes=6,
            index_bytes=2,
            block_tokens=block_tokens * RATIO,
            dcp_shards=shards,
        )
    return FullAttention(
        name="a",
        layers=1,
        kv_heads=HEADS // ranks,
        head_dim=WIDTH,
        block_tokens=block_tokens,
        element_bytes=1,
        dcp_shards=shards,
    )


def beside(kind: str) -> tuple[GroupSpec, ...]:
    return {"alone": (), "window": (cases.window("w", 9, 2),), "state": (cases.state("s", 24),)}[
        kind
    ]


class Ranks:
    """A manager, and the arena of each rank: what is written must be there when it is read."""

    def __init__(self, geometry: Geometry, slabs: int, shards: int) -> None:
        self.geometry, self.shards = geometry, shards
        self.manager = Manager(geometry, slabs=slabs, retention=Sparse())
        self.arenas = np.zeros((shards, slabs * geometry.slab_bytes), np.uint8)
        self.rows = geometry.groups[0].page_bytes
        """Bytes of a page of the sharded group on one rank."""

    def places(self, table: Sequence[int], token: int) -> tuple[int, int, int]:
        """Rank, first byte and length of what one token writes to group 0."""
        block = self.geometry.block_tokens[0]
        page, inside = table[token // block], token % block
        of_rank = self.rows // (block // self.shards)
        stride = self.geometry.stride_bytes[self.geometry.class_of_group[0]]
        return inside % self.shards, page * stride + inside // self.shards * of_rank, of_rank

    def write(self, handle: int, tokens: Sequence[int], start: int, end: int) -> None:
        table = self.manager.block_table(handle, 0).tolist()
        for t in range(start, end):
            rank, first, length = self.places(table, t)
            assert first + length <= self.arenas.shape[1]
            self.arenas[rank, first : first + length] = stamp(tokens[: t + 1])
        self._write_others(handle, end)

    def _write_others(self, handle: int, end: int) -> None:
        """Pages of the other groups, whole, on every rank: they must not lie over anything."""
        for g in range(1, len(self.geometry.groups)):
            spec, c = self.geometry.groups[g], self.geometry.class_of_group[g]
            if spec.rules.kind == "state":
                pages = self.manager.state_plan(handle, g).pages.tolist()
            else:
                pages = [p for p in self.manager.block_table(handle, g).tolist() if p >= 0]
            for page in pages:
                first = page * self.geometry.stride_bytes[c]
                self.arenas[:, first : first + spec.page_bytes] = 255

    def read(self, handle: int, tokens: Sequence[int], end: int) -> None:
        table = self.manager.block_table(handle, 0).tolist()
        for t in range(end):
            rank, first, length = self.places(table, t)
            there = self.arenas[rank, first : first + length]
            assert (there == stamp(tokens[: t + 1])).all(), f"row of token {t} on rank {rank}"

    def run(self, tokens: Sequence[int], chunk: int) -> tuple[list[object], list[list[int]]]:
        """Computes a prompt; what it hit and was granted, and its table."""
        manager, grants = self.manager, list[object]()
        handle = manager.open(list(tokens), max_tokens=len(tokens))
        at = manager.lookup(handle).hit_tokens
        grants.append(at)
        first = True
        while at < len(tokens):
            step = manager.begin_step()
            grant: Grant | None = manager.allocate(handle, min(chunk, len(tokens) - at))
            assert grant
            if first:
                self.read(handle, tokens, grant.start)
                first = False
            self.write(handle, tokens, grant.start, grant.end)
            grants.append(grant)
            at = grant.end
            manager.commit(handle, at)
            manager.end_step(step)
            manager.check()
        self.read(handle, tokens, at)
        table = manager.block_table(handle, 0).tolist()
        manager.finish(handle)
        return grants, table


def stamp(prefix: Sequence[int]) -> int:
    """A number below 255 that tells prefixes apart well enough."""
    return hash(tuple(prefix)) % 254 + 1


@pytest.mark.parametrize("other", ["alone", "window", "state"])
@pytest.mark.parametrize("kind", KINDS)
@cases.law(10)
@given(
    block=st.sampled_from([1, 2, 4]),
    shards=st.sampled_from([2, 3, 4]),
    prompts=st.lists(cases.texts(60, least=4), min_size=2, max_size=6),
    chunk=st.integers(3, 30),
    spare=st.integers(0, 12),
)
def test_law_20_a_shard_holds_its_share_of_the_bytes_and_the_arena_serves_as_one_of_large_blocks(
    kind: str,
    other: str,
    block: int,
    shards: int,
    prompts: list[list[int]],
    chunk: int,
    spare: int,
) -> None:
    """With a state the two differ in what a slab holds, so that only what is read is compared."""
    sharded = cases.geometry(group(kind, block, shards=shards), *beside(other))
    whole = cases.geometry(group(kind, block * shards), *beside(other))
    assert sharded.block_tokens == whole.block_tokens
    assert sharded.groups[0].page_bytes * shards == whole.groups[0].page_bytes
    slabs = sharded.slabs_needed(60) + spare
    split = Ranks(sharded, slabs, shards)
    if other == "alone":
        assert sharded.slab_bytes * shards == whole.slab_bytes
        assert sharded.stride_bytes[0] * shards == whole.stride_bytes[0]
        assert sharded.slabs_in(10_000) == whole.slabs_in(10_000 * shards)
        assert sharded.pages_per_slab == whole.pages_per_slab
        assert slabs == whole.slabs_needed(60) + spare
    one = Ranks(whole, slabs if other == "alone" else whole.slabs_needed(60) + spare, 1)
    for prompt in prompts:
        of_split, of_one = split.run(prompt, chunk), one.run(prompt, chunk)
        if other == "alone":  # page for page
            assert of_split == of_one
    evicted = [ranks.manager.arena_stats().evictions for ranks in (split, one)]
    assert other != "alone" or evicted[0] == evicted[1]


@pytest.mark.parametrize("kind", ["full", "indexed"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_law_20_a_rank_of_several_holds_its_heads_in_pages_of_as_many_tokens(
    kind: str, ranks: int
) -> None:
    """Keys and grid know nothing of tensor parallelism."""
    whole = cases.geometry(group(kind, 4))
    rank = cases.geometry(group(kind, 4, ranks=ranks))
    index = 3 * 4 if kind == "indexed" else 0  # index keys are not split
    assert (rank.groups[0].page_bytes - index) * ranks == whole.groups[0].page_bytes - index
    assert rank.stride_bytes == (rank.groups[0].page_bytes,)
    assert rank.slab_bytes == rank.stride_bytes[0] * rank.pages_per_slab[0]
    assert (rank.grid_tokens, rank.hash_unit_tokens) == (whole.grid_tokens, whole.hash_unit_tokens)
    prompts = [[1, 2, 3] * 9, [1, 2, 3] * 6, [4, 5] * 9, [1, 2, 3] * 9]
    tables = []
    for geometry in (whole, rank):
        pages = Ranks(geometry, geometry.slabs_needed(30), 1)
        tables.append([pages.run(prompt, 8) for prompt in prompts])
    assert rank.pages_per_slab != whole.pages_per_slab or tables[0] == tables[1]
    assert [run[0][0] for run in tables[0]] == [run[0][0] for run in tables[1]]
