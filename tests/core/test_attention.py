"""Attention over pages in place: against numpy, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from kvcache.core.attention import PagedKV
from kvcache.core.errors import ConfigError

SCALE = 0.25
KV_HEADS, GROUP, DIM, BLOCK, PAGES = 2, 3, 32, 4, 6


PACKED = np.zeros(1, np.dtype([("pad", "u1"), ("q", "<f4", (6, DIM))]))
"""Queries one byte off."""


class Rig:
    """Pages `[PAGES, 2, BLOCK, KV_HEADS, DIM]` of random K and V, and rows that read them."""

    def __init__(self, seed: int, rows: int, blocks: int) -> None:
        rng = np.random.default_rng(seed)
        self.pages = rng.standard_normal((PAGES, 2, BLOCK, KV_HEADS, DIM)).astype(np.float32)
        self.paged = PagedKV(
            self.pages.ctypes.data,
            self.pages.strides[0],
            PAGES,
            BLOCK * KV_HEADS * DIM,
            BLOCK,
            KV_HEADS,
            DIM,
        )
        wide = rng.standard_normal((rows, KV_HEADS * GROUP + 2, DIM)).astype(np.float32)
        self.queries = wide[:, : KV_HEADS * GROUP]
        self.block_tables = rng.integers(0, PAGES, (rows, blocks), dtype=np.int32)
        self.end = rng.integers(1, blocks * BLOCK + 1, rows)
        self.begin = rng.integers(0, self.end)

    def attend(self, **changes: Any) -> NDArray[np.float32]:
        names = ("queries", "block_tables", "begin", "end")
        given = {name: changes.pop(name, getattr(self, name)) for name in names}
        return self.paged.attend(**given, **{"scale": SCALE, **changes})

    def expected(self) -> NDArray[np.float64]:
        out = np.empty(self.queries.shape)
        for row, query in enumerate(self.queries.astype(np.float64)):
            seen = slice(self.begin[row], self.end[row])
            keys, values = (
                self.pages[self.block_tables[row], half].reshape(-1, KV_HEADS, DIM)[seen]
                for half in (0, 1)
            )
            for head, vector in enumerate(query):
                scores = keys[:, head // GROUP] @ vector * SCALE
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values[:, head // GROUP] / weights.sum()
        return out


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 4), blocks=st.integers(1, 40))
def test_rows_see_what_numpy_sees(seed: int, rows: int, blocks: int) -> None:
    rig = Rig(seed, rows, blocks)
    np.testing.assert_allclose(rig.attend(), rig.expected(), atol=2e-5)


@pytest.mark.parametrize("tokens", [511, 512, 513, 1024, 1025, 9000])
def test_a_long_context_is_merged_from_its_splits_whatever_the_threads(tokens: int) -> None:
    """9,000 tokens are 4.4 MiB, so that threads are worth their start."""
    rig = Rig(3, 2, 9001 // BLOCK + 1)
    rig.begin, rig.end = np.array([1, 0]), np.array([1 + tokens, 1])
    found = rig.attend()
    np.testing.assert_allclose(found, rig.expected(), atol=2e-5)
    for threads in (2, 7):
        np.testing.assert_array_equal(rig.attend(threads=threads), found)


def test_a_token_that_weighs_nothing_is_no_fault_at_the_beginning_of_a_row() -> None:
    rig = Rig(9, 1, 2)
    rig.block_tables, rig.end = np.array([[1, 2]], np.int32), np.array([7])
    rig.pages[1, 0, 3] = -1e38
    rig.queries = np.abs(rig.queries) + 10
    for begin in (2, 3):
        rig.begin = np.array([begin])
        np.testing.assert_allclose(rig.attend(), rig.expected(), atol=2e-4)


PORTABLE = """
from core.test_attention import Rig
import numpy as np
from kvcache.core.copy import copy_path
assert copy_path() == "memcpy", copy_path()
for seed in range(20):
    rig = Rig(seed, 3, 1 + 30 * seed)
    np.testing.assert_allclose(rig.attend(threads=2), rig.expected(), atol=2e-5)
