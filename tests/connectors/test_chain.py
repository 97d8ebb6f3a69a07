"""Host memory over a disk: what rises, what sinks, what waits for what."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tiers import chain_process
from tiers.chain_pieces import host_over_disk, tiers, tiers_of
from tiers.disk_pieces import MODEL, disk, page_paths, temporaries
from tiers.late import pass_deadlines
from tiers.pieces import PATIENCE, one_group, region

from kvcache.connectors.base import TierWorker
from kvcache.connectors.chain import ChainConnector
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.disk import DiskConnector
from kvcache.connectors.disk_worker import DiskWorker
from kvcache.connectors.host_pool import HostPool
from kvcache.connectors.testing import Gate, Key, Rig, Setup, chain, rig
from kvcache.core.errors import ConfigError, MisuseError

HOST = (3, 2)
"""Slots of the host tier: less than the disk's (8, 6)."""


def in_tier(r: Rig, which: int, keys: list[Key]) -> list[int]:
    """What one tier holds."""
    held = tiers(r)[which].scheduler.holds(r.request_keys(9, keys))
    assert held is not None
    counters = [iter(row.tolist()) for row in held]
    return [next(counters[key.group]) for key in keys]


def test_what_is_stored_sinks_to_the_disk_and_is_there_after_a_restart(tmp_path: Path) -> None:
    keys = [*chain("a", 5), *chain("a", 3, 1)]
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        r.store(keys)
        assert r.worker.flush(PATIENCE)
        assert in_tier(r, 1, keys) == [1] * 8
        assert r.pinned() == 0
        stats = r.scheduler.stats()
        assert (stats.stored_pages, stats.dropped_store_pages, stats.errors) == (8, 0, {})
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        assert in_tier(r, 0, keys) == [0] * 8
        assert r.lookup(1, keys) == [1] * 8
        assert r.pinned() == 8
        assert all(r.load(1, keys))
        assert r.pinned() == 0
        stats = r.scheduler.stats()
        assert stats.loaded_pages == 8
        assert stats.loaded_bytes == sum(
            r.setup.geometry.groups[key.group].page_bytes for key in keys
        )
        # They stay in host memory: the files are not needed any more.
        for path in page_paths(tmp_path):
            path.unlink()
        assert in_tier(r, 0, keys) == [1] * 8
        r.lookup(2, keys)
        assert all(r.load(2, keys))


def test_what_the_host_evicts_comes_back_from_the_disk(tmp_path: Path) -> None:
    keys = chain("a", 7)
    with rig(lambda s: host_over_disk(s, tmp_path, host_pages=HOST)) as r:
        for key in keys:
            r.store([key])
            assert r.worker.flush(PATIENCE)
        assert in_tier(r, 0, keys) == [0, 0, 0, 0, 1, 1, 1]
        assert r.visible(keys) == [1] * 7
        for part in (keys[:3], keys[2:5], keys[4:]):
            assert all(r.lookup(1, part))
            assert all(r.load(1, part))
        assert r.scheduler.stats().errors == {}
        assert r.pinned() == 0


def test_one_load_takes_from_both_tiers(tmp_path: Path) -> None:
    keys = chain("a", 6)
    with rig(lambda s: host_over_disk(s, tmp_path, host_pages=(6, 2))) as r:
        r.store(keys[:3])
        assert r.worker.flush(PATIENCE)
    with rig(lambda s: host_over_disk(s, tmp_path, host_pages=(6, 2))) as r:
        r.store(keys[3:])
        assert in_tier(r, 0, keys) == [0, 0, 0, 1, 1, 1]
        mixed = [keys[i] for i in (4, 0, 3, 2, 5, 1)]
        assert all(r.lookup(1, keys))
        assert all(r.load(1, mixed))
        assert in_tier(r, 0, keys) == [1] * 6


