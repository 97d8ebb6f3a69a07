"""Host copies of pages: gather, scatter, or both, in one native call without the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.core import arrays, native
from kvcache.core.errors import ConfigError


class CopySegment(NamedTuple):
    """One part of a page on both sides: page p starts at `address + p * stride_bytes`."""

    source_address: int
    source_stride_bytes: int
    source_pages: int
    target_address: int
    target_stride_bytes: int
    target_pages: int
    length_bytes: int


def copy_path() -> str:
    """Which instructions move the bytes: `avx512`, `avx2` or `memcpy`."""
    ffi, lib = native.load()
    return str(ffi.string(lib.kvc_copy_path()).decode())


def copy_pages(
    segments: Sequence[CopySegment],
    source_pages: NDArray[np.int32],
    target_pages: NDArray[np.int32],
) -> None:
    """Copy `source_pages[i]` to `target_pages[i]` in every segment.

    All ids, strides and ranges are validated first: on a `ConfigError` nothing was copied. That
    the addresses are mapped is the caller's promise. Returns when the bytes are visible to other
    threads.
    """
    source = arrays.flat(source_pages, np.int32, "source_pages")
    target = arrays.flat(target_pages, np.int32, "target_pages")
    if len(source) != len(target):
        raise ConfigError(
            f"{len(source)} source pages and {len(target)} target pages: they are pairs"
        )
    ffi, lib = native.load()
    rows = ffi.new("kvc_segment[]", len(segments))
    for row, segment in zip(rows, segments, strict=True):
        row.src_base = segment.source_address
        row.src_stride = segment.source_stride_bytes
        row.src_pages = segment.source_pages
        row.dst_base = segment.target_address
        row.dst_stride = segment.target_stride_bytes
        row.dst_pages = segment.target_pages
        row.bytes = segment.length_bytes
    native.call(
        lib.kvc_copy,
        rows,
        len(segments),
        ffi.from_buffer("int32_t[]", source),
        ffi.from_buffer("int32_t[]", target),
        len(source),
    )
