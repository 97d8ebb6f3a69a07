"""Workloads that turn from long contexts to many short ones, and back: the arena follows, without a restart.

Pages of attention and of states (or windows) are of different sizes; the bytes that one kind no longer needs must come to hold
the other's. Geometries are those of real models, on one rank.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import Geometry, Manager, Sparse
from kvcache.presets import preset

CHUNK_TOKENS = 8192
LONG_TOKENS = 100_000
MOST_REQUESTS = 20_000
USED = 0.9
"""Least share of the arena's bytes that held and cached pages should take."""


class Workload:
    """Requests one after the other, each with tokens that nobody had before."""

    def __init__(self, geometry: Geometry, slabs: int, *, movable: bool) -> None:
        self.geometry = geometry
        self.manager = Manager(
            geometry, slabs=slabs, retention=Sparse(), movable=movable, journal=False
        )
        self.arena_bytes = slabs * geometry.slab_bytes
        self._rng = np.random.default_rng(0)

    def serve(self, prompt_tokens: int) -> None:
        """One request from open to finish."""
        manager, at = self.manager, 0
        handle = manager.open(
            self._rng.integers(0, 2**31 - 1, prompt_tokens, dtype=np.int32),
        )
        while at < prompt_tokens:
            step = manager.begin_step()
            grant = manager.allocate(handle, min(CHUNK_TOKENS, prompt_tokens - at))
            assert grant is not None, manager.blockage(handle)
            manager.take_moves()
            manager.commit(handle, grant.end)
            manager.end_step(step)
            at = grant.end
        manager.finish(handle)

    def turn_over(self, prompt_tokens: int) -> None:
        """Requests of so many tokens, until as many bytes as the arena has were evicted."""
        until = self._evicted_bytes + self.arena_bytes
        for _ in range(MOST_REQUESTS):
            self.serve(prompt_tokens)
            if self._evicted_bytes >= until:
                return
        raise AssertionError(f"{self._evicted_bytes} bytes evicted, not {until}")

    @property
    def _evicted_bytes(self) -> int:
        return sum(
            self.manager.group_stats(g).evictions * self.geometry.stride_bytes[c]
            for g, c in enumerate(self.geometry.class_of_group)
        )

    def shares(self) -> list[float]:
        """Of the arena's bytes: held and cached pages of each size class."""
        return [
            (size.held + size.cached) * stride / self.arena_bytes
            for size, stride in zip(
                self.manager.arena_stats().classes, self.geometry.stride_bytes, strict=True
            )
        ]


@pytest.mark.parametrize("movable", [True, False], ids=["moves", "no moves"])
@pytest.mark.parametrize(
    "name", ["kimi-k3", "qwen3.5-9b", "nemotron-3-nano", "deepseek-v4-flash", "gpt-oss-20b"]
)
def test_the_arena_follows_a_workload_that_turns(name: str, movable: bool) -> None:
    geometry = preset(name)
    slabs = 10 * geometry.slabs_needed(LONG_TOKENS)
    workload = Workload(geometry, slabs, movable=movable)
    workload.turn_over(LONG_TOKENS)
    long = workload.shares()
    workload.turn_over(2 * geometry.grid_tokens + 1)
    short = workload.shares()
    workload.turn_over(LONG_TOKENS)
    again = workload.shares()
    workload.manager.check()
    assert min(sum(long), sum(short), sum(again)) >= USED, (long, short, again)
    if len(long) > 1:  # it did turn: what was little is most of it, and little again
        assert max(abs(a - b) for a, b in zip(long, short, strict=True)) > 0.2, (long, short)
        assert again == pytest.approx(long, abs=0.1)