def test_a_host_that_is_full_of_pins_lets_nothing_rise(tmp_path: Path) -> None:
    """What fits rises, the rest fails its items: they are computed again."""
    keys = chain("a", 6)
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        r.store(keys)
        assert r.worker.flush(PATIENCE)
    with rig(lambda s: host_over_disk(s, tmp_path, host_pages=HOST)) as r:
        r.store(chain("b", 2))
        assert all(r.lookup(1, chain("b", 2)))
        assert all(r.lookup(2, keys))
        assert r.load(2, keys) == [1, 0, 0, 0, 0, 0]
        assert r.scheduler.stats().failed_pages == 5
        assert all(r.load(1, chain("b", 2)))
        assert r.pinned() == 0
        assert r.worker.flush(PATIENCE)
        assert all(r.lookup(2, keys[:3]))  # now there is room
        assert all(r.load(2, keys[:3]))


def test_a_slow_disk_delays_no_store(tmp_path: Path) -> None:
    """Only the way down waits, and can be waited for."""
    gate = Gate()
    with rig(lambda s: host_over_disk(s, tmp_path, gate_disk=True), Setup(before_copy=gate)) as r:
        gate.shut()
        keys = chain("a", 8)
        for key in keys:
            assert r.store([key]) == [key]
        gate.wait_reached()
        assert r.pinned() == 0
        assert not r.worker.flush(0.02)
        assert in_tier(r, 1, keys) == [0] * 8
        assert len(r.scheduler.descents) == 8  # type: ignore[attr-defined]
        r.lookup(1, keys)
        assert all(r.load(1, keys))
        gate.open()
        assert r.worker.flush(PATIENCE)
        assert in_tier(r, 1, keys) == [1] * 8


def test_what_is_evicted_before_its_turn_is_counted(tmp_path: Path) -> None:
    gate = Gate()
    setup = Setup(before_copy=gate)
    with rig(lambda s: host_over_disk(s, tmp_path, gate_disk=True, host_pages=HOST), setup) as r:
        gate.shut()
        keys = chain("a", 8)
        for key in keys:
            r.store([key])
        gate.wait_reached()
        gate.open()
        assert r.worker.flush(PATIENCE)
        on_disk = in_tier(r, 1, keys)
        assert 3 <= sum(on_disk) < 8
        assert r.scheduler.stats().dropped_store_pages == 8 - sum(on_disk)
        assert r.visible(keys) == on_disk
        assert r.pinned() == 0


def test_a_late_read_keeps_its_slots_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = chain("a", 3)
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        r.store(keys)
        assert r.worker.flush(PATIENCE)
    gate, begun = Gate(), threading.Event()

    def before_copy() -> None:
        begun.set()
        gate()

    setup = Setup(before_copy=before_copy)
    with rig(lambda s: host_over_disk(s, tmp_path, gate_disk=True, host_pages=HOST), setup) as r:
        gate.shut()
        assert all(r.lookup(1, keys))
        transfer = r.plan_load(1, keys)
        r.submit(transfer)
        while not begun.is_set():  # slots first, then the read, which a poll begins
            assert not r.worker.wait(0.01)
        pass_deadlines(monkeypatch)
        late = r.next_result()
        assert late.late
        assert not late.ok.any()
        r.scheduler.complete(late)
        assert r.plan_store(chain("b", 1)) is None, "a slot that is being read into was given away"
        gate.open()
        final = r.next_result()
        assert not final.late
        assert final.error.startswith("Deadline")
        r.scheduler.complete(final)
        r.verify(keys, transfer, final.ok)
        assert r.pinned() == 0
        assert r.store(chain("b", 1)) == chain("b", 1)
        assert r.scheduler.stats().late_transfers == 1


def test_a_damaged_file_fails_its_item_and_goes(tmp_path: Path) -> None:
    keys = chain("a", 4)
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        r.store(keys)
        assert r.worker.flush(PATIENCE)
    damaged = page_paths(tmp_path)[1]
    raw = bytearray(damaged.read_bytes())
    raw[4100] ^= 1
    damaged.write_bytes(raw)
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        assert all(r.lookup(1, keys))
        ok = r.load(1, keys)
        assert sum(ok) == 3
        assert not damaged.exists()
        stats = r.scheduler.stats()
        assert (stats.gone_pages, stats.failed_pages) == (1, 1)
        assert stats.errors == {"Damaged": 1}
        assert r.visible(keys) == ok
        assert r.store(keys) == [key for key, good in zip(keys, ok, strict=True) if not good]
        assert r.worker.flush(PATIENCE)
        assert len(page_paths(tmp_path)) == 4


