"""What the byte LRU counts: bytes of each kind of page, and one order of eviction over all of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

from kvcache.core.errors import CapacityError

_NO_BOUND_BYTES = 1 << 62


class SpanPages(NamedTuple):
    """A window or a pooling state. A block is `block_tokens` tokens, a page of `page_bytes`."""

    block_tokens: int
    chunk_tokens: int
    lead_tokens: int
    page_bytes: int
    transient: bool = False

    def begin(self, position: int) -> int:
        """First token that is read at a position."""
        return max(0, position // self.chunk_tokens * self.chunk_tokens - self.lead_tokens)

    def blocks_upto(self, position: int) -> int:
        """Blocks that tokens before `position` lie in."""
        return -(-position // self.block_tokens)

    def read(self, position: int) -> range:
        """Blocks that are read at a position."""
        begin = self.begin(position)
        if begin == position:
            return range(0)
        return range(begin // self.block_tokens, self.blocks_upto(position))


class PageSizes(NamedTuple):
    """What a block and a state cost. Full groups are evicted together, and so are states."""

    block_tokens: int
    """Tokens per block: the hit grid too."""
    kv_bytes: int
    """One block, all full groups."""
    state_bytes: int
    """One state, all recurrent groups; 0: the model has none."""
    spans: tuple[SpanPages, ...] = ()


class Order:
    """Cached pages by key, the victims before the rest, each oldest first; and what is free."""

    def __init__(self, capacity_bytes: int | None) -> None:
        self.lru: OrderedDict[Hashable, int] = OrderedDict()
        """Bytes by key, the oldest first."""
        self.victims: OrderedDict[Hashable, int] = OrderedDict()
        self.kept: set[Hashable] = set()
        """Keys that keep their place when superseded."""
        self.adoptions: dict[Hashable, int] = {}
        """Requests that went on from a state, or from a block of a span."""
        self._capacity = _NO_BOUND_BYTES if capacity_bytes is None else capacity_bytes
        self._free = self._capacity

    def resident(self, key: Hashable) -> bool:
        """Whether a page with this key waits in one of the two orders."""
        return key in self.lru or key in self.victims

    def take(self, needed_bytes: int) -> None:
        """Space without a key; evicts what it must."""
        while self._free < needed_bytes:
            order = self.victims or self.lru
            if not order:
                raise CapacityError(
                    f"a request holds more than the {self._capacity} bytes of the whole pool:"
                    " raise --pool-tokens"
                )
            key, size = order.popitem(last=False)
            self._free += size
            self.kept.discard(key)
            self.adoptions.pop(key, None)
        self._free -= needed_bytes

    def give_back(self, freed_bytes: int) -> None:
        """Space of pages that have no key."""
        self._free += freed_bytes

    def adopt(self, key: Hashable) -> None:
        """A resident page is held, and has served one request more."""
        self.pop(key)
        self.adoptions[key] = self.adoptions.get(key, 0) + 1

    def take_over(self, key: Hashable) -> None:
        """A held page gets the key; a resident one that has it is freed."""
        if self.resident(key):
            self.give_back(self.pop(key))

    def pop(self, key: Hashable) -> int:
        """A resident page is no longer evictable; returns its bytes."""
        size = self.lru.pop(key, None)
        return self.victims.pop(key) if size is None else size

    def supersede(self, key: Hashable, size_bytes: int) -> None:
        """A held page whose boundary has a later one is cached."""
        keeps = key in self.kept or self.adoptions.get(key, 0) > 1
        (self.lru if keeps else self.victims)[key] = size_bytes
