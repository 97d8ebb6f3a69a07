"""What the contract suite is built from: a device, a gate that stops copies, a rig of steps."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import (
    KEYED_DTYPE,
    Connector,
    KeyedPages,
    PageRegion,
    RequestKeys,
    Transfer,
    TransferResult,
)
from kvcache.core.hashing import NATIVE_NAMESPACE
from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention, RecurrentState

PATIENCE_SECONDS = 30.0
"""How long a rule waits for something that must come."""


class ContractError(AssertionError):
    """A rule was broken."""


def expect(condition: object, text: str) -> None:
    """Raise `ContractError` unless the condition holds."""
    if not condition:
        raise ContractError(text)


def two_groups() -> Geometry:
    """Attention and states, with page sizes that fit no power of two."""
    return Geometry(
        (
            FullAttention(
                name="attention", layers=3, kv_heads=1, head_dim=7, block_tokens=16, element_bytes=1
            ),
            RecurrentState(name="state", layers=1, state_bytes_per_layer=4099),
        )
    )


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a rule asks of a factory."""

    geometry: Geometry = field(default_factory=two_groups)
    pages: tuple[int, ...] = (8, 6)
    """Pages of each group that the tier holds."""
    queue_depth: int = 4
    deadline_seconds: float = PATIENCE_SECONDS
    events: bool = False
    """The tier is to report events, if it can."""
    ranks: tuple[int, ...] = ()
    """Device pages lie in as many parts, and each part in the memories of so many ranks."""
    before_copy: Callable[[], None] = lambda: None
    """The worker calls it before it moves bytes, where it would block: it may wait or raise."""


Factory = Callable[[Setup], Connector]


@dataclass(frozen=True)
class Key:
    """A key by name; `digest` and `content` follow from it."""

    name: str
    group: int = 0
    namespace: bytes = NATIVE_NAMESPACE


def digest(key: Key) -> bytes:
    """32 bytes. Not of group and namespace: equal names collide unless the tier separates them."""
    return hashlib.sha256(key.name.encode()).digest()


def content(key: Key, page_bytes: int) -> NDArray[np.uint8]:
    """The bytes that belong to a key, different for each."""
    seed = f"{key.group}/{key.name}/".encode() + key.namespace
    return np.frombuffer(hashlib.shake_256(seed).digest(page_bytes), np.uint8)


def keyed_pages(keys: Sequence[Key], pages: Sequence[int]) -> KeyedPages:
    """Keys with their device pages, as a manager lists them."""
    namespaces = [NATIVE_NAMESPACE]
    items = np.zeros(len(keys), KEYED_DTYPE)
    for i, (key, page) in enumerate(zip(keys, pages, strict=True)):
        if key.namespace not in namespaces:
            namespaces.append(key.namespace)
        items[i]["group"], items[i]["page"] = key.group, page
        items[i]["ns"] = namespaces.index(key.namespace)
        items[i]["digest"] = np.frombuffer(digest(key), np.uint8)
    return KeyedPages(items, namespaces)