def test_what_the_disk_refuses_for_now_is_written_later(tmp_path: Path) -> None:
    gate = Gate()
    setup = Setup(before_copy=gate, queue_depth=1)
    with rig(lambda s: host_over_disk(s, tmp_path, gate_disk=True), setup) as r:
        gate.shut()
        keys = chain("a", 4)
        for key in keys:
            r.store([key])
        gate.open()
        assert r.worker.flush(PATIENCE)
        assert in_tier(r, 1, keys) == [1] * 4


def test_a_key_in_use_above_is_not_old_below(tmp_path: Path) -> None:
    """Else what is always in host memory would be the first to go from the disk."""
    setup = Setup(pages=(8, 6))
    with rig(lambda s: host_over_disk(s, tmp_path, host_pages=HOST), setup) as r:
        hot = chain("hot", 1)
        r.store(hot)
        for i in range(20):
            assert r.lookup(1, hot) == [1]
            assert all(r.load(1, hot))
            r.store([Key(f"k{i}")])
            assert r.worker.flush(PATIENCE)
        assert in_tier(r, 0, hot) == in_tier(r, 1, hot) == [1]


def test_a_repeated_lookup_asks_no_index(tmp_path: Path) -> None:
    keys = chain("a", 5)
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        r.store(keys)
        assert r.worker.flush(PATIENCE)
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        r.store(chain("b", 2))
        assert r.worker.flush(PATIENCE)
        asked = r.request_keys(1, [*keys, *chain("b", 2)])
        first = r.scheduler.lookup(asked)
        again = r.scheduler.lookup(asked)
        assert first is not None
        assert again is not None
        assert first[0].tolist() == [1] * 7
        assert first[0] is again[0]
        assert not first[0].flags.writeable
        r.store(chain("c", 1))
        assert r.scheduler.lookup(asked)[0].tolist() == [1] * 7  # type: ignore[index]
        assert r.pinned() == 7
        r.scheduler.release(1)
        assert r.pinned() == 0


def test_close_ends_the_disk_first_and_waits_for_it(tmp_path: Path) -> None:
    """Its thread reads and writes host memory of the upper tier."""
    gate = Gate()
    with rig(lambda s: host_over_disk(s, tmp_path, gate_disk=True), Setup(before_copy=gate)) as r:
        gate.shut()
        r.store(chain("a", 3))
        assert r.worker.poll() == []
        gate.wait_reached()
        assert not r.worker.close(0.02)
        upper = tiers(r)[0].worker
        assert upper._thread._thread.is_alive()  # type: ignore[attr-defined]
        late = r.run(r.planned(chain("c", 2)))  # of the upper tier, which waits for the disk
        assert (late.ok.tolist(), late.error.partition(":")[0]) == ([0, 0], "Closed")
        gate.open()
        assert r.worker.close(PATIENCE)
        assert r.worker.close(PATIENCE)
        assert r.pinned() == 0
    assert temporaries(tmp_path) == []


def test_a_chain_tells_events_of_both_media(tmp_path: Path) -> None:
    with rig(lambda s: host_over_disk(s, tmp_path, host_pages=HOST), Setup(events=True)) as r:
        r.store(chain("a", 2))
        assert r.worker.flush(PATIENCE)
        told = [(type(e).__name__, e.medium, len(e.keys)) for e in r.scheduler.take_events()]  # type: ignore[union-attr]
        assert told == [("KeysStored", "CPU", 2), ("KeysStored", "STORAGE", 2)]
        for i in range(3):
            r.store([Key(f"b{i}")])
        told = [(type(e).__name__, e.medium) for e in r.scheduler.take_events()]  # type: ignore[union-attr]
        assert ("KeysRemoved", "CPU") in told
        assert ("KeysRemoved", "STORAGE") not in told


def test_nothing_sinks_where_it_is_not_to(tmp_path: Path) -> None:
    with rig(lambda s: host_over_disk(s, tmp_path, behind=False)) as r:
        r.store(chain("a", 3))
        assert r.worker.flush(0.0)
    assert page_paths(tmp_path) == []