"""


def test_a_cpu_without_vector_instructions_computes_the_same(repo_root: Path) -> None:
    env = {**os.environ, "KVCACHE_COPY_PATH": "memcpy", "PYTHONPATH": str(repo_root / "tests")}
    command = [sys.executable, "-c", PORTABLE]
    result = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


def test_scores_too_large_for_an_exponential_are_weighed() -> None:
    rig = Rig(4, 2, 9)
    rig.queries = rig.queries * np.float32(300)
    np.testing.assert_allclose(rig.attend(), rig.expected(), atol=2e-4)


def test_no_rows_see_nothing() -> None:
    rig = Rig(5, 1, 2)
    none = {name: getattr(rig, name)[:0] for name in ("queries", "block_tables", "begin", "end")}
    assert rig.attend(**none).shape == (0, KV_HEADS * GROUP, DIM)
    none |= {"queries": np.zeros((0, KV_HEADS * GROUP, DIM), np.float32)}  # all strides are 0
    assert rig.attend(**none).shape == (0, KV_HEADS * GROUP, DIM)


def test_what_lies_past_the_end_of_a_row_is_not_read() -> None:
    rig = Rig(6, 1, 2)
    rig.block_tables, rig.begin, rig.end = (
        np.array([[1, 2]], np.int32),
        np.array([1]),
        np.array([6]),
    )
    found = rig.attend()
    rig.pages[[0, 3, 4, 5]] = np.nan
    rig.pages[1, :, 0] = rig.pages[2, :, 2:] = np.nan
    np.testing.assert_array_equal(rig.attend(), found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block_tables": np.array([[0, PAGES]], np.int32)},
            "row 0, block 1: page 6 is outside 0 to 5",
        ),
        ({"block_tables": np.array([[-1, 0]], np.int32)}, "row 0, block 0: page -1 is outside"),
        ({"begin": np.array([7])}, "row 0 sees tokens 7 to 7: at least one"),
        ({"begin": np.array([-1])}, "row 0 sees tokens -1 to 7"),
        ({"end": np.array([9])}, "row 0 sees tokens 0 to 9: at least one, in 2 blocks of 4"),
        ({"threads": 0}, "threads is 0: from 1 to 256"),
        (
            {"block_tables": np.zeros((1, 2), np.int64)},
            "block_tables is int64 of .*expected aligned int32",
        ),
        ({"block_tables": np.zeros((2, 2), np.int32)}, "1 rows of queries, 2 block tables"),
        ({"block_tables": np.zeros((1, 0), np.int32)}, "tables of 0 blocks must have at least one"),
        ({"block_tables": [[0, 1]]}, "block_tables is list: give an array of int32"),
        ({"begin": np.zeros(2, np.int64)}, "2 begins and 1 ends"),
        ({"begin": [0.5]}, "begin is of float64"),
        ({"queries": PACKED["q"]}, "expected aligned float32 with 3 dimensions"),
        ({"queries": np.zeros((1, 6, 16), np.float32)}, "queries has shape .*of dimension 32"),
        ({"queries": np.zeros((1, 5, DIM), np.float32)}, "a multiple of 2"),
        ({"queries": np.zeros((1, 6, 2 * DIM), np.float32)[:, :, ::2]}, "side by side"),
        ({"queries": np.zeros((1, 6, DIM))}, "queries is float64"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    rig = Rig(7, 1, 2)
    rig.block_tables, rig.begin, rig.end = (
        np.array([[0, 1]], np.int32),
        np.array([0]),
        np.array([7]),
    )
    with pytest.raises(ConfigError, match=message):
        rig.attend(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stride_bytes": 2047}, "in whole floats"),
        ({"stride_bytes": 2044}, "6 pages from .*, 2044 bytes apart, V 256 elements behind K"),
        ({"value_offset": 255}, "K and V take 256 elements each"),
        ({"pages": 0}, "0 pages"),
        ({"address": 0}, "is NULL"),
        ({"stride_bytes": 2**62, "pages": 5}, "does not pass its end"),
        ({"block_tokens": 2**30}, "at most 1073741824 elements"),
        ({"block_tokens": 0}, "must be above 0"),
        ({"kv_heads": 0}, "a multiple of 0"),
        ({"kv_heads": None}, "kv_heads is None: it must be a whole number"),
        ({"pages": 2**63}, "does not fit"),
    ],
)
def test_pages_that_cannot_be_are_named(changes: dict[str, int], message: str) -> None:
    rig = Rig(8, 1, 2)
    rig.paged = rig.paged._replace(**changes)
    with pytest.raises(ConfigError, match=message):
        rig.attend()


@pytest.mark.parametrize("dim", [1, 7, 24])
def test_any_head_dimension_will_do(dim: int) -> None:
    rng = np.random.default_rng(dim)
    keys, values = pages = rng.standard_normal((2, 5, dim)).astype(np.float32)
    paged = PagedKV(pages.ctypes.data, pages.nbytes, 1, 5 * dim, 5, 1, dim)
    queries = rng.standard_normal((1, 2, dim)).astype(np.float32)
    weights = np.exp(queries[0] @ keys.T)
    found = paged.attend(queries, np.zeros((1, 1), np.int32), [0], [5], scale=1.0)
    expected = weights @ values / weights.sum(1, keepdims=True)
    np.testing.assert_allclose(found[0], expected, atol=2e-5)


def test_begin_and_end_may_be_lists() -> None:
    rig = Rig(10, 2, 3)
    same = rig.attend(begin=rig.begin.tolist(), end=rig.end.tolist())
    np.testing.assert_array_equal(same, rig.attend())
