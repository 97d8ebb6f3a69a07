"""A chain whose tiers fail, raise or are late: one end for each transfer, and nothing moves after it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiers.chain_pieces import host_over_disk, tiers
from tiers.pieces import PATIENCE

from kvcache.connectors import chain_worker, pool_chunks
from kvcache.connectors.pool_chunks import PoolChunks
from kvcache.connectors.testing import Gate, Key, Rig, Setup, chain, rig
from kvcache.core import host_memory


def with_keys_in_both(folder: Path) -> list[Key]:
    """The first three will be on the disk alone, the others in host memory too."""
    keys = chain("a", 6)
    with rig(lambda s: host_over_disk(s, folder)) as r:
        r.store(keys[:3])
        assert r.worker.flush(PATIENCE)
    return keys


def raising(worker: Any, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """The real worker, but its next calls of `submit` raise and take nothing."""
    really, left = worker.submit, [OSError(5, "injected")] * times

    def submit(transfer: Any) -> bool:
        if left:
            raise left.pop()
        return bool(really(transfer))

    monkeypatch.setattr(worker, "submit", submit)


def is_pinned_until_it_ends(r: Rig, gate: Gate, transfer: Any) -> Any:
    """No result comes while a part is at the gate; the one that comes then."""
    gate.wait_reached()
    assert r.worker.poll() == []
    gate.open()
    return r.results(transfer.id)[transfer.id]


def test_a_part_that_ends_at_once_does_not_end_the_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deadline passes just then for the disk's part; that of the host goes on."""
    keys, gate = with_keys_in_both(tmp_path), Gate()
    with rig(lambda s: host_over_disk(s, tmp_path), Setup(before_copy=gate)) as r:
        r.store(keys[3:])
        assert all(r.lookup(1, keys))
        transfer = r.plan_load(1, keys)
        gate.shut()
        later = iter((0.0, 1e6))
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + next(later, 0.0))
        with monkeypatch.context() as patch:
            patch.setattr(chain_worker, "time", clock)
            r.submit(transfer)
        (result,) = is_pinned_until_it_ends(r, gate, transfer)
        assert result.ok.tolist() == [0, 0, 0, 1, 1, 1]
        assert result.error.startswith("Deadline")
        r.scheduler.complete(result)
        r.verify(keys, transfer, result.ok)
        assert r.pinned() == 0


