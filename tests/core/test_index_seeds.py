"""The index's hash function: where its seed comes from, and keys that were chosen to collide."""

from __future__ import annotations

import secrets
from itertools import combinations

import numpy as np
import pytest
from core.managing import FULL
from numpy.typing import NDArray

from kvcache import Manager, Sparse
from kvcache.connectors.cpu import CpuConnector
from kvcache.core.errors import ConfigError
from kvcache.core.pool import PagePool

UNITS = 64
"""Keys of one request, as many as the arena has pages."""
WORDS = [words for n in range(4) for words in combinations(range(4), n)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Seeds that were drawn."""
    seeds: list[int] = []

    def draw(bits: int) -> int:
        assert bits == 64
        seeds.append(2**64 - 1 - len(seeds))
        return seeds[-1]

    monkeypatch.setattr(secrets, "randbits", draw)
    return seeds


def test_seeds_are_drawn_unless_they_are_given(drawn: list[int]) -> None:
    for _ in range(2):
        Manager(FULL, slabs=4, retention=Sparse()).check()
        PagePool(4).check()
    assert len(drawn) == 4
    assert CpuConnector(FULL, pages=[4]).worker.close()
    assert len(drawn) == 5
    for seed in (0, -1, 2**64 - 1):
        Manager(FULL, slabs=4, retention=Sparse(), seed=seed).check()
        PagePool(4, seed=seed).check()
        assert CpuConnector(FULL, pages=[4], seed=seed).worker.close()
    assert len(drawn) == 5


def test_a_seed_beyond_64_bits_is_refused() -> None:
    for seed in (2**64, 1.5, True):
        with pytest.raises(ConfigError, match="seed is"):
            Manager(FULL, slabs=4, retention=Sparse(), seed=seed)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"PagePool\.seed is"):
            PagePool(4, seed=seed)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"CpuConnector\.seed is"):
            CpuConnector(FULL, pages=[4], seed=seed)  # type: ignore[arg-type]


def seed_words(seed: int) -> list[int]:
    """What the hash function mixes the four words of a key with: splitmix64."""
    words, mask = [], 2**64 - 1
    for _ in range(4):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        words.append(z ^ (z >> 31))
    return words


def keys(rng: np.random.Generator, words: tuple[int, ...]) -> NDArray[np.uint8]:
    """Random keys, but for words that become zero in the hash function of seed 0."""
    rows = rng.integers(0, 2**63, (UNITS, 4), dtype=np.uint64)
    for word in words:
        rows[:, word] = seed_words(0)[word]
    return rows.view(np.uint8).reshape(UNITS, 32)


def serve(manager: Manager, digests: NDArray[np.uint8]) -> None:
    handle = manager.open_foreign(digests, prompt_tokens=4 * UNITS)
    manager.lookup(handle)
    step = manager.begin_step()
    assert manager.allocate(handle, 4 * UNITS)
    manager.commit(handle, 4 * UNITS)
    manager.end_step(step)
    manager.finish(handle)


def lost(manager: Manager, digests: NDArray[np.uint8]) -> dict[str, int]:
    handle = manager.open_foreign(digests, prompt_tokens=4 * UNITS)
    found = manager.lookup(handle)
    manager.abort(handle)
    return found.lost


@pytest.mark.parametrize("words", WORDS)
def test_a_word_that_becomes_zero_leaves_the_others(words: tuple[int, ...]) -> None:
    """Evicted keys are remembered by their hash: equal hashes are seen as keys that were there."""
    rng = np.random.default_rng(1)
    manager = Manager(FULL, slabs=UNITS, retention=Sparse(), seed=0)
    chosen, never = keys(rng, words), keys(rng, words)
    serve(manager, chosen)
    serve(manager, keys(rng, ()))
    assert manager.group_stats(0).evictions == UNITS
    assert lost(manager, chosen)["evicted"] == 4 * (UNITS - 1)
    assert lost(manager, never)["evicted"] == 0
    manager.check()
