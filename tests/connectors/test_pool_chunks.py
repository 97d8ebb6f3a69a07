"""Memory of a pool in chunks: in the background, or by who needs one first; limits that come later."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiers.chain_pieces import host_over_disk, tiers
from tiers.pieces import PATIENCE, cpu, finals, one_group, region, transfer

from kvcache.connectors import pool_chunks
from kvcache.connectors.base import Connector, Direction, PageRegion
from kvcache.connectors.cpu import CpuConnector, CpuWorker, native_copy
from kvcache.connectors.host_pool import HostPool
from kvcache.connectors.pool_chunks import PoolChunks
from kvcache.connectors.testing import Setup, chain, rig
from kvcache.core import host_memory
from kvcache.core.errors import MisuseError


class Memory:
    """Notes what was made ready; refuses what it is told to."""

    def __init__(self) -> None:
        self.ready: list[tuple[int, int]] = []
        self.refuses = False
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, address: int, size_bytes: int) -> None:
        self.entered.release()
        assert self.gate.wait(PATIENCE)
        if self.refuses:
            raise OSError(errno.ENOMEM, "somebody took it")
        self.ready.append((address, size_bytes))


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=3),
    chunk_bytes=st.integers(1, 40),
    asked=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 29)), max_size=10),
    refusals=st.sets(st.integers(0, 9)),
)
def test_a_slot_may_be_written_if_its_bytes_were_made_ready_and_each_was_once(
    sizes: list[tuple[int, int]],
    chunk_bytes: int,
    asked: list[tuple[int, int]],
    refusals: set[int],
) -> None:
    regions = [PageRegion(1000 * (g + 1), size, count) for g, (size, count) in enumerate(sizes)]
    memory = Memory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_chunks, "CHUNK_BYTES", chunk_bytes)
        chunks = PoolChunks(regions, memory)
    for i, (group, slot) in enumerate(asked):
        if group >= len(regions) or slot >= regions[group].pages:
            continue
        memory.refuses = i in refusals
        good, error = chunks.ensure(group, np.array([slot, 0], np.int32))
        first = regions[group].address + slot * regions[group].page_bytes
        there = any(
            a <= first and first + regions[group].page_bytes <= a + n for a, n in memory.ready
        )
        assert good[0] == there
        assert error == ("" if good.all() else "somebody took it")
    memory.refuses = False
    chunks.start()
    assert chunks.wait(PATIENCE)
    assert chunks.error == ""
    covered = sorted((a + i) for a, n in memory.ready for i in range(n))
    assert covered == [r.address + i for r in regions for i in range(r.page_bytes * r.pages)], (
        "not every byte exactly once"
    )
    assert chunks.ready_bytes == len(covered)
    assert all(
        n <= max(chunk_bytes, r.page_bytes)
        for a, n in memory.ready
        for r in regions
        if a // 1000 == r.address // 1000
    )
    assert chunks.close()


def test_a_store_does_not_wait_for_the_rest_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is in the middle of the pool: who needs another chunk makes it ready itself."""
    monkeypatch.setattr(pool_chunks, "CHUNK_BYTES", 10)
    memory = Memory()
    chunks = PoolChunks([PageRegion(1000, 10, 50)], memory)
    good, _ = chunks.ensure(0, np.array([40], np.int32))
    assert good.all()
    assert memory.ready == [(1400, 10)]
    memory.gate.clear()
    chunks.start()
    for _ in range(2):
        assert memory.entered.acquire(timeout=PATIENCE)  # chunk 40, and the thread's first
    memory.gate.set()
    assert chunks.wait(PATIENCE)
    assert sorted(memory.ready) == [(1000 + 10 * i, 10) for i in range(50)]
    assert chunks.close()


def test_closing_ends_the_thread_between_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_chunks, "CHUNK_BYTES", 10)
    memory = Memory()
    memory.gate.clear()
    chunks = PoolChunks([PageRegion(1000, 10, 1000)], memory)
    chunks.start()
    assert memory.entered.acquire(timeout=PATIENCE)
    monkeypatch.setattr(pool_chunks, "CLOSE_SECONDS", 0.01)
    assert not chunks.close()  # one is being made ready: the memory must stay
    monkeypatch.setattr(pool_chunks, "CLOSE_SECONDS", PATIENCE)
    memory.gate.set()
    assert chunks.close()
    assert len(memory.ready) < 5
    assert chunks.ensure(0, np.array([999], np.int32))[1] == "the pool is closed"


def test_a_thread_that_fails_says_so_and_stores_try_for_themselves() -> None:
    def broken(address: int, size_bytes: int) -> None:
        raise RuntimeError(f"{address} and {size_bytes}")

    chunks = PoolChunks([PageRegion(1000, 10, 5)], broken)
    chunks.start()
    assert chunks.wait(PATIENCE)
    assert chunks.error == "RuntimeError: 1000 and 50"
    assert chunks.ready_bytes == 0


