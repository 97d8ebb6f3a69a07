"""The connector contract: a scheduler side that decides, a worker side that moves bytes.

        scheduler process                                  worker process
    +-----------------------+    Transfer (plain data)   +------------------+
    | TierScheduler         | -------------------------> | TierWorker       |
    |  lookup, plan_load,   |                            |  submit, poll    |
    |  plan_store, complete | <------------------------- |                  |
    +-----------------------+      TransferResult        +------------------+

In one process both sides are held by a `Connector`. Rules, tested for every connector by
`kvcache.connectors.testing`:

* `lookup` is idempotent and memoised; it pins what it promises until `plan_load` takes it over,
  a new `lookup` of the same request replaces it, or `release` drops it.
* A load or store is a list of (group, page) items; its result says for each item whether the right
  bytes are there. A failed item is never a wrong byte and never an exception in the engine.
* Every transfer has a deadline. If it passes while bytes may still be moving, the worker reports
  the transfer once as `late` (no item ok); its pages and slots stay out of use until the final
  result arrives. If nothing moves (queued, or between two parts), the worker ends it at once, with
  a final result, whatever else it has to do.
* A stored key is visible to `lookup` only after `complete` saw the store's good result.
* `complete` and `release` ignore, and count, ids that they do not know.
* A scheduler side that reports events tells each key once when it becomes visible and once when it
  goes: its reports, replayed, give the keys that `lookup` finds.
* No call blocks longer than an index operation takes; only `close` waits, with a timeout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.key_events import KeyEvent
from kvcache.connectors.page_region import PageRegion
from kvcache.connectors.tier_stats import TierStats
from kvcache.core.errors import ConfigError, MisuseError
from kvcache.core.events.records import MEDIUM_CPU
from kvcache.core.records import KEYED_DTYPE
from kvcache.core.values import finite

__all__ = [
    "KEYED_DTYPE",
    "QUEUE_FULL",
    "Connector",
    "Direction",
    "KeyedPages",
    "LoadBytes",
    "OpenWork",
    "PageRegion",
    "RequestKeys",
    "TierScheduler",
    "TierStats",
    "TierWorker",
    "Transfer",
    "TransferResult",
    "failed",
]


class RequestKeys(NamedTuple):
    """The keys of one request, as a tier looks them up. The arrays are views, valid in the call."""

    request: int
    namespace: bytes
    """32 bytes: zeros for native keys, the digest of the root fields for foreign ones."""
    digests: Sequence[NDArray[np.uint8]]
    """For each group `[n, 32]`: attention one row per full block, recurrent one per grid point."""


class KeyedPages(NamedTuple):
    """Pages with their keys: what a load fills or a store reads."""

    items: NDArray[np.void]
    """`[n]` of `KEYED_DTYPE`; `ns` indexes `namespaces`."""
    namespaces: Sequence[bytes]


class LoadBytes(NamedTuple):
    """Bytes of loads by where they come from: their speeds may differ tenfold."""

    near: int
    """From the tier itself."""
    far: int
    """From a tier below it, through it."""


class Direction(Enum):
    """Which way the bytes go."""

    LOAD = "load"
    """From the tier into device pages."""
    STORE = "store"
    """From device pages into the tier."""


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A plan that a scheduler side made and a worker side executes. Plain data."""

    id: int
    direction: Direction
    groups: NDArray[np.int32]
    pages: NDArray[np.int32]
    slots: NDArray[np.int64]
    """Where the bytes lie in the tier; what a number means is the connector's own affair."""
    deadline_seconds: float
    """Seconds after `submit` at which the transfer counts as late."""
    names: NDArray[np.uint8] | None = None
    """`[n, 64]`: namespace and digest of each item, where the worker finds pages by their keys."""

    def __post_init__(self) -> None:
        lengths = len(self.groups), len(self.pages), len(self.slots)
        if len(set(lengths)) > 1:
            raise ConfigError(
                f"transfer {self.id} has {lengths[0]} groups, {lengths[1]} pages and {lengths[2]}"
                " slots: one of each for each item"
            )
        finite(self.deadline_seconds, "Transfer.deadline_seconds")

    @property
    def far_rows(self) -> NDArray[np.intp]:
        """Items of a load that come from a tier below."""
        return np.zeros(0, np.intp)


