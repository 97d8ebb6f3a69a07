"""The arena as torch tensors: one buffer, seen by each group as pages of its own size.

Page-first: one page holds all layers of its group, contiguous, so that a tier copies a page in one
piece. Pages of one size class lie `stride_bytes` apart; slabs change their owner, so that the same
bytes are pages of one group now and of another one later:

    arena            | slab 0        | slab 1        | slab 2        |
    class 0          [ page 0       ][ page 1       ][ page 2       ]
    class 1          [ 0 | 1 | 2 | 3 ][ 4 | 5 | 6 | 7 ][ 8 | ...     ]

Inside a page the layers lie one after another:

    attention        [layers, 2 (K, V), block_tokens, kv_heads, head_dim]
    recurrent        [layers, state]

Elements are as wide as the group says: K and V in one format, states in float32.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.connectors.arena_regions import arena_regions
from kvcache.connectors.base import PageRegion
from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.values import whole

ALIGNMENT = 4096
"""Where the arena begins: whole blocks of a disk are read into it and written from it in place."""


class PagedStorage:
    """An arena of `slabs` slabs, zeroed, exactly as large as they are. Owns the memory.

    Attention reads whole pages and masks what lies past the end of a request: every element ever
    stored must be finite, for 0 * NaN would not be 0. So a page is zeroed before a block that does
    not fill it is written there.

    Args:
        geometry: the groups.
        slabs: as the manager has them.
        device: where the memory is.

    Attributes:
        arena: `[slabs * slab_bytes]` bytes.
        raw: for each group `[pages, page_bytes]`, a view of the arena; groups overlap.

    Raises:
        ConfigError: sizes that cannot be, or more memory than there is.
    """

    def __init__(
        self,
        geometry: Geometry,
        slabs: int,
        *,
        device: str | torch.device = "cpu",
    ) -> None:
        slabs = whole(slabs, "slabs")
        if slabs < 1:
            raise ConfigError(
                f"slabs is {slabs}: it must be above 0; geometry.slabs_in(bytes) tells how many fit"
            )
        self.geometry = geometry
        size = slabs * geometry.slab_bytes
        try:
            memory = torch.zeros(size + ALIGNMENT, dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"no memory for an arena of {slabs} slabs ({size:,} bytes) on {device}: give it"
                " fewer slabs"
            ) from error
        first = -memory.data_ptr() % ALIGNMENT
        self.arena = memory[first : first + size]
        self._classes = [self.arena.view(-1, stride) for stride in geometry.stride_bytes]
        self.raw: list[Tensor] = [
            self._classes[c][:, : spec.page_bytes]
            for spec, c in zip(geometry.groups, geometry.class_of_group, strict=True)
        ]

    def layers(self, group: int, dtype: torch.dtype) -> list[Tensor]:
        """Each layer's part of the pages as elements of a type, views `[pages, elements]`.

        Raises:
            ConfigError: a layer's part, or the distance of two pages, is not whole elements.
        """
        spec = self.geometry.groups[group]
        stride = self.geometry.stride_bytes[self.geometry.class_of_group[group]]
        part = spec.page_bytes // spec.layers
        if part % dtype.itemsize or stride % dtype.itemsize:
            raise ConfigError(
                f"group {spec.name!r} has pages of {spec.page_bytes} bytes for {spec.layers} layers,"
                f" {stride} apart: not whole elements of {dtype}"
            )
        return list(torch.unflatten(self.raw[group].view(dtype), 1, (spec.layers, -1)).unbind(1))

    def zero(self, group: int, pages: Iterable[int]) -> None:
        """Clear whole pages."""
        for page in pages:
            self.raw[group][page].zero_()

    def release(self) -> None:
        """Give the memory back to the system. It stays where it is, and is zero when it is used again.

        What shares a system page with something else is zeroed in place.
        """
        if self.arena.device.type != "cpu":
            self.arena.zero_()
            return
        first = self.arena.data_ptr()
        begin = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        end = max(begin, (first + self.arena.numel()) // mmap.PAGESIZE * mmap.PAGESIZE)
        self.arena[: begin - first].zero_()
        self.arena[end - first :].zero_()
        libc = ctypes.CDLL(None, use_errno=True)
        span = (ctypes.c_void_p(begin), ctypes.c_size_t(end - begin))
        if libc.madvise(*span, ctypes.c_int(mmap.MADV_DONTNEED)):
            number = ctypes.get_errno()
            raise OSError(number, f"madvise of the arena: {os.strerror(number)}")

    def move(self, moves: NDArray[np.void]) -> None:
        """Copy pages within the arena, one after the other: `[n]` of `MOVE_DTYPE`.

        In order, because a page that was moved may be overwritten by a later one, of any class.
        """
        for size_class, source, target in moves.tolist():
            pages = self._classes[size_class]
            pages[target].copy_(pages[source])

    def regions(self) -> list[PageRegion]:
        """Where the pages of each group are; valid while this object lives."""
        slabs = len(self.arena) // self.geometry.slab_bytes
        return arena_regions(self.geometry, address=self.arena.data_ptr(), slabs=slabs)
