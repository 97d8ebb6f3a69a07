"""A page-exact LRU by bytes: what an arena without slabs would hit. Plain dictionaries, no part of the manager.

Full attention and recurrent states, one request after the other, as `kvcache.bench.replay` serves
them. Written from the rules in docs/architecture.md, not from the core's code, so that the two
check each other:

- one order over pages of all sizes; the victims before the rest, each oldest first, one page at a time;
- a request holds the pages of its prefix; of its states the newest complete one and the working one;
- a state that a later one of its request supersedes goes to the victims, unless it is declared (a
  junction is) or served more than one request;
- at the end pages go back by position, tail first, a state just before the block that ends with it;
- a page computed again takes the key of its older twin, and what that was marked with; the twin is freed at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from kvcache.core.errors import CapacityError
from kvcache.core.retain import RetentionPolicy, TurnShape

_NO_BOUND_BYTES = 1 << 62


class PageSizes(NamedTuple):
    """What a block and a state cost. Groups of a kind are evicted together."""

    block_tokens: int
    """Tokens per block: the hit grid too."""
    kv_bytes: int
    """One block, all full groups."""
    state_bytes: int
    """One state, all recurrent groups; 0: the model has none."""


class ByteLru:
    """The cache. Keys of blocks are their numbers k, keys of states ~k of the block they end with.

    Args:
        capacity_bytes: of cached, held and working pages together; None: no bound.
        step_tokens: budget of one step; space is made step by step.

    Memory: O(cached pages). `serve` is O(blocks of the request + evictions).
    """

    def __init__(
        self,
        sizes: PageSizes,
        *,
        capacity_bytes: int | None,
        policy: RetentionPolicy,
        step_tokens: int,
    ) -> None:
        self.sizes = sizes
        self.policy = policy
        self.step_tokens = step_tokens
        self.lru: OrderedDict[int, int] = OrderedDict()
        """Bytes by key, the oldest first."""
        self.victims: OrderedDict[int, int] = OrderedDict()
        self.kept: set[int] = set()
        """Keys of resident states that keep their place when superseded."""
        self.adoptions: dict[int, int] = {}
        """Requests that went on from a resident state."""
        self._capacity = _NO_BOUND_BYTES if capacity_bytes is None else capacity_bytes
        self._free = self._capacity

    def serve(self, blocks: Sequence[int], prompt_tokens: int, output_tokens: int) -> int:
        """Play one request from lookup to finish; returns the tokens of its hit.

        `blocks` has one number for each full block of the prompt; the reply has no keys.

        Raises:
            CapacityError: what the request holds at once is more than the capacity.
        """
        shape = TurnShape(prompt_tokens, self.sizes.block_tokens)
        hit, run = self._lookup(blocks, prompt_tokens)
        if hit < run:
            shape = shape._replace(junctions=(run * self.sizes.block_tokens,))
        request = _Request(self, blocks, shape, hit)
        start = hit * self.sizes.block_tokens
        for end in (prompt_tokens, prompt_tokens + max(0, output_tokens - 1)):
            while start < end:
                stop = min(start + self.step_tokens, end)
                request.step(start, stop)
                start = stop
        request.finish()
        return hit * self.sizes.block_tokens

    def _lookup(self, blocks: Sequence[int], prompt_tokens: int) -> tuple[int, int]:
        """Blocks of the hit, and of the run that attention alone would hit."""
        limit = (prompt_tokens - 1) // self.sizes.block_tokens
        run = sum(1 for _ in takewhile(self.lru.__contains__, blocks[:limit]))
        hit = run
        if self.sizes.state_bytes:
            while hit and not self.resident(~blocks[hit - 1]):
                hit -= 1
        return hit, run

    # ---- what requests do with it --------------------------------------------------------------

    def resident(self, key: int) -> bool:
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

    def hold(self, key: int) -> None:
        """A resident page is no longer evictable."""
        if self.lru.pop(key, None) is None:
            del self.victims[key]

    def touch(self, key: int) -> None:
        """A resident page becomes the newest of the LRU order."""
        size = self.lru.pop(key, None)
        self.lru[key] = self.victims.pop(key) if size is None else size


class _Request:
    """One running request: what it holds, and what it gives back when."""

    def __init__(self, cache: ByteLru, blocks: Sequence[int], shape: TurnShape, hit: int) -> None:
        self._cache = cache
        self._sizes = cache.sizes
        self._blocks = blocks
        self._held = list(range(hit))
        """Blocks whose key is on a page of this request."""
        self._computed = hit
        self._pages = hit
        """KV pages, with and without key."""
        self._state = 0
        """Newest complete state, in blocks; 0: none."""
        self._state_keyed = False
        self._works = False
        """A working state between two grid points."""
        self._interval = 0
        self._policy: dict[int, bool] = {}
        for key in blocks[:hit]:
            del cache.lru[key]
        if self._sizes.state_bytes:
            self._retain(shape)
            if hit:
                self._adopt(hit)

    def _retain(self, shape: TurnShape) -> None:
        plan = self._cache.policy.plan(shape)
        block = self._sizes.block_tokens
        self._interval = plan.intervals[0] // block
        self._policy = {p // block: k for p, k in zip(plan.positions, plan.declared, strict=True)}

    def _adopt(self, hit: int) -> None:
        cache, key = self._cache, ~self._blocks[hit - 1]
        cache.hold(key)
        cache.adoptions[key] = cache.adoptions.get(key, 0) + 1
        if self._policy.get(hit):
            cache.kept.add(key)
        self._state, self._state_keyed = hit, True

    # ---- a step --------------------------------------------------------------------------------

    def step(self, start: int, end: int) -> None:
        """Compute tokens (start, end]: space first, then what was computed gets its keys."""
        block = self._sizes.block_tokens
        pages = -(-end // block) - self._pages
        stops = self._stops(start, end) if self._sizes.state_bytes else []
        at_stop = bool(stops) and stops[-1] * block == end
        states = len(stops) - self._works + (not at_stop) if self._sizes.state_bytes else 0
        self._cache.take(pages * self._sizes.kv_bytes + states * self._sizes.state_bytes)
        self._pages += pages
        self._works = not at_stop
        self._key_blocks(min(end // block, len(self._blocks)))
        for position in stops:
            self._supersede()
            self._state, self._state_keyed = position, self._is_policy(position)
            if self._state_keyed:
                self._key_state()

    def _stops(self, start: int, end: int) -> list[int]:
        """States after (start, end] that are not updated in place, in blocks, ascending.

        The policy's, and the newest that can have a key: the end of the turn, if this is the end.
        """
        block = self._sizes.block_tokens
        low, high = start // block, min(end // block, len(self._blocks))
        stops = {p for p in self._policy if low < p <= high}
        if self._interval:
            first = (low // self._interval + 1) * self._interval
            stops.update(range(first, high + 1, self._interval))
        if high > low:
            stops.add(high)
        return sorted(stops)

    def _is_policy(self, position: int) -> bool:
        on_interval = self._interval > 0 and position % self._interval == 0
        return on_interval or position in self._policy

    def _key_blocks(self, end: int) -> None:
        for i in range(self._computed, end):
            if self._cache.lru.pop(self._blocks[i], None) is not None:
                self._cache.give_back(self._sizes.kv_bytes)
            self._held.append(i)
        self._computed = max(self._computed, end)

    def _key_state(self) -> None:
        """The key goes to the newest state's page, away from a resident one."""
        key = ~self._blocks[self._state - 1]
        if self._cache.resident(key):
            self._cache.hold(key)
            self._cache.give_back(self._sizes.state_bytes)
        self._state_keyed = True
        if self._policy.get(self._state):
            self._cache.kept.add(key)

    def _supersede(self) -> None:
        """The newest state gives way to a later one."""
        if not self._state:
            return
        cache, key = self._cache, ~self._blocks[self._state - 1]
        if not self._state_keyed:
            cache.give_back(self._sizes.state_bytes)
        elif key in cache.kept or cache.adoptions.get(key, 0) > 1:
            cache.lru[key] = self._sizes.state_bytes
        else:
            cache.victims[key] = self._sizes.state_bytes

    # ---- the end -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Everything goes back; the end of the turn gets its key."""
        cache, blocks, kv_bytes = self._cache, self._blocks, self._sizes.kv_bytes
        if self._state and not self._state_keyed:
            self._key_state()
        cache.give_back((self._pages - len(self._held)) * kv_bytes)
        unkeyed = self._works + (self._state > 0 and not self._state_keyed)
        cache.give_back(unkeyed * self._sizes.state_bytes)
        marks = sorted(
            {p for p, kept in self._policy.items() if kept}
            | ({self._state} if self._state_keyed else set())
        )
        end = len(self._held)
        for position in reversed(marks):
            first = bisect_left(self._held, position)
            cache.lru.update((blocks[i], kv_bytes) for i in reversed(self._held[first:end]))
            self._file(position)
            end = first
        cache.lru.update((blocks[i], kv_bytes) for i in reversed(self._held[:end]))

    def _file(self, position: int) -> None:
        """The held state, or a kept one that is cached, becomes the newest of the order."""
        key = ~self._blocks[position - 1]
        if position == self._state and self._state_keyed:
            self._cache.lru[key] = self._sizes.state_bytes
        elif self._cache.resident(key):
            self._cache.touch(key)
