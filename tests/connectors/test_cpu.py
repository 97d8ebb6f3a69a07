"""The CPU connector: sizes, host pool, copy thread, index; what the contract suite does not know."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvcache.connectors.base import (
    KEYED_DTYPE,
    Direction,
    KeyedPages,
    PageRegion,
    RequestKeys,
    Transfer,
    TransferResult,
)
from kvcache.connectors.cpu import CpuConnector, CpuWorker, native_copy, split_bytes
from kvcache.connectors.host_pool import HostPool, available_memory
from kvcache.connectors.pool_scheduler import MAX_ERROR_KINDS, PoolScheduler
from kvcache.connectors.testing import Gate, Key, RandomRun, Setup, chain, rig
from kvcache.core.errors import ConfigError, InvariantError, MisuseError
from kvcache.core.hashing import NATIVE_NAMESPACE
from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention, RecurrentState

PATIENCE = 30.0


def cpu(setup: Setup, **options: Any) -> CpuConnector:
    return CpuConnector(
        setup.geometry,
        pages=setup.pages,
        queue_depth=setup.queue_depth,
        deadline_seconds=setup.deadline_seconds,
        **options,
    )


def one_group(page_bytes: int, block_tokens: int = 1) -> Geometry:
    group = FullAttention(
        name="a",
        layers=1,
        kv_heads=1,
        head_dim=page_bytes // 2 // block_tokens,
        block_tokens=block_tokens,
        element_bytes=1,
    )
    return Geometry((group,))


def region(memory: np.ndarray[Any, Any]) -> PageRegion:
    return PageRegion(memory.ctypes.data, memory.shape[1], memory.shape[0])


# ---- configuration -------------------------------------------------------------------------------

GEOMETRY = one_group(64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either capacity_bytes or pages"),
        ({"pages": [4], "capacity_bytes": 1000}, "either capacity_bytes or pages"),
        ({"capacity_bytes": 0}, "capacity_bytes is 0"),
        ({"capacity_bytes": -1}, "capacity_bytes is -1"),
        ({"capacity_bytes": 1.5}, "capacity_bytes is 1.5"),
        ({"capacity_bytes": 63}, "one page of each group takes 64 bytes"),
        ({"pages": [0]}, "gives group 'a' 0 slots"),
        ({"pages": [-3]}, "gives group 'a' -3 slots"),
        ({"pages": [True]}, "gives group 'a' True slots"),
        ({"pages": [2**31]}, "slots: it must be"),
        ({"pages": [4, 4]}, "2 numbers for 1 groups"),
        ({"pages": [4], "queue_depth": 0}, "queue_depth is 0"),
        ({"pages": [4], "batch_bytes": 0}, "batch_bytes is 0"),
        ({"pages": [4], "deadline_seconds": 0.0}, "deadline_seconds is 0.0"),
        ({"pages": [4], "deadline_seconds": -1.0}, "deadline_seconds is -1.0"),
        ({"pages": [4], "deadline_seconds": float("inf")}, "deadline_seconds is inf"),
        ({"pages": [4], "deadline_seconds": float("nan")}, "deadline_seconds is nan"),
        ({"capacity_bytes": 999, "state_interval_tokens": 0}, "state_interval_tokens is 0"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CpuConnector(GEOMETRY, **options)


def test_more_memory_than_there_is_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"CpuConnector.capacity_bytes asks for \d+ bytes .* GiB"):
        CpuConnector(one_group(1 << 20), capacity_bytes=1 << 50)
    with pytest.raises(ConfigError, match=r"lower CpuConnector.pages"):
        CpuConnector(one_group(1 << 20), pages=[2**30])


def fake_system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    root = fake_system(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n",
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": "3000000\n",
            "sys/fs/cgroup/a/memory.current": "2500000\n",
            "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 700000\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": "100\n",
        },
    )
    available, limit = available_memory(root)
    assert available == 3_000_000 - (2_500_000 - 700_000)
    assert limit.endswith("sys/fs/cgroup/a")


def test_an_old_style_control_group_is_read_too(tmp_path: Path) -> None:
    root = fake_system(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable:    4000 kB\n",
            "proc/self/cgroup": "5:cpu,memory:/job\n4:cpuset:/x\n0::/\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1000\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1500\n",
        },
    )
    assert available_memory(root) == (
        0,
        f"the memory limit of control group {root}/sys/fs/cgroup/memory/job",
    )


def test_without_limits_only_the_machine_counts(tmp_path: Path) -> None:
    root = fake_system(tmp_path, {"proc/meminfo": "MemAvailable: 7 kB\n"})
    assert available_memory(root) == (7 * 1024, "the machine's available memory")
    assert available_memory()[0] > 0


@given(
    capacity=st.integers(1, 10**9),
    blocks=st.lists(st.sampled_from((1, 16, 48)), min_size=1, max_size=3),
    interval=st.sampled_from((1, 128, 1000)),
)
def test_a_budget_is_split_by_tokens_and_never_exceeded(
    capacity: int, blocks: list[int], interval: int
) -> None:
    groups = [
        FullAttention(name=f"g{i}", layers=1, kv_heads=1, head_dim=3 + i, block_tokens=b)
        for i, b in enumerate(blocks)
    ]
    geometry = Geometry((*groups, RecurrentState(name="s", layers=1, state_bytes_per_layer=777)))
    least = sum(g.page_bytes for g in geometry.groups)
    if capacity < least:
        with pytest.raises(ConfigError, match="one page of each group"):
            split_bytes(geometry, capacity, state_interval_tokens=interval)
        return
    pages = split_bytes(geometry, capacity, state_interval_tokens=interval)
    assert min(pages) >= 1
    assert geometry.pool_bytes(pages) <= capacity
    spans = [*blocks, interval]
    tokens = [(n - 1) * span for n, span in zip(pages, spans, strict=True)]
    assert max(tokens) - min(tokens) <= max(spans)
    # Nothing much is left over: one more page of each group would not fit.
    assert geometry.pool_bytes([n + 1 for n in pages]) > capacity


# ---- host pool -----------------------------------------------------------------------------------


def test_the_pool_is_exactly_as_large_as_its_slots() -> None:
    pool = HostPool([999, 4096], [5, 3], setting="x")
    assert pool.mapped_bytes == 5 * 999 + 3 * 4096
    assert [(r.page_bytes, r.pages) for r in pool.regions] == [(999, 5), (4096, 3)]
    maps = Path("/proc/self/maps").read_text()
    for r in pool.regions:
        start = f"{r.address:x}-"
        assert start in maps or ctypes.string_at(r.address, r.page_bytes * r.pages)
        ctypes.memset(r.address, 7, r.page_bytes * r.pages)
    pool.close()
    pool.close()


def test_memory_is_unmapped_when_the_connector_closes_and_not_before() -> None:
    closed = threading.Event()

    class Pool(HostPool):
        def close(self) -> None:
            super().close()
            closed.set()

    gate = Gate()

    def copy(*args: Any) -> None:
        gate()
        assert not closed.is_set()
        native_copy(*args)

    worker = CpuWorker(Pool([64], [4], setting="x"), queue_depth=2, batch_bytes=1, copy=copy)
    memory = np.zeros((4, 64), np.uint8)
    worker.register([region(memory)])
    gate.shut()
    assert worker.submit(transfer(1, Direction.STORE, [0, 1], [2, 3]))
    gate.wait_reached()
    worker.close(0.01)
    assert not closed.is_set()
    gate.open()
    assert worker.wait(PATIENCE)
    (result,) = worker.poll()
    assert result.error.startswith("Closed")
    assert result.ok.tolist() == [1, 0]  # the batch that ran is good, the next one did not start
    worker.close(PATIENCE)
    assert closed.is_set()


def test_a_worker_that_was_never_registered_closes() -> None:
    connector = CpuConnector(GEOMETRY, pages=[4])
    connector.worker.close()
    connector.worker.close()
    with pytest.raises(MisuseError, match="after close"):
        connector.worker.register([PageRegion(64, 64, 1)])


def test_a_connector_that_is_dropped_ends_its_thread() -> None:
    connector = CpuConnector(GEOMETRY, pages=[4])
    memory = np.zeros((4, 64), np.uint8)
    connector.worker.register([region(memory)])
    threads = [t for t in threading.enumerate() if t.name == "kvcache-copy"]
    assert threads
    gone = weakref.ref(connector.worker)
    del connector
    gc.collect()
    assert gone() is None
    threads[-1].join(PATIENCE)
    assert not threads[-1].is_alive()


EXIT = """
import numpy as np, sys, threading
from kvcache.connectors.base import Direction, PageRegion, Transfer
from kvcache.connectors.cpu import CpuConnector, native_copy
from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention
group = FullAttention(name="a", layers=64, kv_heads=8, head_dim=64, block_tokens=16)
memory = np.ones((64, group.page_bytes), np.uint8)
begun = threading.Event()
def copy(*args):
    begun.set()
    native_copy(*args)
