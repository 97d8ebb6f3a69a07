"""The CPU connector: sizes and host memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tiers.pieces import PATIENCE, one_group, region, transfer

from kvcache.connectors import cpu, settings
from kvcache.connectors.base import (
    Direction,
    PageRegion,
)
from kvcache.connectors.cpu import CpuConnector, CpuWorker, native_copy
from kvcache.connectors.host_pool import HostPool
from kvcache.connectors.settings import split_bytes
from kvcache.connectors.testing import Gate, chain, rig
from kvcache.core.errors import ConfigError, MisuseError
from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention, RecurrentState

GEOMETRY = one_group(64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either capacity_bytes or pages"),
        ({"pages": [4], "capacity_bytes": 1000}, "either capacity_bytes or pages"),
        ({"capacity_bytes": 0}, "capacity_bytes is 0"),
        ({"capacity_bytes": -1}, "capacity_bytes is -1"),
        ({"pages": [4], "threads": 0}, "CpuConnector.threads is 0"),
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


@pytest.mark.parametrize("threads", [1, 2, 999])
def test_pages_are_copied_by_the_threads_that_were_given(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by no more than this process may run at a time."""
    used = []

    def copy(*args: Any, threads: int) -> None:
        used.append(threads)
        native_copy(*args, threads=threads)

    monkeypatch.setattr(cpu, "native_copy", copy)
    monkeypatch.setattr(settings, "cores", lambda: 3)
    with rig(lambda s: CpuConnector(s.geometry, pages=s.pages, threads=threads)) as r:
        keys = chain("a", 5)
        r.store(keys)
        r.lookup(1, keys)
        assert all(r.load(1, keys))
    assert set(used) == {min(threads, 3)}


def test_more_memory_than_there_is_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"CpuConnector.capacity_bytes asks for \d+ bytes .* GiB"):
        CpuConnector(one_group(1 << 20), capacity_bytes=1 << 50)
    with pytest.raises(ConfigError, match=r"lower CpuConnector.pages"):
        CpuConnector(one_group(1 << 20), pages=[2**30])


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

    worker = CpuWorker(
        Pool([64], [4], setting="x"), groups=["a"], queue_depth=2, batch_bytes=1, copy=copy
    )
    memory = np.zeros((4, 64), np.uint8)
    worker.register([region(memory)])
    gate.shut()
    assert worker.submit(transfer(1, Direction.STORE, [0, 1], [2, 3]))
    gate.wait_reached()
    assert not worker.close(0.01)
    assert not closed.is_set()
    assert worker._closing.alive  # the interpreter's exit would wait for the copy
    gate.open()
    assert worker.wait(PATIENCE)
    (result,) = worker.poll()
    assert result.error.startswith("Closed")
    assert result.ok.tolist() == [1, 0]  # the batch that ran is good, the next one did not start
    assert worker.close(PATIENCE)
    assert closed.is_set()
    assert not worker._closing.alive


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