# ---- through the connector -----------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_pool_is_there_in_the_end_and_usable_from_the_start() -> None:
    """The whole pool is in memory without a store; the first store needs none of it."""
    geometry = one_group(1 << 20, 16)
    connector = CpuConnector(geometry, pages=[64])
    before = resident_bytes()
    memory = np.zeros((2, 1 << 20), np.uint8)
    connector.worker.register([region(memory)])
    worker: Any = connector.worker
    try:
        assert worker.submit(transfer(1, Direction.STORE, [0], [63]))
        (result,) = finals(worker, 1)
        assert result.ok.all()
        assert worker.chunks.wait(PATIENCE)
        assert worker.chunks.error == ""
        assert worker.chunks.ready_bytes == 64 << 20
        assert resident_bytes() - before > 60 << 20
    finally:
        assert connector.worker.close(PATIENCE)
    assert resident_bytes() - before < 20 << 20


def test_memory_that_went_since_the_start_fails_stores_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No store touches what is not there; what is old makes room; later the pool grows again."""
    monkeypatch.setattr(pool_chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(PoolChunks, "start", lambda _: None)  # on demand alone
    monkeypatch.setattr("kvcache.connectors.slots_aside.RETRY_SECONDS", 1e9)
    with rig(lambda s: CpuConnector(s.geometry, pages=s.pages), Setup()) as r:
        assert r.store(chain("a", 4)) == chain("a", 4)
        monkeypatch.setattr(host_memory, "available", lambda: (10, "somebody"))
        result = r.run(r.planned(chain("b", 2)))
        assert result.error == "NoSpace: 2 of 2 pages: somebody leaves 10 bytes"
        assert not result.ok.any()
        r.scheduler.check()
        assert r.store(chain("c", 2)) == chain("c", 2)
        assert r.visible(chain("a", 4)) == [1, 1, 0, 0]
        stats = r.scheduler.stats()
        assert (stats.errors, stats.pinned_pages) == ({"NoSpace": 1}, 0)
        monkeypatch.undo()
        r.scheduler._aside._until = 1e-9  # type: ignore[attr-defined]
        assert r.store(chain("b", 2)) == chain("b", 2)
        assert r.visible(chain("a", 2)) == [1, 1]


def test_slots_that_have_memory_are_used_though_others_found_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(PoolChunks, "start", lambda _: None)  # on demand alone
    monkeypatch.setattr("kvcache.connectors.slots_aside.RETRY_SECONDS", 1e9)
    with rig(lambda s: CpuConnector(s.geometry, pages=s.pages), Setup()) as r:
        worker: Any = r.worker
        assert r.store(chain("a", 4)) == chain("a", 4)
        assert worker.chunks.ensure(0, np.array([7], np.int32))[0].all()
        monkeypatch.setattr(host_memory, "available", lambda: (10, "somebody"))
        assert r.run(r.planned(chain("b", 2))).error.startswith("NoSpace: 2 of 2 pages")
        r.scheduler.check()
        assert r.store(chain("c", 1)) == chain("c", 1)
        assert r.visible([*chain("a", 4), *chain("c", 1)]) == [1] * 5
        assert r.store(chain("d", 1)) == chain("d", 1)
        assert sum(r.visible([*chain("a", 4), *chain("c", 1)])) == 4  # in place of one


@pytest.mark.parametrize("over", [False, True])
def test_statistics_tell_how_much_is_ready_and_why_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    """Of a tier alone, and over a disk."""

    def made(setup: Setup) -> Connector:
        return host_over_disk(setup, tmp_path) if over else cpu(setup)

    sizes = [group.page_bytes for group in Setup().geometry.groups]
    whole = sum(size * count for size, count in zip(sizes, Setup().pages, strict=True))
    for left in (1 << 40, 10):
        connector = made(Setup())
        monkeypatch.setattr(host_memory, "available", lambda left=left: (left, "somebody"))
        with rig(lambda _, connector=connector: connector) as r:
            upper: Any = tiers(r)[0] if over else connector
            assert upper.worker.chunks.wait(PATIENCE)
            stats = r.scheduler.stats()
            assert stats.ready_bytes == (whole if left > whole else 0)
            assert stats.not_ready == ("" if left > whole else "somebody leaves 10 bytes")
        monkeypatch.undo()


def test_memory_that_is_lent_beyond_the_end_of_its_worker_is_made_ready_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_chunks, "CHUNK_BYTES", 1)
    memory, pool = Memory(), HostPool([64], [16], setting="x")
    pool.chunks = PoolChunks(pool.regions, memory)
    worker = CpuWorker(pool, groups=["a"], queue_depth=4, batch_bytes=64, copy=native_copy)
    give_back = worker.lend_slots()
    memory.gate.clear()
    pages = np.zeros((2, 64), np.uint8)
    worker.register([region(pages)])
    assert memory.entered.acquire(timeout=PATIENCE)
    assert worker.close(PATIENCE)
    memory.gate.set()
    assert pool.chunks.wait(PATIENCE)
    assert len(memory.ready) == 1
    give_back()
    with pytest.raises(MisuseError, match="the memory was let go"):
        worker.lend_slots()
