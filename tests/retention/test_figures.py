"""The figures of docs/retention.md, on models that people run.

Those of a shared system prompt and of a preemption: tests/presets/test_preset_reuse.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcache import Manager, Sparse
from kvcache.core.records import UNLIMITED
from kvcache.presets import preset

HYBRIDS = ("kimi-k3", "gpt-oss-120b", "gemma-3-27b", "qwen3.5-35b", "deepseek-v4-pro")
CHUNK = 8192


def text(tokens: int, seed: int) -> NDArray[np.int32]:
    """Texts of different seeds share nothing."""
    return np.random.default_rng(seed).integers(0, 50_000, tokens, dtype=np.int32)


def manager_of(model: str, interval: int = 0) -> Manager:
    return Manager(preset(model), slabs=UNLIMITED, retention=Sparse(interval))


def compute(m: Manager, handle: int, start: int, end: int) -> None:
    while start < end:
        step = m.begin_step()
        grant = m.allocate(handle, min(CHUNK, end - start))
        assert grant
        start = grant.end
        m.commit(handle, start)
        m.end_step(step)


def serve(m: Manager, prompt: NDArray[np.int32], reply: Sequence[int] = ()) -> int:
    """A request from open to finish; returns its hit."""
    n = len(prompt)
    handle = m.open(prompt, max_tokens=n + len(reply))
    hit = m.lookup(handle).hit_tokens
    compute(m, handle, hit, n)
    for i, token in enumerate(reply):
        m.extend(handle, [token])
        compute(m, handle, n + i, n + i + (i + 1 < len(reply)))  # the last one is never computed
    m.finish(handle)
    return hit


@pytest.mark.parametrize("model", HYBRIDS)
def test_the_next_turn_hits_to_the_end_of_the_reply(model: str) -> None:
    m = manager_of(model)
    prompt, reply = text(6000, 1), text(1500, 2)
    serve(m, prompt, reply.tolist())
    assert serve(m, np.concatenate([prompt, reply, text(700, 3)])) == 7424


@pytest.mark.parametrize("model", HYBRIDS)
def test_an_interval_keeps_each_of_its_multiples_whatever_the_chunks(model: str) -> None:
    m = manager_of(model, 1024)
    prompt = text(20_000, 1)
    serve(m, prompt)
    for parts in (12_000, 1500, 5000, 8500, 19_000):
        hit = serve(m, np.concatenate([prompt[:parts], text(100, 2)]))
        assert hit >= parts // 1024 * 1024  # 11,264 for 12,000
