"""What a `PoolScheduler` remembers of transfers: plans and their parts; and what tells key lists apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import Direction, KeyedPages, RequestKeys

Signature: TypeAlias = tuple[bytes, tuple[tuple[int, bytes], ...]]


class Part(NamedTuple):
    """The items of a plan that share a group and a namespace."""

    group: int
    namespace: bytes
    rows: NDArray[np.intp]
    mark: int = 0
    """Of a store: its keys among those in flight."""

    @property
    def key(self) -> tuple[int, bytes]:
        """What the rows have in common."""
        return self.group, self.namespace


@dataclass(slots=True)
class Plan:
    """A transfer in flight."""

    direction: Direction
    items: NDArray[np.void]
    slots: NDArray[np.int64]
    """-1: nothing is held for the item."""
    parts: list[Part]
    late: bool = False


def signature_of(keys: RequestKeys) -> Signature:
    """Equal for equal key lists of one request: a chain only grows, its last link tells it."""
    ends = tuple((len(d), d[-1].tobytes() if len(d) else b"") for d in keys.digests)
    return keys.namespace, ends


def read_only(flags: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """The flags as bytes that a caller cannot change."""
    out = flags.view(np.uint8)
    out.flags.writeable = False
    return out


def parts_of(pages: KeyedPages) -> Iterator[Part]:
    """Splits items by group and namespace; inside a part the order stays."""
    groups, numbers = pages.items["group"], pages.items["ns"]
    if not len(groups):
        return
    pairs = groups.astype(np.int64) << 32 | numbers.astype(np.int64)
    same = bool((pairs == pairs[0]).all())  # as mostly, where sorting would cost more than the rest
    for pair in [int(pairs[0])] if same else np.unique(pairs).tolist():
        rows = np.flatnonzero(pairs == pair)
        yield Part(pair >> 32, pages.namespaces[pair & 0xFFFFFFFF], rows)


def named(namespace: bytes, digests: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`[n, 64]`: namespace and digest, as in `Transfer.names`."""
    names = np.empty((len(digests), 64), np.uint8)
    names[:, :32], names[:, 32:] = np.frombuffer(namespace, np.uint8), digests
    return names


def names_of(items: NDArray[np.void], parts: Sequence[Part]) -> NDArray[np.uint8]:
    """The names of items that lie in these parts; zeros where they lie in none."""
    names = np.zeros((len(items), 64), np.uint8)
    for part in parts:
        names[part.rows] = named(part.namespace, items["digest"][part.rows])
    return names