def test_parts_that_make_no_chain_are_refused(tmp_path: Path) -> None:
    geometry = one_group(64)
    host, below = (
        CpuConnector(geometry, pages=[4]),
        disk(Setup(geometry=geometry, pages=(4,)), tmp_path),
    )
    other = DiskConnector(
        one_group(128), folder=tmp_path / "x", fingerprint=MODEL, layout="whole", pages=[4]
    )
    for arguments, message in (
        ((host, "disk"), r"ChainConnector.lower is 'disk': give a Connector"),
        ((None, below), r"ChainConnector.upper is None: give a Connector"),
        ((host, host), "are one connector: give two"),
        ((below, host), "upper, 'disk', is not in host memory: .* put a CpuConnector above it"),
    ):
        with pytest.raises(ConfigError, match=message):
            ChainConnector(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"behind is 1: it must be True or False"):
        ChainConnector(host, below, behind=1)  # type: ignore[arg-type]
    made = ChainConnector(host, other)
    assert made.name == "cpu+disk"
    memory = np.zeros((4, 64), np.uint8)
    with pytest.raises(ConfigError, match="it needs pages of 128 bytes"):
        made.worker.register([region(memory)])
    made.worker.close()
    with pytest.raises(
        MisuseError, match="the memory was let go: the worker that has it is closed"
    ):
        ChainConnector(made.scheduler.tiers[0], below)  # type: ignore[attr-defined]
    below.worker.close()


def test_a_chain_that_is_dropped_ends_its_threads(tmp_path: Path) -> None:
    r = Rig(lambda s: host_over_disk(s, tmp_path))
    r.store(chain("a", 2))
    threads = [tier.worker._thread._thread for tier in tiers(r)]  # type: ignore[attr-defined]
    assert all(thread.is_alive() for thread in threads)
    del r
    end = time.monotonic() + PATIENCE
    while any(thread.is_alive() for thread in threads):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not list(tmp_path.glob("*/tmp/*"))


@pytest.mark.parametrize("how", ["drop", "exit", "die"])
def test_a_chain_that_is_let_go_of_while_a_page_sinks_keeps_its_memory(
    tmp_path: Path, how: str
) -> None:
    """Until the disk has read it: else the process ends by a signal, or wrong bytes are a page."""
    command = [sys.executable, chain_process.__file__, str(tmp_path), how]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=4 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
    setup = Setup(geometry=chain_process.GEOMETRY, pages=(8,))
    with rig(lambda s: disk(s, tmp_path), setup) as r:
        assert r.lookup(1, [chain_process.KEY]) == [1]
        assert r.load(1, [chain_process.KEY]) == [1]  # compares the bytes


def test_memory_under_a_tier_that_does_not_tell_its_end_goes_with_its_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stays for good where nobody closes it: its threads may be in the middle of a page."""
    monkeypatch.setattr(DiskWorker, "at_end", TierWorker.at_end)
    let_go: list[HostPool] = []
    really = HostPool.close

    def close(pool: HostPool) -> None:
        let_go.append(pool)
        really(pool)

    monkeypatch.setattr(HostPool, "close", close)
    with rig(lambda s: host_over_disk(s, tmp_path)) as r:
        assert tiers(r)[0].worker.close(PATIENCE)
        assert let_go == []
        assert r.worker.close(PATIENCE)
        assert len(let_go) == 1
    dropped = Rig(lambda s: host_over_disk(s, tmp_path))
    threads = [tier.worker._thread._thread for tier in tiers(dropped)]  # type: ignore[attr-defined]
    del dropped
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert len(let_go) == 1


def test_a_chain_below_a_chain_tells_its_end(tmp_path: Path) -> None:
    inner = host_over_disk(Setup(), tmp_path)
    told: list[int] = []
    assert inner.worker.at_end(lambda: told.append(1))
    assert tiers_of(inner)[0].worker.close(PATIENCE)
    assert told == []
    assert inner.worker.close(PATIENCE)
    assert inner.worker.close(PATIENCE)
    assert inner.worker.at_end(lambda: told.append(2))
    assert told == [1, 2]