class Device:
    """Device pages in host memory, a free list for each group.

    Args:
        ranks: as `Setup.ranks`.
    """

    def __init__(self, geometry: Geometry, pages: int, ranks: Sequence[int] = ()) -> None:
        copies = ranks or (1,)
        self.memory = [
            [
                [np.zeros((pages, g.page_bytes // len(copies)), np.uint8) for _ in range(count)]
                for count in copies
            ]
            for g in geometry.groups
        ]
        """Of each group, by part, of each rank that has it `[pages, bytes]`."""
        self.free = [list(range(pages)) for _ in geometry.groups]
        self._parted = bool(ranks)

    def regions(self) -> list[PageRegion]:
        """What a worker registers."""
        return [self._region(parts) for parts in self.memory]

    def _region(self, parts: list[list[NDArray[np.uint8]]]) -> PageRegion:
        pages, part_bytes = parts[0][0].shape
        places = tuple(tuple(m.ctypes.data for m in copies) for copies in parts)
        if self._parted:
            return PageRegion(0, part_bytes * len(parts), pages, part_bytes, places)
        return PageRegion(places[0][0], part_bytes, pages)

    def take(self, key: Key, *, filled: bool) -> int:
        """A free page of the key's group, with the key's content or with nothing known."""
        expect(self.free[key.group], "the rule uses more device pages than it asked for")
        page = self.free[key.group].pop(0)
        for memory, expected in self._copies(key):
            memory[page] = expected if filled else 0x55
        return page

    def give(self, key: Key, page: int) -> None:
        """The page is free again."""
        self.free[key.group].append(page)

    def holds(self, key: Key, page: int) -> bool:
        """Does the page have the key's bytes, on every rank?"""
        return all(np.array_equal(memory[page], expected) for memory, expected in self._copies(key))

    def _copies(self, key: Key) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Each rank's memory, and what a page with the key has there."""
        parts = self.memory[key.group]
        size = parts[0][0].shape[1]
        whole = content(key, size * len(parts))
        for i, copies in enumerate(parts):
            for memory in copies:
                yield memory, whole[i * size : (i + 1) * size]


class Gate:
    """A `before_copy` that blocks while it is shut."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = True
        self._reached = 0
        self._passes = 0

    def shut(self) -> None:
        """Copies that begin from now on wait."""
        with self._changed:
            self._is_open, self._reached, self._passes = False, 0, 0

    def open(self) -> None:
        """Let everybody through."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def wait_reached(self, count: int = 1) -> None:
        """Until so many copies have come to the gate since it was shut."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._reached >= count, PATIENCE_SECONDS):
                raise ContractError("the worker began no copy: before_copy was not called")

    @property
    def reached(self) -> int:
        """How many copies have come to the gate since it was shut."""
        with self._changed:
            return self._reached

    def let_one(self) -> None:
        """Let one copy through, and wait until another stands at the gate."""
        with self._changed:
            self._passes += 1
            self._changed.notify_all()
            reached = self._reached
        self.wait_reached(reached + 1)

    def __call__(self) -> None:
        """On the worker's thread: wait while the gate is shut."""
        with self._changed:
            self._reached += 1
            self._changed.notify_all()
            # Longer than anybody waits for a result: it is opened before, or something is wrong.
            if not self._changed.wait_for(
                lambda: self._is_open or self._passes, 2 * PATIENCE_SECONDS
            ):
                raise TimeoutError("the gate was never opened")
            self._passes -= not self._is_open


class Rig:
    """One connector with a device: the small steps that the rules are made of."""

    def __init__(self, factory: Factory, setup: Setup | None = None, *, pages: int = 64) -> None:
        self.setup = setup or Setup()
        self.connector = factory(self.setup)
        self.scheduler, self.worker = self.connector.scheduler, self.connector.worker
        self.device = Device(self.setup.geometry, pages, self.setup.ranks)
        self.worker.register(self.device.regions())

    # ---- scheduler side ----
    def lookup(self, request: int, keys: Sequence[Key]) -> list[int]:
        """What the tier reports, in the order of the keys."""
        flags = self.scheduler.lookup(self.request_keys(request, keys))
        if flags is None:
            raise ContractError("lookup answered None for a tier that is idle")
        counters = [iter(row.tolist()) for row in flags]
        return [next(counters[key.group]) for key in keys]

    def request_keys(self, request: int, keys: Sequence[Key]) -> RequestKeys:
        """One row for each key, in the array of its group. All of one namespace."""
        namespace = keys[0].namespace if keys else NATIVE_NAMESPACE
        rows: list[list[bytes]] = [[] for _ in self.setup.geometry.groups]
        for key in keys:
            rows[key.group].append(digest(key))
        arrays = [np.frombuffer(b"".join(row), np.uint8).reshape(-1, 32) for row in rows]
        return RequestKeys(request, namespace, arrays)

    def visible(self, keys: Sequence[Key]) -> list[int]:
        """`lookup` without a trace."""
        flags = self.lookup(-1, keys)
        self.scheduler.release(-1)
        return flags

    def pinned(self) -> int:
        """Pages that the tier holds for somebody."""
        return self.scheduler.stats().pinned_pages

    # ---- transfers ----
    def plan_store(self, keys: Sequence[Key]) -> tuple[Transfer, list[Key]] | None:
        """A store of pages that hold the keys' content, and the keys that it covers."""
        pages = [self.device.take(key, filled=True) for key in keys]
        plan = self.scheduler.plan_store(keyed_pages(keys, pages))
        covered = [] if plan is None else plan[1].tolist()
        for i, key in enumerate(keys):
            if i not in covered:
                self.device.give(key, pages[i])
        return None if plan is None else (plan[0], [keys[i] for i in covered])

    def plan_load(self, request: int, keys: Sequence[Key]) -> Transfer:
        """A load of the keys into pages of unknown content."""
        pages = [self.device.take(key, filled=False) for key in keys]
        return self.scheduler.plan_load(request, keyed_pages(keys, pages))

    def submit(self, transfer: Transfer) -> None:
        """Submit, which must be accepted."""
        expect(self.worker.submit(transfer), "submit refused a transfer though the queue is empty")

    def results(self, *ids: int) -> dict[int, list[TransferResult]]:
        """Poll until each id has its final result; everything that came, by id."""
        got: dict[int, list[TransferResult]] = {i: [] for i in ids}
        while not all(any(not r.late for r in got[i]) for i in ids):
            for result in self.worker.poll():
                got.setdefault(result.id, []).append(result)
            done = all(any(not r.late for r in got[i]) for i in ids)
            if not done and not self.worker.wait(PATIENCE_SECONDS):
                raise ContractError(f"no final result came for transfers {list(ids)}")
        return got

    def next_result(self) -> TransferResult:
        """The one result that comes next, late or final."""
        if not self.worker.wait(PATIENCE_SECONDS):
            raise ContractError("no result came")
        results = self.worker.poll()
        if len(results) != 1:
            raise ContractError(f"wait promised a result, poll gave {len(results)}")
        return results[0]

    def run(self, transfer: Transfer) -> TransferResult:
        """Submit, wait for the final result, complete."""
        self.submit(transfer)
        result = self.results(transfer.id)[transfer.id][-1]
        self.scheduler.complete(result)
        return result

    def planned(self, keys: Sequence[Key]) -> Transfer:
        """A store that must cover all of the keys."""
        plan = self.plan_store(keys)
        if plan is None or plan[1] != list(keys):
            raise ContractError(f"a tier with room did not take {len(keys)} pages")
        return plan[0]

    def store(self, keys: Sequence[Key]) -> list[Key]:
        """Store; the keys that the tier took."""
        plan = self.plan_store(keys)
        if plan is None:
            return []
        transfer, covered = plan
        result = self.run(transfer)
        expect(result.ok.all(), f"a plain store failed: {result.error}")
        for key, page in zip(covered, transfer.pages.tolist(), strict=True):
            self.device.give(key, page)
        return covered

    def load(self, request: int, keys: Sequence[Key]) -> list[int]:
        """Load; the flags of the result, after the bytes of good items were compared."""
        transfer = self.plan_load(request, keys)
        result = self.run(transfer)
        self.verify(keys, transfer, result.ok)
        return [int(flag) for flag in result.ok]

    def verify(self, keys: Sequence[Key], transfer: Transfer, ok: NDArray[np.uint8]) -> None:
        """Good items hold exactly the bytes of their keys; all pages are free again."""
        for key, page, good in zip(keys, transfer.pages.tolist(), ok.tolist(), strict=True):
            if good:
                expect(self.device.holds(key, page), f"wrong bytes were loaded for {key}")
            self.device.give(key, page)


@contextmanager
def rig(factory: Factory, setup: Setup | None = None, *, pages: int = 64) -> Iterator[Rig]:
    """A rig that is checked and closed at the end."""
    made = Rig(factory, setup, pages=pages)
    try:
        yield made
        made.scheduler.check()
    finally:
        if isinstance(made.setup.before_copy, Gate):
            made.setup.before_copy.open()
        made.worker.close(PATIENCE_SECONDS)


def chain(name: str, length: int, group: int = 0, namespace: bytes = NATIVE_NAMESPACE) -> list[Key]:
    """Keys of one prefix in one group."""
    return [Key(f"{name}{i}", group, namespace) for i in range(length)]
