"""Attention of decoding requests over K and V where they lie in pages: no gathering."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.core import native
from kvcache.core.errors import ConfigError

__all__ = ["HEAD_DIM_STEP", "MOST_BLOCK_TOKENS", "PagedKV"]

HEAD_DIM_STEP = 16
"""Head dimensions are multiples of it."""

MOST_BLOCK_TOKENS = 512


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
        tables: NDArray[np.int32],
        begin: NDArray[np.int64],
        end: NDArray[np.int64],
        *,
        scale: float,
        threads: int = 1,
    ) -> NDArray[np.float32]:
        """Softmax attention of one query position for each row. O(tokens seen), without the GIL.

        Args:
            queries: `[rows, heads, head_dim]`; neighbouring heads share a KV head.
            tables: `[rows, blocks]`: pages of each row.
            begin: `[rows]`: the first token that a row sees, counted from its first page on.
            end: `[rows]`: and the one after the last.
            scale: of scores.
            threads: at most so many (1 to 256), and no more than `copy.cores()`.

        Returns:
            `[rows, heads, head_dim]`. A row's bits depend on nothing but the row.

        Raises:
            ConfigError: shapes that do not fit, a page that is not there, a row that sees nothing.
        """
        rows, heads, dim = _shaped("queries", queries, np.float32, 3)
        _, blocks = _shaped("tables", tables, np.int32, 2, rows)
        for what, ends in (("begin", begin), ("end", end)):
            _shaped(what, ends, np.int64, 1, rows)
        near = [(stride, n) for stride, n in zip(queries.strides, queries.shape, strict=True)]
        side_by_side = all(
            n < 2 or s == w for (s, n), w in zip(near[1:], (4 * dim, 4), strict=True)
        )
        if dim != self.head_dim or self.kv_heads < 1 or heads % self.kv_heads or not side_by_side:
            raise ConfigError(
                f"queries has shape {queries.shape} and strides {queries.strides}: give heads side by"
                f" side, a multiple of {self.kv_heads}, of dimension {self.head_dim}"
            )
        ffi, lib = native.load()
        out = np.empty((rows, heads, dim), np.float32)
        buffers = {
            "queries": ffi.cast("float*", queries.ctypes.data),
            "out": ffi.from_buffer("float[]", out),
            "tables": ffi.from_buffer("int32_t[]", tables),
            "begin": ffi.from_buffer("int64_t[]", begin),
            "end": ffi.from_buffer("int64_t[]", end),
        }
        numbers = {
            "base": self.address,
            "rows": rows,
            "query_stride": queries.strides[0] // 4 if rows > 1 else heads * dim,
            "table_stride": blocks,
            "page_stride": self.stride_bytes,
            "value_offset": self.value_offset,
            "pages": self.pages,
            "kv_heads": self.kv_heads,
            "group": heads // self.kv_heads,
            "head_dim": dim,
            "block_tokens": self.block_tokens,
            "scale": scale,
        }
        native.call(lib.kvc_attend, native.new("kvc_decode*", buffers | numbers), threads)
        return out


def _shaped(
    what: str, array: NDArray[Any], dtype: type, dimensions: int, rows: int | None = None
) -> tuple[int, ...]:
    """Its shape, when it is what C can read; all but queries must be contiguous."""
    if (
        array.dtype != dtype
        or array.ndim != dimensions
        or (rows is not None and (len(array) != rows or not array.flags.c_contiguous))
    ):
        raise ConfigError(
            f"{what} is {array.dtype} of shape {array.shape}: expected {dtype.__name__} with"
            f" {dimensions} dimensions" + ("" if rows is None else f", contiguous, for {rows} rows")
        )
    return array.shape
