"""The copy of pages between two regions, of which one may lie in the memories of several ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import PageRegion
from kvcache.core.copy import CopySegment, copy_pages
from kvcache.core.errors import ConfigError


def native_copy(
    source: PageRegion,
    target: PageRegion,
    source_pages: NDArray[np.int32],
    target_pages: NDArray[np.int32],
) -> None:
    """The native gather/scatter copy, whole pages, pair by pair; all or an exception.

    Of parts that several ranks hold, one is read and all are written.

    Raises:
        ConfigError: pages that are not there, or regions in parts on both sides.
    """
    if source.parts and target.parts:
        raise ConfigError("both regions of a copy lie in parts: one of them must be a tier's slots")
    parts = max(source.places, target.places, key=len)
    length = source.page_bytes // len(parts)
    segments = []
    for i in range(len(parts)):
        come, go = _part(source, i, length)[:1], _part(target, i, length)
        segments += [
            CopySegment(
                come[0],
                source.step_bytes,
                source.pages,
                address,
                target.step_bytes,
                target.pages,
                length,
            )
            for address in go
        ]
    copy_pages(segments, source_pages, target_pages)


def _part(region: PageRegion, part: int, length: int) -> tuple[int, ...]:
    """Addresses of a part of page 0."""
    return region.parts[part] if region.parts else (region.address + part * length,)
