"""The suggested interval: what it is made of, and which way it may go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvcache.bench.interval import KNEE_TOKENS, suggest_interval
from kvcache.bench.reuse import (
    CODING_AGENTS,
    CODING_AGENTS_WITHOUT_JUNCTIONS,
    ReuseProfile,
    profile_requests,
    profile_trace,
)
from kvcache.bench.traces import TraceRequest, open_trace
from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.specs import FullAttention, GroupSpec, RecurrentState, SlidingWindow
from kvcache.presets import names, preset
from kvcache.retention import Sparse

DENSE = 0.5
"""Sorts before every interval."""
NONE = float("inf")
"""Interval 0 keeps nothing between: the coarsest."""


def model(state_bytes: int, window: int = 0) -> Geometry:
    groups = [
        FullAttention(name="full", layers=8, kv_heads=2, head_dim=128, block_tokens=128),
        RecurrentState(name="state", layers=1, state_bytes_per_layer=state_bytes),
    ]
    if window:
        groups.append(
            SlidingWindow(
                name="window",
                layers=4,
                kv_heads=2,
                head_dim=128,
                block_tokens=128,
                window=window,
            )
        )
    return Geometry(tuple(groups))


def coarseness(interval: int | None) -> float:
    return DENSE if interval is None else interval or NONE


def requests(
    prompts: Sequence[Sequence[int]], block: int = 128, more: int = 1
) -> list[TraceRequest]:
    """Prompts as lists of block names, and `more` tokens; equal prefixes of names are equal prefixes."""
    numbers: dict[tuple[int, ...], int] = {}
    made = []
    for i, prompt in enumerate(prompts):
        blocks = [
            numbers.setdefault(tuple(prompt[: j + 1]), len(numbers)) for j in range(len(prompt))
        ]
        tokens = len(prompt) * block + more
        made.append(TraceRequest(i + 1, float(i), "", 0, tokens, 10, np.array(blocks, np.int64)))
    return made


def profile(prompts: Sequence[Sequence[int]], grid: int = 128) -> ReuseProfile:
    return profile_requests(requests(prompts), 128, grid, "test")


def branches(spacing: int, count: int = 7, depth: int = 512) -> list[list[int]]:
    """A prompt of `depth` blocks, and `count` that leave it `spacing` blocks further on each time."""
    trunk = list(range(depth))
    ends = range(spacing, (count + 1) * spacing, spacing)
    return [trunk] + [[*trunk[:at], 10_000 + at, 10_001 + at] for at in ends]


# ---- the profile of a trace


def test_reuse_ends_at_kept_boundaries_or_behind_them() -> None:
    """A prompt of 8 blocks; one that leaves it after 5; the same again: the junction is kept now."""
    found = profile([[*range(8)], [0, 1, 2, 3, 4, 90], [0, 1, 2, 3, 4, 91], [*range(8), 8]])
    assert (found.requests, found.unit_tokens) == (4, 128)
    assert found.hit_tokens == (0 + 5 + 5 + 8) * 128
    assert found.unique_tokens == (8 + 1 + 1 + 1) * 128
    assert found.distant_requests == 1
    assert found.distance_tokens == (640, 640, 640)
    # Kept: the ends of four prompts, and the junction.
    assert found.boundaries == 5
    saved = {use.interval_tokens: use.saved_tokens for use in found.uses}
    assert saved == {128: 640, 256: 512, 512: 512, 1024: 0}
    made = {use.interval_tokens: use.boundaries for use in found.uses}
    assert made == {128: 11, 256: 4 + 1 + 1, 512: 2, 1024: 1}


def test_blocks_of_a_trace_are_merged_to_the_grid() -> None:
    """On a grid of 512 a reuse of 5 blocks is one of 4, and nothing is known of 128."""
    found = profile([[*range(8)], [0, 1, 2, 3, 4, 90]], grid=512)
    assert found.unit_tokens == 512
    assert found.hit_tokens == 512
    assert [use.interval_tokens for use in found.uses] == [512, 1024]


def test_the_last_token_is_computed_anew() -> None:
    same = [*range(4)]
    full = [r._replace(prompt_tokens=512) for r in requests([same, same])]
    found = profile_requests(full, 128, 128, "test")
    assert found.hit_tokens == 3 * 128
    assert found.distant_requests == 0


def test_prompts_shorter_than_a_unit_have_no_reuse() -> None:
    found = profile([[], [], [1]])
    assert (found.hit_tokens, found.unique_tokens) == (0, 128)
    with pytest.raises(ConfigError, match="test has no request"):
        profile([])


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_a_profile_is_what_a_naive_cache_does(
    prompts: list[list[int]], whole: bool, junctions: bool
) -> None:
    """Prompts of whole units keep their end too, the end of the turn; the last token is computed."""
    known: set[tuple[int, ...]] = set()
    kept: set[tuple[int, ...]] = set()
    hits = distance = 0
    saved = dict.fromkeys((1, 2, 4, 8), 0)
    made = dict.fromkeys((1, 2, 4, 8), 0)
    for prompt in prompts:
        prefixes = [tuple(prompt[: i + 1]) for i in range(len(prompt))]
        full = next((i for i, p in enumerate(prefixes) if p not in known), len(prompt))
        new_from = full
        full = min(full, len(prompt) - whole)
        at = max((i + 1 for i in range(full) if prefixes[i] in kept), default=0)
        hits += full
        distance += full - at
        for n in saved:
            saved[n] += max(full // n * n - at, 0)
            made[n] += len(prompt) // n - new_from // n
        known |= set(prefixes)
        kept |= set(prefixes[-1 - whole :])
        if at < full and junctions:
            kept.add(prefixes[full - 1])
    found = profile_requests(
        requests(prompts, more=0 if whole else 1), 128, 128, "test", junctions=junctions
    )
    assert found.hit_tokens == hits * 128
    assert found.unique_tokens == len(known) * 128
    assert found.boundaries == len(kept)
    for use in found.uses:
        n = use.interval_tokens // 128
        assert use.saved_tokens == saved[n] * 128
        assert use.boundaries == made[n]
    assert (found.uses[0].saved_tokens if found.uses else 0) == distance * 128


def test_figures_of_recorded_sessions_are_those_of_the_trace(trace_dir: Path) -> None:
    trace = open_trace(trace_dir / "claude_code_sessions_500.csv.gz")
    found = profile_trace(trace, 128)
    assert found._replace(source=CODING_AGENTS.source) == CODING_AGENTS


def test_figures_without_junctions_are_those_of_the_trace(trace_dir: Path) -> None:
    trace = open_trace(trace_dir / "claude_code_sessions_500.csv.gz")
    found = profile_trace(trace, 128, junctions=False)
    known = CODING_AGENTS_WITHOUT_JUNCTIONS
    assert found._replace(source=known.source) == known


def test_what_intervals_save_is_what_the_manager_saves(trace_dir: Path) -> None:
    """README: states at interval 0, 16,384, 4,096 keep .9950, .9986, .9996 of the hits, with 1.05,
    1.31, 2.11 states a request, and 0.01 at ends of turns, replayed through the block manager on a grid
    of 64."""
    found = profile_trace(open_trace(trace_dir / "claude_code_sessions_500.csv.gz"), 64)
    lost = found.uses[0].saved_tokens
    kept = {0: 1 - lost / found.hit_tokens}
    states = {0: found.boundaries / found.requests}
    for use in found.uses:
        kept[use.interval_tokens] = 1 - (lost - use.saved_tokens) / found.hit_tokens
        states[use.interval_tokens] = (found.boundaries + use.boundaries) / found.requests
    assert [round(kept[n], 4) for n in (0, 16_384, 4_096)] == [0.9950, 0.9986, 0.9996]
    assert [states[n] for n in (0, 16_384, 4_096)] == pytest.approx([1.06, 1.32, 2.12], abs=0.03)


# ---- the suggestion


@pytest.mark.parametrize("profiled", [CODING_AGENTS, profile(branches(16))])
def test_more_bytes_in_a_state_never_make_the_interval_finer(profiled: ReuseProfile) -> None:
    for window in (0, 1024):
        for memory in (None, 2**30, 2**36):
            for field in ("interval_tokens", "lru_interval_tokens"):
                chosen = [
                    coarseness(
                        getattr(suggest_interval(model(2**n, window), profiled, memory), field)
                    )
                    for n in range(8, 41)
                ]
                assert chosen == sorted(chosen)
        assert len(set(chosen)) > 1


@pytest.mark.parametrize("state", [2**8, 2**14, 2**18])
def test_nearer_junctions_never_make_the_interval_coarser(state: int) -> None:
    chosen = [
        coarseness(suggest_interval(model(state), profile(branches(n)), 2**36).interval_tokens)
        for n in (64, 32, 16, 8, 4, 2)
    ]
    assert chosen == [128 * n for n in (64, 32, 16, 8, 4, 2)]


@pytest.mark.parametrize("state", [2**23, 2**25, 2**28])
def test_junctions_too_near_for_the_price_of_a_state_get_none(state: int) -> None:
    """Finer and finer, until what lies between two junctions is not worth the states: then 0."""
    chosen = [
        coarseness(suggest_interval(model(state), profile(branches(n)), 2**32).interval_tokens)
        for n in (64, 32, 16, 8, 4, 2, 1)
    ]
    paying = [c for c in chosen if c < NONE]
    assert paying == sorted(paying, reverse=True)
    assert chosen == paying + [NONE] * (len(chosen) - len(paying))
    assert chosen[-1] == NONE


def test_more_memory_never_makes_the_interval_coarser() -> None:
    for state in (2**20, 2**26, 2**30):
        chosen = [
            coarseness(suggest_interval(model(state), CODING_AGENTS, 2**n).interval_tokens)
            for n in range(28, 46)
        ]
        assert chosen == sorted(chosen, reverse=True)


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "glm-5", "minimax-m3"])
def test_a_model_without_state_and_window_is_dense_at_no_cost(name: str) -> None:
    found = suggest_interval(preset(name), CODING_AGENTS)
    assert (found.interval_tokens, found.lru_interval_tokens) == (None, None)
    assert "no state and no window" in found.reason
    assert "dense costs nothing" in found.reason


def test_nothing_to_save_is_interval_0() -> None:
    """Turns that only grow: every reuse ends where a prompt ended."""
    turns = [[*range(n)] for n in range(10, 100, 10)]
    found = suggest_interval(model(2**20), profile(turns))
    assert found.interval_tokens == 0
    assert "Nothing more is to be saved" in found.reason


def test_a_state_larger_than_the_memory_is_not_worth_an_interval() -> None:
    found = suggest_interval(model(2**36), CODING_AGENTS, 2**36)
    assert found.interval_tokens == 0
    assert "costs more hits in a cache of 64.0 GiB" in found.reason


@pytest.mark.parametrize("name", names())
def test_the_formula_is_the_documented_one(name: str) -> None:
    geometry = preset(name, tp=8)
    found = suggest_interval(geometry, CODING_AGENTS, 2**36)
    sizes = {g.name: g.page_bytes for g in geometry.groups}
    state = sum(sizes.get(n, 0) for n in ("kda", "gdn", "mamba2", "light_pool"))
    for candidate, use in zip(found.candidates, CODING_AGENTS.uses, strict=False):
        in_flight = 8192 / use.interval_tokens * state
        cost = 0.19 * CODING_AGENTS.prompt_tokens * in_flight / 2**36
        assert candidate.cost_tokens == pytest.approx(cost)
        joined = (
            name.startswith("gemma") and use.interval_tokens <= 1_024
        )  # windows without a state
        saved = CODING_AGENTS.uses[0].saved_tokens if joined else use.saved_tokens
        assert candidate.net_tokens == pytest.approx(saved - cost)
    if found.candidates:
        best = max(c.net_tokens for c in found.candidates)
        good = [c.interval_tokens for c in found.candidates if c.net_tokens >= 0.9 * best]
        assert coarseness(found.interval_tokens) == (max(good) if best > 0 else NONE)


def test_without_a_memory_the_knee_of_recorded_sessions_is_taken() -> None:
    geometry = preset("kimi-k3")
    found = suggest_interval(geometry, CODING_AGENTS)
    assert found.memory_bytes == KNEE_TOKENS * 27_648
    assert found == suggest_interval(geometry, CODING_AGENTS, KNEE_TOKENS * 27_648)


def test_intervals_lie_on_the_grid_whatever_it_is() -> None:
    for geometry in (preset("kimi-k3", block_tokens=96), preset("kimi-k3", dcp=8)):
        found = suggest_interval(geometry, CODING_AGENTS)
        assert found.candidates
        assert all(c.interval_tokens % geometry.grid_tokens == 0 for c in found.candidates)
        assert found.interval_tokens
        assert found.interval_tokens % geometry.grid_tokens == 0


def test_windows_of_neighbours_join_up_to_their_length() -> None:
    """Hits can then end between boundaries: as many tokens are saved as by the finest interval."""
    known = CODING_AGENTS_WITHOUT_JUNCTIONS

    def saved(*groups: GroupSpec) -> dict[int, int]:
        found = suggest_interval(Geometry(groups), known)
        return {c.interval_tokens: c.saved_tokens for c in found.candidates}

    window = SlidingWindow(
        name="window", layers=1, kv_heads=1, head_dim=64, block_tokens=128, window=1_024
    )
    smaller = replace(window, name="smaller", window=500)  # of 4 blocks
    state = RecurrentState(name="state", layers=1, state_bytes_per_layer=64)
    alone = {use.interval_tokens: use.saved_tokens for use in known.uses}
    most = alone[128]
    assert saved(window) == alone | dict.fromkeys((128, 256, 512, 1024), most)
    assert saved(window, smaller) == alone | dict.fromkeys((128, 256, 512), most)
    assert saved(window, state) == alone


@pytest.mark.parametrize(("interval", "hit"), [(512, 5 * 128), (1_024, 0)])
def test_the_manager_hits_between_joined_windows(interval: int, hit: int) -> None:
    group = SlidingWindow(
        name="window", layers=1, kv_heads=1, head_dim=64, block_tokens=128, window=512
    )
    manager = Manager(Geometry((group,)), slabs=64, retention=Sparse(interval))
    tokens = np.arange(1_500, dtype=np.int32)
    for prompt in (tokens, np.append(tokens[:700], np.full(100, 7, np.int32))):
        handle = manager.open(prompt)
        at = found = manager.lookup(handle).hit_tokens
        while at < len(prompt):
            step = manager.begin_step()
            grant = manager.allocate(handle, len(prompt) - at)
            assert grant is not None
            manager.commit(handle, grant.end)
            manager.end_step(step)
            at = grant.end
        manager.finish(handle)
    assert found == hit


def test_the_finest_interval_is_dense() -> None:
    found = suggest_interval(model(64), profile(branches(1)), 2**40)
    assert found.interval_tokens is None
