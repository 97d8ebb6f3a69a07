"""What the two sides of a chain of tiers tell each other, and what the deciding side remembers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import KeyedPages, OpenWork, RequestKeys, Transfer
from kvcache.connectors.pool_records import Signature, read_only
from kvcache.core.errors import InvariantError


def _no_rows() -> NDArray[np.intp]:
    return np.zeros(0, np.intp)


@dataclass(frozen=True, slots=True, eq=False)
class ChainTransfer(Transfer):
    """A transfer of a chain, made of parts. `slots` are those of the upper tier, -1 for none.

    A load: what the upper tier holds goes from there to the device; what only the lower one holds
    is read into slots of the upper one, and goes from there. A store goes to the upper tier.
    """

    upper_rows: NDArray[np.intp] = field(default_factory=_no_rows)
    """Items that the upper tier moves at once."""
    lower_rows: NDArray[np.intp] = field(default_factory=_no_rows)
    """Items that the lower tier moves first, into `slots`, ..."""
    lower: Transfer | None = None
    """... as its scheduler side planned it."""
    error: str = ""
    """What is wrong with items that neither of them moves."""

    @property
    def far_rows(self) -> NDArray[np.intp]:
        """Those of the lower tier."""
        return self.lower_rows


class Ascent(NamedTuple):
    """The items of a load that only the lower tier held."""

    rows: NDArray[np.intp]
    read: Transfer
    """The load of the lower tier, into ..."""
    reserved: Transfer
    """... the slots of a store of the upper one, which its worker never sees."""


@dataclass(slots=True)
class ChainPlan:
    """A transfer in flight."""

    items: int
    upper: Transfer
    """As the upper tier planned it, with ..."""
    here: NDArray[np.intp]
    """... these items."""
    ascent: Ascent | None
    keys: KeyedPages | None
    """Of a store: what is to be written to the lower tier when it is done."""
    late: bool = False


@dataclass(slots=True)
class ChainPromise:
    """What the last lookup of a request found in each tier."""

    signature: Signature
    upper: list[NDArray[np.uint8]]
    below: RequestKeys | None
    """What was asked of the lower tier, under a number of its own; None: the upper has it all."""
    lower: list[NDArray[np.uint8]] | None
    present: list[NDArray[np.uint8]]
    far: list[NDArray[np.uint8]] | None = None
    """Where only the lower tier has it."""

    def take(self, lower: list[NDArray[np.uint8]]) -> None:
        """What the lower tier says now."""
        before = self.lower
        if before is not None and all(a is b for a, b in zip(before, lower, strict=True)):
            return
        self.lower = lower
        self.present = [_joined(up, low) for up, low in zip(self.upper, lower, strict=True)]
        pairs = zip(self.present, self.upper, strict=True)
        self.far = [read_only(both > up) for both, up in pairs]


def _joined(upper: NDArray[np.uint8], lower: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Flags of all keys; `lower` has those of the keys that `upper` lacks."""
    flags = upper.astype(np.bool_)
    flags[~flags] = lower.astype(np.bool_)
    return read_only(flags)


def lasting(keys: KeyedPages) -> KeyedPages:
    """With a list of namespaces that does not change: numbers of the caller's are for now."""
    items = keys.items.copy()
    numbers, items["ns"] = np.unique(items["ns"], return_inverse=True)
    return KeyedPages(items, [keys.namespaces[int(n)] for n in numbers])


def require_same(
    name: str, there: OpenWork | None, requests: list[int], transfers: list[int]
) -> None:
    """`InvariantError` where a tier, if it tells, has other work than the chain, or some of it twice."""
    if there is None:
        return
    for what, known, ours in (
        ("requests", there.requests, requests),
        ("transfers", there.transfers, transfers),
    ):
        if sorted(known) != sorted(ours):
            raise InvariantError(
                f"the {name} tier has {what} {sorted(known)} open, the chain {sorted(ours)}"
            )
