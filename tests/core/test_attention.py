"""Attention over pages in place: against numpy, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from kvcache.core.attention import PagedKV
from kvcache.core.errors import ConfigError

SCALE = 0.25
KV_HEADS, GROUP, DIM, BLOCK, PAGES = 2, 3, 32, 4, 6


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
        self.tables = rng.integers(0, PAGES, (rows, blocks), dtype=np.int32)
        self.end = rng.integers(1, blocks * BLOCK + 1, rows)
        self.begin = rng.integers(0, self.end)

    def attend(self, **changes: Any) -> NDArray[np.float32]:
        names = ("queries", "tables", "begin", "end")
        given = {name: changes.pop(name, getattr(self, name)) for name in names}
        return self.paged.attend(**given, **{"scale": SCALE, **changes})

    def expected(self) -> NDArray[np.float64]:
        out = np.empty(self.queries.shape)
        for row, query in enumerate(self.queries.astype(np.float64)):
            seen = slice(self.begin[row], self.end[row])
            keys, values = (
                self.pages[self.tables[row], half].reshape(-1, KV_HEADS, DIM)[seen]
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


@pytest.mark.parametrize("tokens", [511, 512, 513, 1024, 1025])
def test_a_long_context_is_merged_from_its_parts_whatever_the_threads(tokens: int) -> None:
    rig = Rig(3, 1, 1025 // BLOCK + 1)
    rig.begin, rig.end = np.array([1]), np.array([1 + tokens])
    found = rig.attend()
    np.testing.assert_allclose(found, rig.expected(), atol=2e-5)
    for threads in (2, 7):
        np.testing.assert_array_equal(rig.attend(threads=threads), found)


def test_scores_too_large_for_an_exponential_are_weighed() -> None:
    rig = Rig(4, 2, 9)
    rig.queries = rig.queries * np.float32(300)
    np.testing.assert_allclose(rig.attend(), rig.expected(), atol=2e-4)


def test_no_rows_see_nothing() -> None:
    rig = Rig(5, 1, 2)
    none = {name: getattr(rig, name)[:0] for name in ("queries", "tables", "begin", "end")}
    assert rig.attend(**none).shape == (0, KV_HEADS * GROUP, DIM)


def test_what_lies_past_the_end_of_a_row_is_not_read() -> None:
    rig = Rig(6, 1, 2)
    rig.tables, rig.begin, rig.end = np.array([[1, 2]], np.int32), np.array([1]), np.array([6])
    found = rig.attend()
    rig.pages[[0, 3, 4, 5]] = np.nan
    rig.pages[1, :, 0] = rig.pages[2, :, 2:] = np.nan
    np.testing.assert_array_equal(rig.attend(), found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tables": np.array([[0, PAGES]], np.int32)}, "row 0, block 1: page 6 is outside 0 to 5"),
        ({"tables": np.array([[-1, 0]], np.int32)}, "row 0, block 0: page -1 is outside"),
        ({"begin": np.array([7])}, "row 0 sees tokens 7 to 7: at least one"),
        ({"begin": np.array([-1])}, "row 0 sees tokens -1 to 7"),
        ({"end": np.array([9])}, "row 0 sees tokens 0 to 9: at least one, in 2 blocks of 4"),
        ({"threads": 0}, "threads is 0: from 1 to 256"),
        ({"tables": np.zeros((1, 2), np.int64)}, "tables is int64 of shape .*expected int32"),
        ({"tables": np.zeros((2, 2), np.int32)}, "tables is int32 of shape .*for 1 rows"),
        ({"begin": np.zeros(2, np.int64)}, "begin is int64 of shape"),
        ({"queries": np.zeros((1, 6, 16), np.float32)}, "queries has shape .*of dimension 32"),
        ({"queries": np.zeros((1, 5, DIM), np.float32)}, "a multiple of 2"),
        ({"queries": np.zeros((1, 6, 2 * DIM), np.float32)[:, :, ::2]}, "side by side"),
        ({"queries": np.zeros((1, 6, DIM))}, "queries is float64"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    rig = Rig(7, 1, 2)
    rig.tables, rig.begin, rig.end = np.array([[0, 1]], np.int32), np.array([0]), np.array([7])
    with pytest.raises(ConfigError, match=message):
        rig.attend(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stride_bytes": 2047}, "must neither overlap"),
        ({"stride_bytes": 2044}, "6 pages from .*, 2044 bytes apart, V 256 elements behind K"),
        ({"value_offset": 255}, "K and V take 256 elements each"),
        ({"pages": 0}, "0 pages"),
        ({"address": 0}, "is NULL"),
        ({"block_tokens": 513}, "blocks of at most 512 tokens"),
        ({"block_tokens": 0}, "must be above 0"),
        ({"kv_heads": 0}, "a multiple of 0"),
        ({"pages": 2**63}, "does not fit"),
    ],
)
def test_pages_that_cannot_be_are_named(changes: dict[str, int], message: str) -> None:
    rig = Rig(8, 1, 2)
    rig.paged = rig.paged._replace(**changes)
    with pytest.raises(ConfigError, match=message):
        rig.attend()


def test_a_head_dimension_off_a_cache_line_is_named() -> None:
    queries = np.zeros((1, 2, 24), np.float32)
    paged = PagedKV(queries.ctypes.data, 384, 1, 48, 1, 2, 24)
    one, table = np.ones(1, np.int64), np.zeros((1, 1), np.int32)
    with pytest.raises(ConfigError, match="the dimension a multiple of 16"):
        paged.attend(queries, table, one - 1, one, scale=1.0)
