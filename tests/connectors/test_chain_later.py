"""A chain of tiers that answer late, or never: what they were asked is released, and nobody spins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tiers.late import pass_deadlines

from kvcache.connectors.base import Connector, RequestKeys
from kvcache.connectors.chain import ChainConnector
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.pool_scheduler import PoolScheduler
from kvcache.connectors.testing import Faults, FaultyWorker, Rig, Setup, chain, rig, with_faults


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


def answers(r: Rig, keys: RequestKeys) -> bool:
    """Asked a second time, the tier knows."""
    return any(r.scheduler.lookup(keys) is not None for _ in range(3))


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
            assert answers(r, asked)
            assert r.load(request, keys) == [1, 1, 1]
            r.scheduler.check()
        assert tier.asked == set()
        tier.answers = False
        assert r.scheduler.lookup(r.request_keys(9, chain("b", 2))) is None
        assert tier.asked
        r.scheduler.release(9)
        assert tier.asked == set()
        assert r.pinned() == 0


def test_waiting_for_a_tier_that_never_says_what_is_late_is_no_busy_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent: list[FaultyWorker] = []

    def made(setup: Setup) -> Connector:
        lower, worker = with_faults(later(setup), Faults(drop=1.0))
        silent.append(worker)
        return ChainConnector(CpuConnector(setup.geometry, pages=setup.pages), lower)

    with rig(made) as r:
        keys = chain("a", 2)
        below: Any = r.scheduler.tiers[1]  # type: ignore[attr-defined]
        assert r.store(keys) == keys
        assert not r.worker.flush(0.05)
        silent[0].recover()
        assert r.worker.flush(10.0)
        r.store(chain("b", r.setup.pages[0]))  # the upper tier has room for these alone
        assert answers(r, r.request_keys(1, keys))
        load = r.plan_load(1, keys)
        r.submit(load)
        silent[0].settle()
        pass_deadlines(monkeypatch)
        polls = 0
        real = below.worker.poll

        def poll() -> Any:
            nonlocal polls
            polls += 1
            return real()

        monkeypatch.setattr(below.worker, "poll", poll)
        assert not r.worker.wait(0.1)
        assert polls < 50
        monkeypatch.undo()
        silent[0].recover()
        r.scheduler.complete(r.results(load.id)[load.id][-1])
