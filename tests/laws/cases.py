"""Geometries, policies and hypothesis settings that the law tests share."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import HealthCheck, Phase, settings, strategies as st
from laws.counting import OTHER

from kvcache import Geometry
from kvcache.core.retain import RetentionPolicy
from kvcache.core.specs import (
    ChunkedLocal,
    Compressed,
    CrossAttention,
    FullAttention,
    GroupSpec,
    IndexedAttention,
    LatentAttention,
    LatentWindow,
    PoolingState,
    RecurrentState,
    RingBuffer,
    SlidingWindow,
)
from kvcache.retention import Dense, Sparse

SCALE = int(os.environ.get("KVCACHE_TEST_SCALE", "1"))
"""Multiplies example counts; above 1 the examples are random instead of always the same."""
SHRINK = bool(os.environ.get("KVCACHE_TEST_SHRINK"))
"""Look for the smallest failing example, which takes minutes. The same one is found without."""


def law(examples: int, *, steps: int = 50) -> settings:
    """Settings of one test: the same examples in every run, no files left behind."""
    return settings(
        max_examples=examples * SCALE,
        stateful_step_count=steps,
        derandomize=SCALE == 1,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if SHRINK else [])],
        report_multiple_bugs=SHRINK,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def full(
    name: str, block_tokens: int, *, width: int = 4, draft: int = 0, shards: int = 1
) -> FullAttention:
    """A page has `2 * width` bytes for each of its tokens."""
    return FullAttention(
        name=name,
        layers=1,
        kv_heads=1,
        head_dim=width,
        block_tokens=block_tokens,
        element_bytes=1,
        lookahead_tokens=draft,
        dcp_shards=shards,
    )


def indexed(name: str, block_tokens: int) -> IndexedAttention:
    """A page has 8 bytes for each of its tokens, two of them its index key's."""
    return IndexedAttention(
        name=name,
        layers=1,
        kv_heads=1,
        head_dim=3,
        index_dim=2,
        block_tokens=block_tokens,
        element_bytes=1,
        index_element_bytes=1,
    )


def window(
    name: str, window_tokens: int, block_tokens: int, *, width: int = 4, draft: int = 0
) -> SlidingWindow:
    return SlidingWindow(
        name=name,
        layers=1,
        kv_heads=1,
        head_dim=width,
        window=window_tokens,
        block_tokens=block_tokens,
        element_bytes=1,
        lookahead_tokens=draft,
    )


def latent(name: str, *, draft: int = 0) -> LatentAttention:
    """A page has 16 bytes."""
    return LatentAttention(
        name=name,
        layers=1,
        block_tokens=4,
        rank=3,
        rope_dim=1,
        element_bytes=1,
        lookahead_tokens=draft,
    )


def chunked(name: str, *, draft: int = 0) -> ChunkedLocal:
    return ChunkedLocal(
        name=name,
        layers=1,
        kv_heads=1,
        head_dim=8,
        chunk_tokens=12,
        block_tokens=4,
        element_bytes=1,
        lookahead_tokens=draft,
    )


def latent_window(name: str, *, draft: int = 0) -> LatentWindow:
    return LatentWindow(
        name=name, layers=1, entry_bytes=4, window=7, block_tokens=4, lookahead_tokens=draft
    )


def state(name: str, page_bytes: int = 96, *, speculative: int = 0) -> RecurrentState:
    return RecurrentState(
        name=name, layers=1, state_bytes_per_layer=page_bytes, speculative_tokens=speculative
    )


def geometry(*groups: GroupSpec, state_grid: int = 16) -> Geometry:
    return Geometry(groups, state_grid_tokens=state_grid, page_alignment_bytes=1)


DEEPSEEK = (
    Compressed(name="csa", layers=1, ratio=4, entry_bytes=8, index_bytes=2, block_tokens=8),
    Compressed(name="hca", layers=1, ratio=16, entry_bytes=8, block_tokens=16),
    latent_window("w"),
    PoolingState(name="p", layers=1, ratio=4, token_bytes=4, block_tokens=2, overlap=True),
    PoolingState(name="q", layers=1, ratio=16, token_bytes=2, block_tokens=4),
)
"""Ratio 16 stands for 128, window 7 for 128."""
RING = RingBuffer(name="r", layers=1, ring_tokens=4, token_bytes=8)
CROSS = CrossAttention(
    name="x",
    layers=1,
    kv_heads=1,
    head_dim=4,
    max_encoder_tokens=7,
    block_tokens=4,
    element_bytes=1,
)

