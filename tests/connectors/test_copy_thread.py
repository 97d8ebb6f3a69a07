"""The CPU connector's worker and its copy thread; what the contract suite does not know."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers import fork_process
from tiers.late import pass_deadlines
from tiers.pieces import PATIENCE, finals, one_group, transfer, worker_of

from kvcache.connectors.base import (
    Direction,
    PageRegion,
)
from kvcache.connectors.cpu import CpuConnector, native_copy
from kvcache.connectors.settings import require_regions
from kvcache.connectors.testing import Gate
from kvcache.core.errors import ConfigError, MisuseError

GEOMETRY = one_group(64)


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ([], "0 regions"),
        (
            [PageRegion(4096, 63, 4)],
            "region of group 'a' has 4 pages of 63 bytes.* pages of 64 bytes",
        ),
        ([PageRegion(4096, 64, 0)], "0 pages"),
        ([PageRegion(0, 64, 4)], "address 0"),
        ([PageRegion(4096, 64, 4, 32)], "32 apart.* 64 or more apart.*arena_regions"),
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


def test_parts_that_have_no_address_are_named() -> None:
    region = PageRegion(0, 64, 4, parts=((4096,), (0,)))
    with pytest.raises(ConfigError, match=r"32 apart, at 2 parts, at .*4096.* none of them at 0"):
        require_regions(["a"], [64], [region], parts=True)


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


def test_a_deadline_is_noticed_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a late transfer is not copied; what was copied counts."""
    gate = Gate()

    def copy(*args: Any) -> None:
        gate()
        native_copy(*args)

    with worker_of(copy, queue_depth=1) as worker:
        gate.shut()
        assert worker.submit(transfer(1, Direction.STORE, [0, 1, 2], [0, 1, 2]))
        gate.wait_reached()
        pass_deadlines(monkeypatch)
        assert worker.wait(PATIENCE)
        (late,) = worker.poll()
        assert late.late
        assert late.ok.tolist() == [0, 0, 0]
        assert not worker.submit(transfer(2, Direction.STORE, [3], [3]))  # it still has its place
        gate.open()
        (final,) = finals(worker, 1)
        assert not final.late
        assert final.ok.tolist() == [1, 0, 0]
        assert final.error.startswith(f"Deadline: {PATIENCE} s passed after 1 of 3 batches")
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
        gone.join(PATIENCE)
        assert not gone.is_alive()
        worker._thread._thread = gone
        (lost,) = worker.poll()
        assert lost.error.startswith("ThreadDied: the copy thread is gone")
        assert worker.submit(transfer(2, Direction.STORE, [0], [0]))
        assert worker.poll()[0].error.startswith("ThreadDied")
        worker._thread._thread = real
        gate.open()


def test_a_forked_child_can_close_what_it_has_no_thread_of() -> None:
    """A lock that the thread held when the process was forked nobody would ever let go."""
    with worker_of() as worker:
        lock = worker._thread._changed
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                held.set()
                assert done.wait(PATIENCE)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(PATIENCE)
        child = os.fork()
        if not child:
            signal.alarm(int(PATIENCE))  # ends it if it hangs
            os._exit(0 if worker.close(1.0) else 3)
        _, status = os.waitpid(child, 0)
        done.set()
        holder.join(PATIENCE)
        assert os.waitstatus_to_exitcode(status) == 0
        assert worker.submit(transfer(1, Direction.STORE, [0], [0]))
        assert finals(worker, 1)[0].ok.tolist() == [1]


@pytest.mark.parametrize("when", ["before", "use", "after"])
def test_a_forked_child_that_ends_like_any_program_touches_nothing_of_its_parents(
    tmp_path: Path, when: str
) -> None:
    """Before `register` there is no thread to tell the two apart."""
    (tmp_path / "shared").mkdir(mode=0o700)
    command = [sys.executable, fork_process.__file__, str(tmp_path), when]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=4 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