@dataclass(frozen=True, slots=True, eq=False)
class TransferResult:
    """What became of a transfer. `late` results are followed by exactly one final result."""

    id: int
    direction: Direction
    ok: NDArray[np.uint8]
    """`[n]`: 1 where the item's bytes are right and complete."""
    late: bool = False
    error: str = ""
    """`Kind: what happened`, empty if all is well. Counted by kind."""
    seconds: float = 0.0
    bytes: int = 0
    gone: NDArray[np.uint8] | None = None
    """`[n]`: 1 where the tier turned out not to have the bytes of the item's key: the key goes."""
    far_seconds: float = 0.0
    """Those of `seconds` that a tier below took, with what its pages took from there on."""


QUEUE_FULL = "QueueFull"
"""Kind of error of a transfer that a full queue refused: nothing is lost, it may be tried again."""


def failed(transfer: Transfer, error: str) -> TransferResult:
    """The final result of a transfer of which no item is good. `error`: `Kind: what happened`."""
    return TransferResult(
        transfer.id, transfer.direction, np.zeros(len(transfer.pages), np.uint8), error=error
    )


class OpenWork(NamedTuple):
    """What a scheduler side holds something for."""

    requests: set[int]
    """Looked up, and neither loaded nor released."""
    transfers: set[int]
    """Planned, and without their final result."""


class TierScheduler(ABC):
    """The side that decides. Called by the scheduler's thread only."""

    reports_events: bool = False
    """Whether `take_events` tells anything."""

    @abstractmethod
    def lookup(self, keys: RequestKeys) -> list[NDArray[np.uint8]] | None:
        """For each group, 1 where the tier holds the key; None: not known yet, ask again.

        Pins what it reports until `plan_load`, the next `lookup` of the request, or `release`.
        At most 0.2 ms at 1M tokens when repeated without a change.
        """

    def narrow(self, keys: RequestKeys) -> None:
        """Ends pins of the last `lookup`: of its keys only these first ones of each group are wanted.

        As a `lookup` of these keys, which it is where a tier does not do it faster.
        """
        self.lookup(keys)

    @property
    def version(self) -> Hashable:
        """Equal values: a `lookup` in between would have found the same. None: it cannot be told.

        It changes with what this process stores, and with what it hears of others.
        """
        return None

    def holds(self, keys: RequestKeys) -> list[NDArray[np.uint8]] | None:  # noqa: ARG002
        """As `lookup`, but promises and pins nothing: for explanations. None: cannot be told."""
        return None

    def far(self, request: int) -> list[NDArray[np.uint8]] | None:  # noqa: ARG002
        """Of what the last `lookup` of the request found, 1 where a tier below has it. None: nowhere."""
        return None

    @abstractmethod
    def plan_load(self, request: int, wanted: KeyedPages) -> Transfer:
        """A load of keys that the last `lookup` of `request` reported, into the given pages.

        The pins go over to the transfer; other pins of the request are dropped. A key that the
        tier does not hold makes its item fail in the result (slot -1), not the call.
        """

    @abstractmethod
    def plan_store(self, pages: KeyedPages) -> tuple[Transfer, NDArray[np.int64]] | None:
        """A store of those pages that the tier does not hold yet and has room for.

        Returns the transfer and the indices into `pages` that it covers, or None where nothing is
        to be stored. The caller holds a reference on each page until the final result.
        """

    @abstractmethod
    def complete(self, result: TransferResult) -> None:
        """Takes a result: publishes good stores, ends pins. Unknown ids are counted and ignored."""

    @abstractmethod
    def release(self, request: int) -> None:
        """Drops what `lookup` pinned, or began, for a request that ended, was aborted, or needs no load."""

    def drop(self, transfer: Transfer) -> None:
        """Ends a transfer that was planned and not submitted. Nothing was moved, nothing has failed."""
        self.complete(failed(transfer, "Dropped: it was not submitted"))

    def open_work(self) -> OpenWork | None:
        """What has not come to its end; for checks. None: it does not tell."""
        return None

    def take_events(self) -> list[KeyEvent]:
        """Keys that became visible or went since the last call; in order, for each group.

        What waits is bounded: `KeysLost` comes first where some was dropped for want of a reader.
        O(keys).
        """
        return []

    @abstractmethod
    def stats(self) -> TierStats:
        """Counters. O(groups)."""

    @abstractmethod
    def check(self) -> None:
        """Raise `InvariantError` on a broken invariant. O(pages)."""


