"""A chain of tiers that know only later what they hold: what was asked is released, whatever was said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcache.connectors.base import Connector, RequestKeys
from kvcache.connectors.chain import ChainConnector
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.pool_scheduler import PoolScheduler
from kvcache.connectors.testing import Setup, chain, rig


class Later(PoolScheduler):
    """Answers when it is asked for the second time. Until a release it keeps what it was asked."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: set[int] = set()
        self.answers = True

    def lookup(self, keys: RequestKeys) -> Any:
        known, _ = keys.request in self.asked, self.asked.add(keys.request)
        return super().lookup(keys) if known and self.answers else None

    def plan_load(self, request: int, wanted: Any) -> Any:
        self.asked.discard(request)
        return super().plan_load(request, wanted)

    def release(self, request: int) -> None:
        self.asked.discard(request)
        super().release(request)


def later(setup: Setup) -> Connector:
    host = CpuConnector(setup.geometry, pages=setup.pages)
    sizes = [group.page_bytes for group in setup.geometry.groups]
    return Connector("later", Later(sizes, setup.pages, deadline_seconds=30.0), host.worker)


def below(setup: Setup) -> Connector:
    return ChainConnector(CpuConnector(setup.geometry, pages=setup.pages), later(setup))


def above(setup: Setup) -> Connector:
    return ChainConnector(later(setup), CpuConnector(setup.geometry, pages=setup.pages))


@pytest.mark.parametrize(("made", "which"), [(above, 0), (below, 1)])
def test_what_a_tier_was_asked_is_released_though_it_never_answered(
    made: Callable[[Setup], Connector], which: int
) -> None:
    with rig(made) as r:
        tier: Any = r.scheduler.tiers[which].scheduler  # type: ignore[attr-defined]
        keys = chain("a", 3)
        r.store(keys)
        assert r.worker.flush(10.0)
        for request in range(1, 4):  # each load touches what is below
            asked = r.request_keys(request, keys)
            while r.scheduler.lookup(asked) is None:
                pass
            assert r.load(request, keys) == [1, 1, 1]
            r.scheduler.check()
        assert tier.asked == set()
        tier.answers = False
        assert r.scheduler.lookup(r.request_keys(9, chain("b", 2))) is None
        assert tier.asked
        r.scheduler.release(9)
        assert tier.asked == set()
        assert r.pinned() == 0
