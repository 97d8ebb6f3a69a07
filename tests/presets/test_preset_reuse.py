"""What every preset's groups reuse at real sizes: second sightings, and resumes after a preemption."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import Manager, Sparse
from kvcache.core.records import UNLIMITED
from kvcache.presets import names, preset

CHUNK = 8192
SYSTEM = np.arange(5_000, dtype=np.int32)


def manager(name: str) -> Manager:
    return Manager(preset(name), slabs=UNLIMITED, retention=Sparse(0))


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


@pytest.mark.parametrize("name", names())
def test_a_declared_system_prompt_hits_on_the_second_request(name: str) -> None:
    m = manager(name)
    grid = m.geometry.grid_tokens
    for seed in range(2):
        handle = m.open(prompt(seed, 3_000), boundaries=[len(SYSTEM)])
        hit = prefill(m, handle, 8_000)
        assert hit == (len(SYSTEM) // grid * grid if seed else 0)
        m.finish(handle)
    m.check()


@pytest.mark.parametrize("name", names())
def test_an_undeclared_system_prompt_hits_on_the_third_request_at_the_latest(name: str) -> None:
    m = manager(name)
    grid = m.geometry.grid_tokens
    for seed in range(3):
        handle = m.open(prompt(seed, 3_000))
        hit = prefill(m, handle, 8_000)
        m.finish(handle)
    assert hit == len(SYSTEM) // grid * grid


@pytest.mark.parametrize("name", names())
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