class TierWorker(ABC):
    """The side that moves bytes. `submit` and `poll` are called by one thread, never block."""

    @abstractmethod
    def register(self, regions: Sequence[PageRegion]) -> None:
        """Names the device pages of each group. Once, before the first `submit`.

        Raises:
            ConfigError: not one region for each group, or pages of another size than the tier's.
            MisuseError: called twice; and by `submit` where it was not called.
        """

    @abstractmethod
    def submit(self, transfer: Transfer) -> bool:
        """Queues a transfer. False: the queue is full, nothing was taken; nor was it where this raises.

        A store must be submitted after the step that wrote its pages has ended.
        """

    @abstractmethod
    def poll(self) -> list[TransferResult]:
        """Results that arrived since the last call, late ones included."""

    @abstractmethod
    def wait(self, timeout_seconds: float) -> bool:
        """Block until `poll` would return something or the time is over. For idle engines."""

    @property
    def slot_regions(self) -> Sequence[PageRegion] | None:
        """Host memory of the slots of each group: slot s of a transfer is page s. None: it is none.

        A tier below this one reads and writes them. Valid until `close` says True, and longer where
        they are lent.
        """
        return None

    def lend_slots(self) -> Callable[[], None]:
        """`slot_regions` stay from now on, whatever becomes of this worker, until the result is called.

        Of every worker that has them: the tier below may use them longer than this one lives.
        """
        raise MisuseError("this worker has no slot_regions that it could lend")

    def slots_ready(self, transfer: Transfer) -> bool:  # noqa: ARG002
        """Whether the slots of a transfer may be written by a tier below at once, without memory for it.

        False: `make_ready` comes first.
        """
        return True

    def make_ready(self, transfer: Transfer) -> bool:
        """Queues a transfer of which no byte moves: an item is good when its slot may be written.

        For those whose `slots_ready` may say False. False: the queue is full, nothing was taken.
        """
        raise MisuseError(f"the slots of transfer {transfer.id} are ready already")

    def notify(self, call: Callable[[], None]) -> bool:  # noqa: ARG002
        """`call` is called, on any thread, whenever `poll` may have got a result.

        Not for deadlines: those are found by `poll` and `wait`. False: this worker tells nobody.
        """
        return False

    def at_end(self, call: Callable[[], None]) -> bool:  # noqa: ARG002
        """`call` is called once, on any thread, when nothing is moved any more, and nothing will be.

        Also where the worker was dropped and not closed. False: this worker tells nobody.
        """
        return False

    def flush(self, timeout_seconds: float) -> bool:  # noqa: ARG002
        """Wait until what was stored so far lies in the last tier, or has failed: then it is counted.

        False: the time was over.
        """
        return True

    def stop(self) -> None:  # noqa: B027  (a worker that cannot runs what is queued until it is closed)
        """Fail what is queued and what is submitted from now on; never waits. `slot_regions` stay.

        For a tier above another one that has to be closed before it.
        """

    @abstractmethod
    def close(self, timeout_seconds: float = 5.0) -> bool:
        """Fails what is queued, waits for what runs, joins threads, frees memory. Idempotent.

        False: the time was over while a copy ran; its result comes when it ends. Call it again.
        """


@dataclass(frozen=True, slots=True)
class Connector:
    """Both sides of a tier in one process."""

    name: str
    scheduler: TierScheduler
    worker: TierWorker
    medium: str = MEDIUM_CPU
    """What KV events call it: `CPU`, `STORAGE`."""
