"""The rule of the contract suite for device pages that lie in the memories of several ranks."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.connectors.testing.harness import Factory, Setup, chain, expect, rig
from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention


def pages_of_several_ranks_come_back(factory: Factory) -> None:
    """Device pages in parts: each part is stored once, and loaded into all ranks that have it."""
    group = FullAttention(
        name="attention", layers=1, kv_heads=1, head_dim=6, block_tokens=8, element_bytes=1
    )
    setup = Setup(geometry=Geometry((group,)), pages=(8,), ranks=(2, 1, 3))
    with rig(factory, setup) as r:
        keys = chain("a", 5)
        expect(r.store(keys) == keys, "an empty tier did not take all pages")
        expect(all(r.lookup(1, keys)), "stored keys are not visible")
        expect(all(r.load(1, keys)), "a plain load failed")
        stored = r.scheduler.stats().stored_bytes
        expect(stored == 5 * group.page_bytes, "a part that several ranks have counts once")


RANK_RULES: tuple[Callable[[Factory], None], ...] = (pages_of_several_ranks_come_back,)
