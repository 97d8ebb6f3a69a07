"""Where the pages of a block manager's arena lie, for the worker side of a tier."""

from __future__ import annotations

from kvcache.connectors.base import PageRegion
from kvcache.core.layout import Geometry, require_geometry
from kvcache.core.values import whole


def arena_regions(geometry: Geometry, *, address: int, slabs: int) -> list[PageRegion]:
    """Where the pages of each group lie in one arena, as `Offload` takes it.

    Args:
        address: of the arena's first byte; 0 where no byte is ever copied.
        slabs: that it has, of `geometry.slab_bytes` each.

    Raises:
        ConfigError: no geometry, no whole number, or no slab.
    """
    require_geometry(geometry)
    address, slabs = whole(address, "address", least=0), whole(slabs, "slabs", least=1)
    return [
        PageRegion(
            address,
            group.page_bytes,
            slabs * geometry.pages_per_slab[c],
            geometry.stride_bytes[c],
        )
        for group, c in zip(geometry.groups, geometry.class_of_group, strict=True)
    ]
