"""Attention of decoding requests over K and V where they lie in pages: no gathering."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from kvcache.core import arrays, native
from kvcache.core.errors import ConfigError
from kvcache.core.values import whole

__all__ = ["MOST_THREADS", "PagedKV"]

MOST_THREADS = 256


class PagedKV(NamedTuple):
    """Where one layer's K and V (float32) lie. Owns no memory.

    Page p begins at `address + p * stride_bytes`: K of its tokens, `[block_tokens, kv_heads,
    head_dim]`, and V in the same shape `value_offset` elements behind it.
    """

    address: int
    stride_bytes: int
    pages: int
    value_offset: int
    block_tokens: int
    kv_heads: int
    head_dim: int

    def attend(
        self,
        queries: NDArray[np.float32],
        block_tables: NDArray[np.int32],
        begin: npt.ArrayLike,
        end: npt.ArrayLike,
        *,
        scale: float,
        threads: int = 1,
    ) -> NDArray[np.float32]:
        """Softmax attention of one query position for each row. O(tokens seen), without the GIL.

        Args:
            queries: `[rows, heads, head_dim]`, the heads of a row side by side; neighbours share a
                KV head.
            block_tables: `[rows, blocks]`: pages of each row.
            begin: int64 `[rows]`: the first token that a row sees, counted from its first page on.
            end: int64 `[rows]`: and the one after the last.
            scale: of scores.
            threads: at most so many (1 to `MOST_THREADS`), and no more than `copy.cores()`.

        Returns:
            `[rows, heads, head_dim]`. On one machine, neither other rows nor threads change a bit
            of a row.

        Raises:
            ConfigError: shapes that do not fit, a page that is not there, a row that sees nothing.
        """
        rows, heads, dim = _shape("queries", queries, np.float32, 3)
        _, blocks = _shape("block_tables", block_tables, np.int32, 2)
        first, last = arrays.flat(begin, np.int64, "begin"), arrays.flat(end, np.int64, "end")
        if not rows == len(block_tables) == len(first) == len(last):
            raise ConfigError(
                f"{rows} rows of queries, {len(block_tables)} block tables, {len(first)} begins and"
                f" {len(last)} ends: give one each"
            )
        sizes = zip(queries.strides[1:], queries.shape[1:], (4 * dim, 4), strict=True)
        side_by_side = rows == 0 or all(stride == wanted or n < 2 for stride, n, wanted in sizes)
        kv_heads = whole(self.kv_heads, "kv_heads")
        if dim != self.head_dim or kv_heads < 1 or heads % kv_heads or not side_by_side:
            raise ConfigError(
                f"queries has shape {queries.shape} and strides {queries.strides}: give heads side by"
                f" side, a multiple of {kv_heads}, of dimension {self.head_dim}"
            )
        ffi, lib = native.load()
        out = np.empty((rows, heads, dim), np.float32)
        tables = np.ascontiguousarray(block_tables)
        plan = native.new(
            "kvc_attention*",
            {
                "queries": ffi.cast("float*", queries.ctypes.data),
                "out": ffi.from_buffer("float[]", out),
                "tables": ffi.from_buffer("int32_t[]", tables),
                "begin": ffi.from_buffer("int64_t[]", first),
                "end": ffi.from_buffer("int64_t[]", last),
                "base": self.address,
                "rows": rows,
                "query_stride": queries.strides[0] // 4 if rows > 1 else heads * dim,
                "table_stride": blocks,
                "page_stride": self.stride_bytes,
                "value_offset": self.value_offset,
                "pages": self.pages,
                "kv_heads": kv_heads,
                "group": heads // kv_heads,
                "head_dim": dim,
                "block_tokens": self.block_tokens,
                "scale": scale,
            },
        )
        native.call(lib.kvc_attend, plan, threads)
        return out


def _shape(what: str, array: Any, dtype: type, dimensions: int) -> tuple[int, ...]:
    """Its shape, if C can read it: the type, aligned."""
    if not isinstance(array, np.ndarray):
        raise ConfigError(f"{what} is {type(array).__name__}: give an array of {dtype.__name__}")
    if array.dtype != dtype or array.ndim != dimensions or not array.flags.aligned:
        raise ConfigError(
            f"{what} is {array.dtype} of shape {array.shape} and strides {array.strides}: expected"
            f" aligned {dtype.__name__} with {dimensions} dimensions"
        )
    shape: tuple[int, ...] = array.shape
    return shape
