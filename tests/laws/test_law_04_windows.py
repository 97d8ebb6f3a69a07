"""Law 4 for several windows: what one of them rules out, the others have walked."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from kvcache import UNLIMITED, FullAttention, Geometry, Manager, SlidingWindow, Sparse

BLOCK = 4
BLOCKS = 24
PROMPT = BLOCK * BLOCKS + 1
EXACT = settings(derandomize=True, database=None, deadline=None, max_examples=300)


def window(name: str, tokens: int) -> SlidingWindow:
    return SlidingWindow(
        name=name, layers=1, kv_heads=1, head_dim=64, block_tokens=BLOCK, window=tokens
    )


@EXACT
@given(
    windows=st.lists(st.integers(2, 40), min_size=2, max_size=3),
    holes=st.lists(st.sets(st.integers(0, BLOCKS - 1), max_size=4), min_size=3, max_size=3),
)
def test_law_04_the_hit_of_several_windows_equals_brute_force(
    windows: list[int], holes: list[set[int]]
) -> None:
    full = FullAttention(name="full", layers=1, kv_heads=1, head_dim=64, block_tokens=BLOCK)
    spans = [window(f"w{i}", tokens) for i, tokens in enumerate(windows)]
    m = Manager(Geometry((full, *spans)), slabs=UNLIMITED, retention=Sparse(), seed=0)
    handle = m.open(list(range(PROMPT)))
    lacking: list[set[int]] = [set(), *holes[: len(spans)]]
    there = [np.array([b not in gone for b in range(BLOCKS)], np.uint8) for gone in lacking]
    expected = max(
        end
        for end in range(0, PROMPT, BLOCK)
        if all(
            there[g][max(0, end - tokens + 1) // BLOCK : end // BLOCK].all()
            for g, tokens in enumerate(windows, 1)
        )
    )
    assert m.lookup(handle, there).hit_tokens == expected
    assert m.lookup(handle, there).hit_tokens == expected
