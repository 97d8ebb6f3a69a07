"""The mapping of a pool: exact, placed, of which pages, locked; and refused by its limits in numbers."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiers.memory_maps import flags_of, policy_of
from tiers.pieces import PATIENCE, one_group

from kvcache.connectors import host_pool
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.host_pool import HostPool
from kvcache.core import host_limits, host_memory
from kvcache.core.errors import ConfigError
from kvcache.core.host_limits import (
    free_huge_pages,
    lockable_bytes,
    node_free_bytes,
    numa_nodes,
    require_node,
)


def prepared(**options: Any) -> HostPool:
    pool = HostPool([1 << 20], [8], setting="x", **options)
    pool.chunks.start()
    assert pool.chunks.wait(PATIENCE)
    assert pool.chunks.error == ""
    return pool


def test_the_mapping_is_as_large_as_its_slots() -> None:
    pool = HostPool([999, 4096], [5, 3], setting="x")
    assert pool.mapped_bytes == 8192 + 3 * 4096
    assert [(r.page_bytes, r.pages) for r in pool.regions] == [(999, 5), (4096, 3)]
    for r in pool.regions:
        ctypes.memset(r.address, 7, r.page_bytes * r.pages)
    pool.close()
    pool.close()


def test_a_pool_has_below_one_percent_beside_its_pages() -> None:
    """Rounding, and the index at its fullest: 64 bytes a page and 4 a key (csrc/page.h, key_index.h)."""
    page_bytes, slots = 16 << 10, 20_000
    pool = HostPool([page_bytes], [slots], setting="x")
    assert pool.mapped_bytes - page_bytes * slots < 4096
    pool.close()
    done = subprocess.run(
        [sys.executable, "-c", FILLED, str(slots)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 60 * slots < int(done.stdout) < 0.01 * page_bytes * slots


FILLED = """
import resource, sys
from pathlib import Path
import numpy as np
from kvcache.core.pool import PagePool
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
slots = int(sys.argv[1])
PagePool(1).take(1)
keys = np.random.default_rng(0).integers(0, 256, (slots, 32), dtype=np.uint8)
pages = np.zeros(slots, np.int32)
published = np.ones(slots, np.uint8)
before = resident()
pool = PagePool(slots)
pages[:] = pool.take(slots)
published[:] = pool.publish(0, keys, pages)
print(resident() - before)
"""
"""What a full pool of so many pages takes in memory, in a process of its own."""


# ---- placement -----------------------------------------------------------------------------------


def test_memory_prefers_the_node_that_was_given() -> None:
    """This machine may have one node alone: the kernel's note of the policy is what can be seen."""
    pool = prepared(numa_node=numa_nodes()[0])
    line = policy_of(pool.address)
    assert f"prefer:{numa_nodes()[0]}" in line or "prefer (many):0" in line
    assert f"N{numa_nodes()[0]}=" in line
    pool.close()
    plain = prepared()
    assert policy_of(plain.address).split()[1] == "default"
    plain.close()


def test_a_node_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"CpuConnector.numa_node is 77: .* has the NUMA nodes 0"):
        CpuConnector(one_group(64), pages=[4], numa_node=77)


def test_nodes_and_their_memory_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "sys/devices/system/node"
    (folder / "node2").mkdir(parents=True)
    (folder / "online").write_text("0-2,5\n")
    (folder / "node2/meminfo").write_text(
        "Node 2 MemTotal:  99 kB\nNode 2 MemFree:  1 kB\nNode 2 Inactive(file):  1 kB\n"
        "Node 2 Active(file):  2 kB\nNode 2 SReclaimable:  1 kB\nNode 2 Active:  9 kB\nNode 2 X\n"
    )
    assert numa_nodes(tmp_path) == [0, 1, 2, 5]
    assert node_free_bytes(2, tmp_path) == 5 * 1024
    assert node_free_bytes(0, tmp_path) is None
    require_node("n", 2, 5 * 1024, tmp_path)
    with pytest.raises(
        ConfigError, match=r"n is 2, which has 5120 bytes .* for a pool of 5121 bytes"
    ):
        require_node("n", 2, 5 * 1024 + 1, tmp_path)
    assert numa_nodes(tmp_path / "nothing") == [0]


# ---- huge pages ----------------------------------------------------------------------------------