GROUPS: dict[str, tuple[GroupSpec, ...]] = {
    "full": (full("a", 4),),
    "hybrid": (full("a", 4), state("s")),
    "two sizes": (full("a", 2), full("b", 4), state("s")),
    "coprime": (state("s"), full("a", 4), full("b", 6), state("t")),
    "speculative": (full("a", 4), state("s", speculative=2)),
    "gpt-oss": (full("a", 4), window("w", 8, 2)),
    "gemma": (full("a", 4), *(window(f"w{i}", 6, 4, width=8) for i in range(3))),
    "kimi": (latent("a"), state("s", 112), state("t", 112)),
    "deepseek": DEEPSEEK,
    "three kinds": (indexed("a", 8), window("w", 13, 4), state("s", 128)),
    "chunked": (full("a", 4), chunked("c")),
    "window": (window("w", 7, 2),),
    "private": (full("a", 4), RING, CROSS),
    "dcp": (full("a", 4, shards=2), state("s")),
}
DRAFTS: dict[str, GroupSpec] = {
    "hybrid": full("d", 4, draft=1),
    "gpt-oss": window("d", 7, 2, draft=2),
    "gemma": full("d", 4, width=8, draft=1),
    "kimi": latent("d", draft=1),
    "deepseek": latent_window("d", draft=1),
    "three kinds": window("d", 6, 4, draft=3),
    "chunked": chunked("d", draft=1),
}
"""A draft model's group beside those of a geometry: look-ahead on."""

GEOMETRIES = {
    **{name: geometry(*groups) for name, groups in GROUPS.items()},
    "recurrent": geometry(state("s"), state_grid=4),
    **{f"{name} + draft": geometry(*GROUPS[name], draft) for name, draft in DRAFTS.items()},
}
"""Scaled down. `two sizes` and `coprime` differ in hash unit and grid: 2 and 4, 2 and 12; `hybrid`
stands for Qwen3.5 (GDN and full), `kimi` for Kimi K3 (MLA and KDA), `deepseek` for DeepSeek V4,
`three kinds` has index keys as MiniMax M3 does."""

ONE_SIZE = {
    "state": geometry(full("a", 4), state("s", 32)),
    "window": geometry(full("a", 4), window("w", 9, 4)),
    "three kinds": geometry(full("a", 4), window("w", 6, 4), state("s", 32)),
    "small blocks": geometry(full("a", 8, width=2), window("w", 9, 4), state("s", 32)),
    "full": geometry(full("a", 4)),
}
"""All pages of one size, one a slab: then eviction has one exact order."""


def kinds(geometry: Geometry) -> set[str]:
    """What kinds of groups it has: what can come about depends on them."""
    found = {"draft" if r.lookahead_tokens else str(r.kind) for r in geometry.rules}
    return found | ({"kept in part"} if found & {"span", "state"} else set())


def name_of(geometry: Geometry) -> str:
    """Of one of `GEOMETRIES`; a test's own has none."""
    return next((name for name, g in GEOMETRIES.items() if g is geometry), OTHER)


ONLY = [name for name in os.environ.get("KVCACHE_TEST_GEOMETRIES", "").split(",") if name]
"""For a closer look at some of them: names, separated by commas."""
chosen = ONLY or sorted(GEOMETRIES)
names = st.sampled_from(chosen)
with_sparse = st.sampled_from([n for n in chosen if n not in ("full", "private")] or chosen)
"""Those with something that a policy decides on."""
MIXED = -1
intervals = st.sampled_from([None, 0, 1, 2, 3, MIXED])
"""None: dense; otherwise grid units between what is kept; mixed: another number for each group."""
chunk_plans = st.lists(st.integers(1, 30), min_size=1, max_size=4)
"""Tokens per step, used in a circle."""
token = st.integers(0, 2)
"""So few that independent prompts share prefixes."""


STORIES = tuple(tuple(random.Random(seed).choices((0, 1, 2), k=64)) for seed in range(12))
"""Texts are heads of these: few enough that independent prompts share prefixes."""


def texts(most: int, *, least: int = 1) -> st.SearchStrategy[list[int]]:
    """Token lists of evenly spread lengths, at the price of two drawn numbers."""
    return st.builds(
        lambda story, length: list(story[:length]),
        st.sampled_from(STORIES),
        st.integers(least, most),
    )


prompts = texts(40)


def policy_of(geometry: Geometry, interval: int | None) -> RetentionPolicy:
    grid = geometry.grid_tokens
    if interval == MIXED:
        names = [group.name for group in geometry.groups]
        return Sparse(0, {name: (i + 1) % 3 * grid for i, name in enumerate(names)})
    return Dense() if interval is None else Sparse(interval * grid)


class Turn(NamedTuple):
    """A request of a history: the head of an earlier one's tokens, and its own."""

    parent: int
    cut: int
    tail: list[int]
    output: list[int]
    chunks: list[int]

    def prompt(self, earlier: Sequence[Sequence[int]]) -> list[int]:
        head = earlier[self.parent % len(earlier)][: self.cut] if earlier else []
        return [*head, *self.tail]


MOST_CUT, MOST_TAIL, MOST_OUTPUT = 50, 20, 9
LONGEST_TURN_TOKENS = MOST_CUT + MOST_TAIL + MOST_OUTPUT
turns = st.builds(
    Turn,
    parent=st.integers(0, 5),
    cut=st.integers(0, MOST_CUT),
    tail=texts(MOST_TAIL),
    output=texts(MOST_OUTPUT, least=0),
    chunks=chunk_plans,
)
histories = st.lists(turns, min_size=1, max_size=5)