connector = CpuConnector(Geometry((group,)), pages=[64], batch_bytes=1, copy=copy)
connector.worker.register([PageRegion(memory.ctypes.data, group.page_bytes, 64)])
ids = np.arange(64)
store = Transfer(1, Direction.STORE, np.zeros(64, np.int32), ids.astype(np.int32), ids, 60.0)
assert connector.worker.submit(store)
begun.wait(30)
"""


def test_an_interpreter_that_exits_in_the_middle_of_a_copy_exits_cleanly() -> None:
    """Nobody called close: the thread is stopped before the memory goes."""
    done = subprocess.run(
        [sys.executable, "-c", EXIT], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- worker --------------------------------------------------------------------------------------


def transfer(
    number: int,
    direction: Direction,
    pages: list[int],
    slots: list[int],
    deadline: float = PATIENCE,
) -> Transfer:
    return Transfer(
        number,
        direction,
        np.zeros(len(pages), np.int32),
        np.array(pages, np.int32),
        np.array(slots, np.int64),
        deadline,
    )


@contextmanager
def worker_of(
    copy: Callable[..., None] = native_copy, *, queue_depth: int = 4, batch_bytes: int = 64
) -> Iterator[CpuWorker]:
    """One group of 64-byte pages; with the default batch size each page is a batch."""
    pool = HostPool([64], [16], setting="x")
    worker = CpuWorker(pool, queue_depth=queue_depth, batch_bytes=batch_bytes, copy=copy)
    memory = np.random.default_rng(0).integers(0, 256, (16, 64), dtype=np.uint8)
    worker.register([region(memory)])
    worker.memory = memory  # type: ignore[attr-defined]
    try:
        yield worker
    finally:
        worker.close(PATIENCE)


def finals(worker: CpuWorker, count: int) -> list[TransferResult]:
    results: list[TransferResult] = []
    while sum(not r.late for r in results) < count:
        assert worker.wait(PATIENCE), results
        results += worker.poll()
    return results


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ([], "0 regions"),
        ([PageRegion(4096, 63, 4)], "pages of 64 bytes"),
        ([PageRegion(4096, 64, 0)], "0 pages"),
        ([PageRegion(0, 64, 4)], "address 0"),
    ],
)
def test_regions_that_do_not_fit_the_geometry_are_refused(
    regions: list[PageRegion], message: str
) -> None:
    worker = CpuConnector(GEOMETRY, pages=[4]).worker
    with pytest.raises(ConfigError, match=message):
        worker.register(regions)
    with pytest.raises(MisuseError, match="before register"):
        worker.submit(transfer(1, Direction.LOAD, [0], [0]))
    worker.close()


def test_register_is_for_once() -> None:
    with worker_of() as worker, pytest.raises(MisuseError, match="twice"):
        worker.register([PageRegion(4096, 64, 4)])


def test_items_outside_pages_or_slots_fail_alone() -> None:
    with worker_of() as worker:
        bad = transfer(1, Direction.STORE, [0, 16, 2, -1, 4], [0, 1, 16, 3, -1])
        assert worker.submit(bad)
        (result,) = finals(worker, 1)
        assert result.ok.tolist() == [1, 0, 0, 0, 0]
        assert result.error.startswith("BadItem: 4 of 5")
        assert result.bytes == 64
        other_group = replace(bad, id=2, groups=np.array([1, -1, 0, 0, 0], np.int32))
        assert worker.submit(other_group)
        assert finals(worker, 1)[0].ok.tolist() == [0, 0, 0, 0, 0]


def test_two_items_with_one_destination_are_a_failure_not_a_race() -> None:
    with worker_of(batch_bytes=1 << 20) as worker:
        assert worker.submit(transfer(1, Direction.STORE, [0, 1], [5, 5]))
        (result,) = finals(worker, 1)
        assert result.ok.tolist() == [0, 0]
        assert result.error.startswith("ConfigError: destination page 5 is named twice")


def test_a_load_overtakes_a_long_store_between_two_batches() -> None:
    order: list[str] = []
    gate = Gate()

    def copy(source: PageRegion, target: PageRegion, *ids: Any) -> None:
        order.append("load" if target.address == device else "store")
        gate()
        native_copy(source, target, *ids)

    with worker_of(copy) as worker:
        device = worker.memory.ctypes.data  # type: ignore[attr-defined]
        gate.shut()
        assert worker.submit(transfer(1, Direction.STORE, [0, 1, 2], [0, 1, 2]))
        gate.wait_reached()
        assert worker.submit(transfer(2, Direction.STORE, [3], [3]))
        assert worker.submit(transfer(3, Direction.LOAD, [8, 9], [8, 9]))
        gate.open()
        results = finals(worker, 3)
    assert order == ["store", "load", "load", "store", "store", "store"]
    assert [r.id for r in results] == [3, 1, 2]
    assert all(r.ok.all() for r in results)


def test_a_deadline_is_noticed_between_batches() -> None:
    """The rest of a late transfer is not copied; what was copied counts."""
    gate = Gate()

    def copy(*args: Any) -> None:
        gate()
        native_copy(*args)

    with worker_of(copy, queue_depth=1) as worker:
        gate.shut()
        assert worker.submit(transfer(1, Direction.STORE, [0, 1, 2], [0, 1, 2], deadline=0.02))
        assert worker.wait(PATIENCE)
        (late,) = worker.poll()
        assert late.late
        assert late.ok.tolist() == [0, 0, 0]
        assert not worker.submit(transfer(2, Direction.STORE, [3], [3]))  # it still has its place
        gate.open()
        (final,) = finals(worker, 1)
        assert not final.late
        assert final.ok.tolist() == [1, 0, 0]
        assert final.error.startswith("Deadline: 0.02 s passed after 1 of 3 batches")
        assert worker.submit(transfer(3, Direction.STORE, [3], [3]))
        finals(worker, 1)


def test_unpolled_results_count_against_the_queue() -> None:
    """So that a caller who never polls is refused, and memory stays bounded."""
    with worker_of(queue_depth=2) as worker:
        assert worker.submit(transfer(1, Direction.STORE, [0], [0]))
        assert worker.submit(transfer(2, Direction.STORE, [1], [1]))
        assert worker.wait(PATIENCE)
        assert not worker.submit(transfer(3, Direction.STORE, [2], [2]))
        assert worker.submit(transfer(4, Direction.LOAD, [2], [2]))
        finals(worker, 3)
        assert worker.submit(transfer(5, Direction.STORE, [2], [2]))
        finals(worker, 1)


def test_waiting_ends_with_its_timeout_when_nothing_comes() -> None:
    with worker_of() as worker:
        assert not worker.wait(0.0)
        assert not worker.wait(0.001)
        assert worker.poll() == []


def test_an_empty_transfer_ends() -> None:
    with worker_of() as worker:
        assert worker.submit(transfer(1, Direction.STORE, [], []))
        (result,) = finals(worker, 1)
        assert (result.ok.tolist(), result.error) == ([], "")


def test_a_failed_batch_ends_its_transfer_and_keeps_what_was_copied() -> None:
    calls: list[int] = []

    def copy(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("torn")
        native_copy(*args)

    with worker_of(copy) as worker:
        assert worker.submit(transfer(1, Direction.STORE, [0, 1, 2], [0, 1, 2]))
        assert worker.submit(transfer(2, Direction.STORE, [4], [4]))
        first, second = finals(worker, 2)
        assert first.ok.tolist() == [1, 0, 0]
        assert first.error == "ValueError: torn"
        assert second.ok.tolist() == [1]


@pytest.mark.parametrize("death", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_dead_thread_fails_transfers_and_never_hangs(death: type[BaseException]) -> None:
    gate = Gate()

    def copy(*_: Any) -> None:
        gate()
        raise death("killed")

    with worker_of(copy) as worker:
        gate.shut()
        assert worker.submit(transfer(1, Direction.STORE, [0], [0]))
        gate.wait_reached()
        assert worker.submit(transfer(2, Direction.LOAD, [1], [1]))
        gate.open()
        results = finals(worker, 2)
        assert {r.id for r in results} == {1, 2}
        assert not any(r.ok.any() for r in results)
        assert all(
            r.error.startswith(f"ThreadDied: the copy thread ended by {death.__name__}")
            for r in results
        )
        assert worker.submit(transfer(3, Direction.LOAD, [1], [1]))
        (after,) = finals(worker, 1)
        assert after.error.startswith("ThreadDied")
        assert not after.ok.any()


def test_a_thread_that_is_killed_from_outside_fails_transfers() -> None:
    """By an exception that the interpreter throws into it."""
    with worker_of() as worker:
        thread = [t for t in threading.enumerate() if t.name == "kvcache-copy"][-1]
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
        )
        # It is thrown when the thread next runs Python code: the transfer wakes it.
        assert worker.submit(transfer(1, Direction.STORE, [0], [0]))
        (result,) = finals(worker, 1)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert worker.submit(transfer(2, Direction.STORE, [0], [0]))
        (after,) = finals(worker, 1)
        assert after.error.startswith("ThreadDied")
        assert result.error.startswith("ThreadDied") or result.ok.all()


def test_a_thread_that_is_gone_without_a_word_is_noticed() -> None:
    """As in a forked child, which has the queues but not the thread."""
    gate = Gate()

    def copy(*args: Any) -> None:
        gate()
        native_copy(*args)

    with worker_of(copy) as worker:
        gate.shut()
        assert worker.submit(transfer(1, Direction.STORE, [0], [0]))
        gate.wait_reached()
        real, gone = worker._thread._thread, threading.Thread(target=lambda: None)
        gone.start()
        gone.join()
        worker._thread._thread = gone
        (lost,) = worker.poll()
        assert lost.error.startswith("ThreadDied: the copy thread is gone")
        assert worker.submit(transfer(2, Direction.STORE, [0], [0]))
        assert worker.poll()[0].error.startswith("ThreadDied")
        worker._thread._thread = real
        gate.open()


# ---- scheduler -----------------------------------------------------------------------------------


def request_keys(request: int, *rows: int) -> RequestKeys:
    """Digests that are numbers."""
    digests = [
        np.frombuffer(b"".join(i.to_bytes(32, "little") for i in range(n)), np.uint8).reshape(
            -1, 32
        )
        for n in rows
    ]
    return RequestKeys(request, NATIVE_NAMESPACE, digests)


def test_a_repeated_lookup_does_not_ask_the_index() -> None:
    """At 1M tokens: the second answer is the first, not a new one."""
    connector = CpuConnector(GEOMETRY, pages=[70_000])
    keys = request_keys(1, 62_500)
    first = connector.scheduler.lookup(keys)
    second = connector.scheduler.lookup(keys)
    assert first is not None
    assert second is not None
    assert first[0] is second[0]
    assert not first[0].flags.writeable
    connector.worker.close()


def test_after_a_change_the_index_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    renew = PoolScheduler._renew

    def counted(self: PoolScheduler, promise: Any, keys: RequestKeys, versions: Any) -> None:
        asked.append(keys.request)
        renew(self, promise, keys, versions)

    monkeypatch.setattr(PoolScheduler, "_renew", counted)
    with rig(cpu) as r:
        keys = chain("a", 3)
        r.lookup(1, keys)
        r.store(chain("b", 1))
        for _ in range(3):
            r.lookup(1, keys)
        assert asked == [1]
        r.scheduler.release(1)


def test_a_longer_chain_is_looked_up_anew() -> None:
    with rig(cpu) as r:
        keys = chain("a", 6)
        r.store(keys)
        assert r.lookup(1, keys[:3]) == [1, 1, 1]
        assert r.lookup(1, keys) == [1] * 6
        assert r.pinned() == 6
        assert r.lookup(1, keys[:1]) == [1]
        assert r.pinned() == 1
        r.scheduler.release(1)


def test_digests_are_read_in_place_from_any_stride() -> None:
    with rig(cpu) as r:
        keys = chain("a", 5)
        r.store(keys[1::2])
        spread = r.request_keys(1, keys).digests[0]
        strided = RequestKeys(1, NATIVE_NAMESPACE, [spread[1::2], spread[:0]])
        assert not strided.digests[0].flags.c_contiguous
        flags = r.scheduler.lookup(strided)
        assert flags is not None
        assert flags[0].tolist() == [1, 1]
        r.scheduler.release(1)


def test_a_lookup_of_other_groups_is_refused() -> None:
    connector = CpuConnector(GEOMETRY, pages=[4])
    with pytest.raises(ConfigError, match="keys of 2 groups: this tier has 1"):
        connector.scheduler.lookup(request_keys(1, 2, 2))
    connector.worker.close()


def test_kinds_of_errors_are_bounded() -> None:
    with rig(cpu, pages=MAX_ERROR_KINDS + 5) as r:
        for i in range(MAX_ERROR_KINDS + 5):
            planned = r.planned([Key("a")])
            none = np.zeros(1, np.uint8)
            r.scheduler.complete(
                TransferResult(planned.id, Direction.STORE, none, error=f"Kind{i}: text")
            )
        errors = r.scheduler.stats().errors
        assert len(errors) == MAX_ERROR_KINDS + 1
        assert errors["other"] == 5


def test_check_notices_a_slot_that_nobody_knows_of() -> None:
    connector = CpuConnector(GEOMETRY, pages=[4])
    scheduler = connector.scheduler
    scheduler.check()
    scheduler._pools[0].take(1)  # type: ignore[attr-defined]
    with pytest.raises(InvariantError, match="1 slots are held, lookups and transfers know of 0"):
        scheduler.check()
    connector.worker.close()


def test_an_empty_store_is_no_transfer() -> None:
    connector = CpuConnector(GEOMETRY, pages=[4])
    nothing = KeyedPages(np.zeros(0, KEYED_DTYPE), [NATIVE_NAMESPACE])
    assert connector.scheduler.plan_store(nothing) is None
    connector.worker.close()


# ---- both sides, at random -----------------------------------------------------------------------


@settings(max_examples=12, stateful_step_count=40)
class CpuMachine(RuleBasedStateMachine):
    """The operations of `RandomRun`, in the order that hypothesis finds worth trying."""

    @initialize(seed=st.integers(0, 1000))
    def start(self, seed: int) -> None:
        self.run = RandomRun(cpu, seed)

    @rule()
    def look_up(self) -> None:
        self.run.look_up()

    @rule()
    def load(self) -> None:
        self.run.load()

    @rule()
    def store(self) -> None:
        self.run.store()

    @rule()
    def release(self) -> None:
        self.run.release()

    @rule()
    def deliver(self) -> None:
        self.run.deliver()

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.finish()


TestCpuMachine = CpuMachine.TestCase


def test_a_random_run_is_the_same_for_the_same_seed() -> None:
    def play() -> tuple[Any, ...]:
        run = RandomRun(cpu, 5)
        for _ in range(300):
            run.step()
        stats = run.rig.scheduler.stats()
        run.finish()
        return replace(stats, store_seconds=0.0, load_seconds=0.0), run.random.random()

    assert play() == play()