def test_transparent_huge_pages_are_asked_for_where_none_are_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_pool, "free_huge_pages", lambda: 3)  # four are needed
    pool = prepared()
    assert pool.huge_pages == "transparent"
    assert "hg" in flags_of(pool.address)
    pool.close()
    pool = prepared(huge_pages=False)
    assert pool.huge_pages == "none"
    assert "hg" not in flags_of(pool.address)
    pool.close()


def test_where_others_took_the_reserved_huge_pages_it_is_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the look and the mapping: an error only for who must have them."""
    monkeypatch.setattr(host_pool, "free_huge_pages", lambda: 1 << 30)
    if free_huge_pages() >= 4:
        pytest.skip("huge pages are reserved here")
    pool = prepared()
    assert pool.huge_pages == "transparent"
    assert pool.mapped_bytes == 8 << 20
    pool.close()
    message = r"x: the system refused 8388608 bytes .*in huge pages .*nr_hugepages"
    with pytest.raises(ConfigError, match=message):
        HostPool([1 << 20], [8], setting="x", huge_pages=True)
    monkeypatch.setattr(host_memory, "available", lambda: (1 << 20, "somebody"))
    with pytest.raises(ConfigError, match="somebody leaves 1048576 bytes"):
        prepared()


def test_what_is_mapped_is_told_with_what_was_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """To whole huge pages; where none are reserved here, as if they were."""
    if free_huge_pages() < 2:
        monkeypatch.setattr(host_pool, "free_huge_pages", lambda: 2)
        monkeypatch.setattr(host_pool, "_MAP_HUGETLB", 0)
    pool = HostPool([4096], [513], setting="x")
    assert pool.huge_pages == "reserved"
    assert pool.mapped_bytes == 4 << 20
    pool.close()


def test_reserved_huge_pages_are_wanted_and_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "free_huge_pages", lambda: 3)
    message = (
        r"x asks for 8388608 bytes .* in huge pages, 4 of 2 MiB, but 3 are reserved .*nr_hugepages"
    )
    with pytest.raises(ConfigError, match=message):
        HostPool([1 << 20], [8], setting="x", huge_pages=True)


def test_reserved_huge_pages_are_taken_where_there_are_enough() -> None:
    if free_huge_pages() < 4:
        pytest.skip("no huge pages are reserved here: sysctl vm.nr_hugepages=8")
    pool = prepared()
    assert pool.huge_pages == "reserved"
    assert "ht" in flags_of(pool.address)
    pool.close()


def test_promised_huge_pages_are_not_free(tmp_path: Path) -> None:
    folder = tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB"
    folder.mkdir(parents=True)
    (folder / "free_hugepages").write_text("7\n")
    (folder / "resv_hugepages").write_text("3\n")
    assert free_huge_pages(tmp_path) == 4
    assert free_huge_pages(tmp_path / "nothing") == 0


# ---- forked children ------------------------------------------------------------------------------


def test_a_child_does_not_get_the_pool() -> None:
    """Else its parent would copy each page that it writes while the child lives."""
    pool = prepared()
    assert "dc" in flags_of(pool.address)  # "do not copy area on fork"
    pool.close()


# ---- locked memory -------------------------------------------------------------------------------


def test_a_locked_pool_stays_in_memory() -> None:
    room = lockable_bytes()
    if room is not None and room < 9 << 20:
        pytest.skip(f"RLIMIT_MEMLOCK leaves {room} bytes")
    pool = prepared(lock=True)
    assert "lo" in flags_of(pool.address)
    pool.close()


def test_a_lock_beyond_the_limit_is_refused_with_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status = tmp_path / "proc/self/status"
    status.parent.mkdir(parents=True)
    status.write_text("VmLck:\t    8 kB\nCapEff:\t0000000000000000\n")
    monkeypatch.setattr(host_limits.resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    assert lockable_bytes(tmp_path) == 56 << 10
    status.write_text("VmLck:\t    8 kB\nCapEff:\t0000000000004000\n")  # CAP_IPC_LOCK
    assert lockable_bytes(tmp_path) is None
    monkeypatch.setattr(host_limits, "lockable_bytes", lambda: 56 << 10)
    message = (
        r"x asks for 8388608 bytes \(8.00 MiB\) of locked memory, but RLIMIT_MEMLOCK is 65536 bytes"
        r".*57344 bytes .*ulimit -l"
    )
    with pytest.raises(ConfigError, match=message):
        HostPool([1 << 20], [8], setting="x", lock=True)
