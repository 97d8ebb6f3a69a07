"""Page memory of every group, as torch tensors.

Page-first: one page holds all layers of its group, contiguous, so that a tier copies a page in one
piece. Inside a page the layers lie one after another:

    full attention   [layers, 2 (K, V), block_tokens, kv_heads, head_dim]
    recurrent        [layers, state]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvcache.connectors.base import PageRegion
from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention, GroupSpec


class PagedStorage:
    """Memory for `pages[g]` pages of each group g, zeroed.

    Attention reads whole pages and masks what lies past the end of a request: every element ever
    stored must be finite, for 0 * NaN would not be 0.

    Args:
        geometry: the groups; elements must be as wide as `dtype`.
        pages: number of pages of each group.
        dtype: of keys, values and states.
        device: where the memory is.

    Raises:
        ConfigError: sizes that cannot be, or more memory than there is.
    """

    def __init__(
        self,
        geometry: Geometry,
        pages: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        if len(pages) != len(geometry.groups):
            raise ConfigError(
                f"pages has {len(pages)} numbers for {len(geometry.groups)} groups: give one each"
            )
        for spec, count in zip(geometry.groups, pages, strict=True):
            _require_fit(spec, count, dtype)
        self.geometry = geometry
        self.dtype = dtype
        try:
            self.raw: list[Tensor] = [
                torch.zeros((count, spec.page_bytes), dtype=torch.uint8, device=device)
                for spec, count in zip(geometry.groups, pages, strict=True)
            ]
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"no memory for pools of {list(pages)} pages"
                f" ({geometry.pool_bytes(pages):,} bytes) on {device}: make the pools smaller"
            ) from error

    def attention(self, group: int) -> list[Tensor]:
        """K and V of each layer, views `[pages, 2, block_tokens, kv_heads * head_dim]`."""
        spec = self.geometry.groups[group]
        assert isinstance(spec, FullAttention)
        shape = (-1, spec.layers, 2, spec.block_tokens, spec.kv_heads * spec.head_dim)
        return list(self.raw[group].view(self.dtype).view(shape).unbind(1))

    def states(self, group: int, shape: Sequence[int]) -> list[Tensor]:
        """The state of each layer, views `[pages, *shape]`."""
        layers = self.geometry.groups[group].layers
        return list(self.raw[group].view(self.dtype).view(-1, layers, *shape).unbind(1))

    def zero(self, group: int, pages: Iterable[int]) -> None:
        """Clear whole pages."""
        for page in pages:
            self.raw[group][page].zero_()

    def regions(self) -> list[PageRegion]:
        """Address, page size and number of pages of each group; valid while this object lives."""
        return [
            PageRegion(raw.data_ptr(), spec.page_bytes, len(raw))
            for raw, spec in zip(self.raw, self.geometry.groups, strict=True)
        ]


def _require_fit(spec: GroupSpec, count: int, dtype: torch.dtype) -> None:
    if count < 1:
        raise ConfigError(f"pages of group {spec.name!r} is {count}: it must be above 0")
    if isinstance(spec, FullAttention) and spec.element_bytes != dtype.itemsize:
        raise ConfigError(
            f"group {spec.name!r} has elements of {spec.element_bytes} bytes, {dtype} has"
            f" {dtype.itemsize}: set element_bytes or dtype"
        )
    if spec.page_bytes % dtype.itemsize:
        raise ConfigError(
            f"a page of group {spec.name!r} has {spec.page_bytes} bytes: not whole elements of"
            f" {dtype}"
        )
