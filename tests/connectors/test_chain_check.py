"""A chain's own check: what its tiers hold for it and what it knows of are the same."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiers.chain_pieces import host_over_disk, tiers
from tiers.disk_pieces import page_paths
from tiers.pieces import PATIENCE

from kvcache.connectors.base import OpenWork, TierScheduler
from kvcache.connectors.testing import Gate, Key, Rig, Setup, chain, rig
from kvcache.core.errors import InvariantError


def busy(folder: Path) -> tuple[Rig, Gate]:
    """A request with a promise in both tiers, a load from both, a store, a page that sinks."""
    keys = chain("a", 4)
    with rig(lambda s: host_over_disk(s, folder)) as r:
        r.store(keys)
        assert r.worker.flush(PATIENCE)
    gate = Gate()
    r = Rig(lambda s: host_over_disk(s, folder, gate_disk=True), Setup(before_copy=gate))
    gate.shut()
    r.store([Key("sinks")])
    assert r.worker.poll() == []
    gate.wait_reached()
    assert r.lookup(1, [Key("sinks"), *keys[:2]]) == [1] * 3
    assert r.lookup(2, [Key("sinks"), *keys[2:]]) == [1] * 3
    r.plan_load(2, [Key("sinks"), *keys[2:]])
    r.planned([Key("new")])
    r.scheduler.check()
    return r, gate


def forget(owner: Callable[[Any], Any]) -> Callable[[Any], None]:
    """One of what is noted there is lost."""
    return lambda r: owner(r).pop(next(iter(owner(r))))


FAULTS: dict[str, Callable[[Any], None]] = {
    "the chain forgets a request": forget(lambda r: r.scheduler._promises),
    "the chain forgets a transfer": forget(lambda r: r.scheduler._plans),
    "the chain forgets what sinks": forget(lambda r: r.scheduler.descents._known),
    "the upper tier is asked by somebody else": lambda r: tiers(r)[0].scheduler.lookup(
        r.request_keys(77, chain("a", 1))
    ),
    "the lower tier is asked by somebody else": lambda r: tiers(r)[1].scheduler.lookup(
        r.request_keys(77, chain("a", 1))
    ),
    "a request is released above only": lambda r: tiers(r)[0].scheduler.release(1),
    "a request is released below only": lambda r: tiers(r)[1].scheduler.release(
        r.scheduler._promises[1].below.request
    ),
    "two requests have one number below": lambda r: r.scheduler._promises.update(
        {1: r.scheduler._promises[1], 3: r.scheduler._promises[1]}
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_chain_that_differs_from_its_tiers_is_found(tmp_path: Path, fault: str) -> None:
    r, gate = busy(tmp_path)
    try:
        FAULTS[fault](r)
        with pytest.raises(InvariantError, match=r"the (upper|lower) tier has \w+ \[.*\] open"):
            r.scheduler.check()
    finally:
        gate.open()
        for tier in reversed(tiers(r)):
            assert tier.worker.close(PATIENCE)


def test_a_tier_that_does_not_tell_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        assert r.scheduler.open_work() == OpenWork(set(), set())
        monkeypatch.setattr(tiers(r)[1].scheduler, "open_work", lambda: TierScheduler.open_work(r))  # type: ignore[arg-type]
        tiers(r)[1].scheduler.lookup(r.request_keys(77, chain("a", 1)))
        r.scheduler.check()


def test_what_sinks_is_no_load_of_the_tier_that_it_leaves(tmp_path: Path) -> None:
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        r.store(chain("a", 3))
        assert r.worker.flush(PATIENCE)
        upper, lower = (tier.scheduler.stats() for tier in tiers(r))
        assert (upper.stored_pages, upper.loaded_pages, upper.failed_pages) == (3, 0, 0)
        assert (lower.stored_pages, lower.loaded_pages) == (3, 0)
        assert upper.errors == lower.errors == {}
        assert r.pinned() == 0


def test_each_tier_counts_its_own_part_of_a_load(tmp_path: Path) -> None:
    """A file that is gone is an error of the disk; what rose is nothing that host memory has failed."""
    keys = chain("a", 5)
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        r.store(keys[:3])
        assert r.worker.flush(PATIENCE)
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        r.store(keys[3:])
        assert r.worker.flush(PATIENCE)
        r.lookup(1, keys)
        assert r.load(1, [keys[i] for i in (4, 0, 3, 1)]) == [1] * 4
        upper, lower = (tier.scheduler.stats() for tier in tiers(r))
        assert (upper.stored_pages, upper.loaded_pages, upper.failed_pages) == (4, 2, 0)
        assert (lower.loaded_pages, lower.failed_pages) == (2, 0)
        assert upper.load_seconds > 0
        assert lower.load_seconds > 0
        whole = r.scheduler.stats()
        sizes = [group.page_bytes for group in r.setup.geometry.groups]
        for stats in (upper, lower, whole):
            used = [group.used_slots for group in stats.groups]
            assert stats.used_bytes == sum(map(operator.mul, used, sizes)) > 0
        assert whole.load_seconds == pytest.approx(upper.load_seconds + lower.load_seconds)
        assert whole.loaded_bytes == upper.loaded_bytes + lower.loaded_bytes
        r.lookup(2, keys)
        for path in page_paths(tmp_path):
            path.unlink()
        assert r.load(2, keys) == [1, 1, 0, 1, 1]
        upper, lower = (tier.scheduler.stats() for tier in tiers(r))
        assert (upper.loaded_pages, lower.loaded_pages) == (6, 2)
        assert lower.errors == {"Missing": 1}
        assert (lower.failed_pages, lower.gone_pages) == (1, 1)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_chain_tells_no_groups_where_a_tier_tells_none(
    tmp_path: Path, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        tier = tiers(r)[silent].scheduler
        stats = tier.stats()
        monkeypatch.setattr(tier, "stats", lambda: replace(stats, groups=()))
        assert r.scheduler.stats().groups == ()
        monkeypatch.undo()
        assert [group.slots for group in r.scheduler.stats().groups] == [
            sum(t.scheduler.stats().groups[g].slots for t in tiers(r))
            for g in range(len(r.setup.geometry.groups))
        ]