def test_a_tier_that_raises_fails_its_part_and_the_other_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what the disk still reads into would be given to somebody else."""
    keys, gate = with_keys_in_both(tmp_path), Gate()
    with rig(lambda s: host_over_disk(s, tmp_path, gate_disk=True), Setup(before_copy=gate)) as r:
        r.store(keys[3:])
        assert r.worker.flush(PATIENCE)
        assert all(r.lookup(1, keys))
        transfer = r.plan_load(1, keys)
        gate.shut()
        raising(tiers(r)[0].worker, monkeypatch)
        r.submit(transfer)
        (result,) = is_pinned_until_it_ends(r, gate, transfer)
        assert result.ok.tolist() == [1, 1, 1, 0, 0, 0]
        assert result.error == "OSError: [Errno 5] injected"
        r.scheduler.complete(result)
        r.verify(keys, transfer, result.ok)
        assert r.pinned() == 0
        assert r.visible(keys) == [1] * 6


@pytest.mark.parametrize("which", [0, 1])
def test_a_tier_that_raises_when_a_load_goes_on_or_begins_fails_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    keys = with_keys_in_both(tmp_path)[:3]
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        assert all(r.lookup(1, keys))
        raising(tiers(r)[which].worker, monkeypatch)
        assert r.load(1, keys) == [0, 0, 0]
        assert r.scheduler.stats().errors == {"OSError": 1}
        assert r.pinned() == 0
        assert all(r.lookup(2, keys))
        assert r.load(2, keys) == [1, 1, 1]


def test_a_disk_that_raises_costs_what_was_to_sink_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        lower = tiers(r)[1]
        raising(lower.worker, monkeypatch)
        r.store(chain("a", 2))
        assert r.worker.poll() == []
        assert r.store(chain("b", 2)) == chain("b", 2)
        assert r.worker.flush(PATIENCE)
        stats = r.scheduler.stats()
        assert (stats.stored_pages, stats.failed_pages, stats.errors) == (4, 2, {"OSError": 1})
        assert lower.scheduler.stats().errors == {"OSError": 1}
        held = lower.scheduler.holds(r.request_keys(1, [*chain("a", 2), *chain("b", 2)]))
        assert held is not None
        assert held[0].tolist() == [0, 0, 1, 1]
        assert r.pinned() == 0
        r.lookup(1, chain("a", 2))
        assert all(r.load(1, chain("a", 2)))


def test_what_rises_touches_no_memory_that_a_limit_does_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As stores: the items fail, not the process. The rest rises."""
    keys = chain("a", 6)
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        r.store(keys)
        assert r.worker.flush(PATIENCE)
    monkeypatch.setattr(pool_chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(PoolChunks, "start", lambda _: None)  # on demand alone
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        upper, lower = tiers(r)
        chunks: PoolChunks = upper.worker.chunks  # type: ignore[attr-defined]
        assert all(r.lookup(1, keys[:2]))
        assert r.load(1, keys[:2]) == [1, 1]
        page = r.setup.geometry.groups[0].page_bytes
        assert chunks.ready_bytes == 2 * page
        monkeypatch.setattr(host_memory, "available", lambda: (10, "somebody"))
        assert all(r.lookup(2, keys))
        assert r.load(2, keys) == [1, 1, 0, 0, 0, 0]
        assert chunks.ready_bytes == 2 * page
        assert r.scheduler.stats().errors == {"NoSpace": 1}
        assert r.pinned() == 0
        assert r.visible(keys) == [1] * 6
        assert lower.scheduler.stats().used_bytes == 6 * page
        monkeypatch.setattr(lower.worker, "submit", None)  # not asked where nothing is ready
        assert all(r.lookup(3, keys[2:]))
        assert r.load(3, keys[2:]) == [0] * 4


def test_memory_that_was_short_for_a_moment_keeps_nothing_from_rising(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rises replaces what is old; where there is nothing old, memory is asked for again."""
    keys = chain("a", 5)
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        r.store(keys)
        assert r.worker.flush(PATIENCE)
    monkeypatch.setattr(pool_chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(PoolChunks, "start", lambda _: None)  # on demand alone
    monkeypatch.setattr("kvcache.connectors.slots_aside.RETRY_SECONDS", 1e9)
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        with monkeypatch.context() as short:
            short.setattr(host_memory, "available", lambda: (10, "somebody"))
            assert r.run(r.planned(chain("b", 1))).error.startswith("NoSpace: 1 of 1 pages")
            assert r.lookup(1, keys[:2]) == [1, 1]
            assert r.load(1, keys[:2]) == [0, 0]
            assert r.scheduler.stats().errors == {"NoSpace": 2}
            r.scheduler.check()
        assert r.lookup(1, keys[:2]) == [1, 1]
        assert r.load(1, keys[:2]) == [1, 1]
        monkeypatch.setattr(host_memory, "available", lambda: (10, "somebody"))
        assert r.run(r.planned(chain("b", 1))).error.startswith("NoSpace: 1 of 1 pages")
        assert r.lookup(1, keys[2:4]) == [1, 1]
        assert r.load(1, keys[2:4]) == [1, 1]  # in place of the first two
        held = tiers(r)[0].scheduler.holds(r.request_keys(1, keys))
        assert held is not None
        assert held[0].tolist() == [0, 0, 1, 1, 0]


def test_items_that_find_no_slot_above_say_so(tmp_path: Path) -> None:
    keys = with_keys_in_both(tmp_path)[:3]
    with rig(lambda s: host_over_disk(s, tmp_path, host_pages=(2, 2))) as r:
        r.store(chain("b", 2))
        assert r.worker.flush(PATIENCE)
        r.lookup(1, chain("b", 2))
        for _ in range(2):
            r.lookup(2, keys)
            result = r.run(r.plan_load(2, keys))
            assert result.error.startswith("NoSpace: 3 of 3 pages have no slot in the tier above")
        assert all(r.load(1, chain("b", 2)))
        r.lookup(2, keys[:2])
        assert all(r.load(2, keys[:2]))  # the slots were not set aside for it
        r.lookup(2, [Key("nowhere"), keys[0]])
        result = r.run(r.plan_load(2, [Key("nowhere")]))
        assert "BadItem" in result.error
