"""What every kind of group reuses at real sizes: second sightings, and resumes after a preemption.

All presets, and geometries for the kinds that no preset has.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import Geometry, Manager, Sparse
from kvcache.core.records import UNLIMITED
from kvcache.core.specs import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    IndexedAttention,
    LatentAttention,
    RecurrentState,
    RingBuffer,
    SlidingWindow,
)
from kvcache.presets import names, preset

CHUNK = 8192
SYSTEM = np.arange(5_000, dtype=np.int32)

HEADS = {"kv_heads": 8, "head_dim": 128, "block_tokens": 128}
CHUNKS_8K = "chunked local, as Llama 4 Scout"
CHUNKS_2K = "chunks that end inside the system prompt"
BESIDE = {
    CHUNKS_8K: Geometry(
        (
            FullAttention(name="global", layers=12, **HEADS),
            ChunkedLocal(name="chunks", layers=36, chunk_tokens=8192, **HEADS),
        )
    ),
    CHUNKS_2K: Geometry(
        (
            FullAttention(name="global", layers=12, **HEADS),
            ChunkedLocal(name="chunks", layers=36, chunk_tokens=2048, **HEADS),
        )
    ),
    "draft layer beside MLA and states": Geometry(
        (
            LatentAttention(name="mla", layers=7, block_tokens=128),
            RecurrentState(name="kda", layers=20, state_bytes_per_layer=2**21),
            LatentAttention(name="mtp", layers=1, block_tokens=128, lookahead_tokens=1),
        )
    ),
    "draft layers of every other kind": Geometry(
        (
            FullAttention(name="target", layers=32, **HEADS),
            FullAttention(name="eagle", layers=1, lookahead_tokens=3, **HEADS),
            SlidingWindow(name="window", layers=1, window=1024, lookahead_tokens=1, **HEADS),
            ChunkedLocal(name="chunks", layers=1, chunk_tokens=2048, lookahead_tokens=1, **HEADS),
            IndexedAttention(name="index", layers=1, index_dim=128, lookahead_tokens=1, **HEADS),
        )
    ),
    "ring and cross-attention": Geometry(
        (
            FullAttention(name="self", layers=32, **HEADS),
            CrossAttention(name="cross", layers=8, max_encoder_tokens=1500, **HEADS),
            RingBuffer(name="ring", layers=32, ring_tokens=128, token_bytes=1024),
        )
    ),
}
ALL = [*names(), *BESIDE]


def manager(name: str) -> Manager:
    geometry = BESIDE[name] if name in BESIDE else preset(name)
    return Manager(geometry, slabs=UNLIMITED, retention=Sparse(0))


def prefill(m: Manager, handle: int, upto: int) -> int:
    """Computes in chunks from the hit on; returns the hit."""
    hit = m.lookup(handle).hit_tokens
    assert m.allocate(handle, 0)
    while m.info(handle).committed < upto:
        step = m.begin_step()
        grant = m.allocate(handle, min(CHUNK, upto - m.info(handle).committed))
        assert grant
        m.commit(handle, grant.end)
        m.end_step(step)
    return hit


def prompt(seed: int, tokens: int) -> np.ndarray:
    own = np.random.default_rng(seed).integers(10_000, 20_000, tokens, dtype=np.int32)
    return np.concatenate([SYSTEM, own])


@pytest.mark.parametrize("name", ALL)
def test_a_declared_system_prompt_hits_on_the_second_request(name: str) -> None:
    m = manager(name)
    grid = m.geometry.grid_tokens
    for seed in range(2):
        handle = m.open(prompt(seed, 3_000), boundaries=[len(SYSTEM)])
        hit = prefill(m, handle, 8_000)
        assert hit == (len(SYSTEM) // grid * grid if seed else 0)
        m.finish(handle)
    m.check()


@pytest.mark.parametrize("name", ALL)
def test_an_undeclared_system_prompt_hits_on_the_third_request_at_the_latest(name: str) -> None:
    """On the second where every group keeps all; windows and states are kept from then on.

    Of chunks of 8,192 tokens all is kept, as the first request ends in its first one; a chunk's
    start, 4,096, needs nothing of the group.
    """
    m = manager(name)
    grid, hits = m.geometry.grid_tokens, []
    for seed in range(3):
        handle = m.open(prompt(seed, 3_000))
        hits.append(prefill(m, handle, 8_000))
        m.finish(handle)
    whole = len(SYSTEM) // grid * grid
    targets = [rule for rule in m.geometry.rules if not rule.lookahead_tokens]
    in_part = any(rule.kind in {"span", "state"} for rule in targets)
    second = {CHUNKS_8K: whole, CHUNKS_2K: 4096}.get(name, 0 if in_part else whole)
    assert hits == [0, second, whole]


@pytest.mark.parametrize("name", ALL)
def test_a_resume_after_30720_tokens_loses_less_than_a_grid_unit_and_a_chunk(name: str) -> None:
    m = manager(name)
    handle = m.open(prompt(0, 40_000))
    prefill(m, handle, 30_720)
    m.preempt(handle)
    hit = m.lookup(handle).hit_tokens
    assert 30_720 - hit < m.geometry.grid_tokens + CHUNK
    assert hit == 30_720 // m.geometry.grid_tokens * m.geometry.grid_tokens
    m.abort(handle)
    m.check()
