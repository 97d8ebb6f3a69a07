"""One tier with a manager and a driver around it, and requests that store and load all its pages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.arena_regions import arena_regions
from kvcache.connectors.base import Connector
from kvcache.connectors.chain import ChainConnector
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.disk import DiskConnector
from kvcache.connectors.driver import Offload
from kvcache.core.errors import ConfigError, InvariantError
from kvcache.core.hashing import Fingerprint
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.specs import FullAttention
from kvcache.retention import Dense

BLOCK_TOKENS = 16
PAGE_UNIT = 4096
"""Bytes of a page of one layer: 16 tokens of one head of 64 in 16 bits, K and V."""
DEADLINE_SECONDS = 300.0
ALIGNMENT = 4096


class Seconds(NamedTuple):
    """What one round took. The deciding side in CPU time of its thread: it waits for nothing."""

    plan_store: float
    """CPU of `end_of_step`: pins, the plan of the scheduler side, `submit`."""
    store: float
    """From its begin until `poll` has said that all is stored."""
    lookup: float
    """CPU of the first lookup of the request that loads."""
    plan_load: float
    """CPU of `start_load`: the plan of the scheduler side, `submit`."""
    load: float
    """From its begin until `poll` has said that all is on the device."""
    load_below: float | None
    """Chain: the same where only the lower tier has the pages."""


class Rig:
    """A tier, an arena, a manager, a driver; `pages` of `page_bytes`, one request's. `close` it.

    Args:
        spare: pages that the tier has room for beside.

    Raises:
        ConfigError: less memory or disk than that takes.
    """

    def __init__(
        self, tier: str, folder: Path, page_bytes: int, pages: int, seed: int, *, spare: int = 0
    ) -> None:
        self._pages, self._page_bytes, self._spare = pages, page_bytes, spare
        self._random = np.random.default_rng(seed)
        layers, rest = divmod(page_bytes, PAGE_UNIT)
        head_dim = page_bytes // (4 * BLOCK_TOKENS) if rest else 64
        group = FullAttention(
            name="kv", layers=max(1, layers), kv_heads=1, head_dim=head_dim,
            block_tokens=BLOCK_TOKENS,
        )  # fmt: skip
        self._geometry = Geometry((group,))
        slabs = self._geometry.slabs_needed((pages + 1) * BLOCK_TOKENS)
        count = slabs * self._geometry.pages_per_slab[0]
        stride = self._geometry.stride_bytes[0]
        self._arena = _aligned(count * stride)
        self._rows = self._arena.reshape(count, stride)[:, :page_bytes]
        name = Fingerprint(model="bench-offload", kv_dtype="bfloat16")
        self._chained = tier == "chain"
        connector = self._connector(tier, folder, name)
        self._manager = Manager(
            self._geometry, slabs=slabs, retention=Dense(), fingerprint=name, seed=seed
        )
        regions = arena_regions(self._geometry, address=self._arena.ctypes.data, slabs=slabs)
        self._offload = Offload(self._manager, connector, regions)

    def _connector(self, tier: str, folder: Path, name: Fingerprint) -> Connector:
        geometry, pages = self._geometry, self._pages + self._spare
        if tier == "host":
            return CpuConnector(geometry, pages=[pages])
        disk = DiskConnector(
            geometry, folder=folder, fingerprint=name, layout="whole", pages=[2 * pages]
        )
        if tier == "disk":
            return disk
        return ChainConnector(CpuConnector(geometry, pages=[pages]), disk)

    def round(self) -> Seconds:
        """Store fresh pages, forget them on the device, load them, compare every byte."""
        tokens, content = self._fresh(), self._content()
        plan_store, store = self._store(tokens, content)
        self._settle()
        lookup, plan_load, load = self._load(tokens, content)
        below = None
        if self._chained:
            self._store(self._fresh(), content[::-1])  # the upper tier has room for these alone
            self._settle()
            below = self._load(tokens, content)[2]
            self._settle()
        return Seconds(plan_store, store, lookup, plan_load, load, below)

    def lookups(
        self, tokens: int, times: int, *, beside_stores: int = 0
    ) -> list[tuple[float, float]]:
        """Seconds, and CPU seconds, of lookups of one request, all of it in the tier.

        Args:
            times: of them.
            beside_stores: further ones; before each, two pages of another request are stored.
        """
        prompt = self._fresh()
        self._store(prompt, self._content())
        self._manager.clear()
        request = self._manager.open(prompt[:tokens])
        seconds = []
        for turn in range(times + beside_stores):
            if turn >= times:
                self._store_others(2)
            begin, cpu = time.perf_counter(), time.thread_time()
            hit = self._offload.lookup(request)
            seconds.append((time.perf_counter() - begin, time.thread_time() - cpu))
            if hit is None or hit.hit_tokens < tokens - BLOCK_TOKENS:
                raise InvariantError(f"a prompt of {tokens} tokens is not in the tier: {hit}")
        self._offload.forget(request)
        self._manager.abort(request)
        return seconds

    def close(self) -> None:
        """End the tier."""
        self._offload.close()

    def _fresh(self) -> NDArray[np.int32]:
        """A prompt of all pages that nothing was stored for, and the token that is computed."""
        return self._random.integers(0, 2**31, self._pages * BLOCK_TOKENS + 1).astype(np.int32)

    def _content(self) -> NDArray[np.uint8]:
        return self._random.integers(0, 256, (self._pages, self._page_bytes), dtype=np.uint8)

    def _store(self, tokens: NDArray[np.int32], content: NDArray[np.uint8]) -> tuple[float, float]:
        manager, offload = self._manager, self._offload
        request = manager.open(tokens)
        manager.lookup(request)
        step = manager.begin_step()
        grant = manager.allocate(request, len(tokens) - 1)
        if grant is None:
            raise InvariantError("the arena has no room for the pages of one request")
        self._rows[manager.block_table(request, 0)[: self._pages]] = content
        manager.commit(request, grant.end)
        manager.end_step(step)
        offload.forget(request)
        manager.finish(request)
        wanted = offload.stats().stored_pages + self._pages
        begin, cpu = time.perf_counter(), time.thread_time()
        offload.end_of_step()
        planned = time.thread_time() - cpu
        while offload.stats().stored_pages < wanted:
            self._wait(begin, "stored")
            offload.poll()
        return planned, time.perf_counter() - begin

    def _store_others(self, pages: int) -> None:
        request = self._manager.open(self._random.integers(0, 2**31, pages * BLOCK_TOKENS + 1))
        self._manager.lookup(request)
        step = self._manager.begin_step()
        grant = self._manager.allocate(request, pages * BLOCK_TOKENS)
        if grant is None:
            raise InvariantError(f"the arena has no room for {pages} pages more")
        self._manager.commit(request, grant.end)
        self._manager.end_step(step)
        self._manager.finish(request)
        before = self._offload.stats().stored_pages
        self._offload.end_of_step()
        self._settle()
        if self._offload.stats().stored_pages != before + pages:
            raise InvariantError(f"the tier has no room for {pages} pages more")

    def _load(
        self, tokens: NDArray[np.int32], content: NDArray[np.uint8]
    ) -> tuple[float, float, float]:
        manager, offload = self._manager, self._offload
        manager.clear()
        self._arena[:] = 0
        request = manager.open(tokens)
        cpu = time.thread_time()
        hit = offload.lookup(request)
        lookup = time.thread_time() - cpu
        if hit is None or hit.hit_tokens != self._pages * BLOCK_TOKENS:
            raise InvariantError(f"{self._pages} pages were stored, a lookup finds {hit}")
        step = manager.begin_step()
        grant = manager.allocate(request, 1)
        if grant is None:
            raise InvariantError("the arena has no room for the pages of one request")
        manager.end_step(step)
        begin, cpu = time.perf_counter(), time.thread_time()
        offload.start_load(request, grant)
        planned = time.thread_time() - cpu
        while not (ended := offload.poll()):
            self._wait(begin, "loaded")
        done = time.perf_counter()
        if ended != [(request, True)]:
            raise ConfigError(f"a load failed: {offload.stats().errors}; look at --folder")
        pages = manager.block_table(request, 0)[: self._pages]
        if not np.array_equal(self._rows[pages], content):
            raise InvariantError("other bytes came back than were stored")
        offload.forget(request)
        manager.abort(request)
        return lookup, planned, done - begin

    def _wait(self, begin: float, what: str) -> None:
        if time.perf_counter() - begin > DEADLINE_SECONDS:
            raise ConfigError(
                f"{self._pages} pages were not {what} in {DEADLINE_SECONDS:g} s:"
                f" {self._offload.stats().errors}; look at --folder"
            )
        self._offload.wait(1.0)

    def _settle(self) -> None:
        if not self._offload.drain(DEADLINE_SECONDS):
            raise ConfigError(f"transfers did not end in {DEADLINE_SECONDS:g} s: look at --folder")


def _aligned(size: int) -> NDArray[np.uint8]:
    """Zeros on a boundary of 4 KiB, as files past the kernel's cache want them."""
    try:
        memory = np.zeros(size + ALIGNMENT, np.uint8)
    except MemoryError as error:
        raise ConfigError(f"no memory for {size} bytes: lower --size or --count") from error
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]
