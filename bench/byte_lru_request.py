"""One request of the byte LRU: what it holds, what gets a key, and what it gives back when."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from kvcache.bench.byte_lru_pages import Order, PageSizes, SpanPages
from kvcache.core.retain import RetentionPlan


class Keys:
    """Keys of a prompt. Positions in blocks, which is the grid.

    Blocks of full attention have their numbers k, states ~k of the block that they end with, blocks
    of a span (group, k of the block they lie in, place in it).
    """

    def __init__(self, blocks: Sequence[int], sizes: PageSizes) -> None:
        self.blocks = blocks
        self.sizes = sizes

    def state(self, position: int) -> int:
        """The state after so many blocks."""
        return ~self.blocks[position - 1]

    def span(self, group: int, block: int) -> Hashable:
        """A block of a span group, counted in its own blocks."""
        per_grid = self.sizes.block_tokens // self.sizes.spans[group].block_tokens
        return group, self.blocks[block // per_grid], block % per_grid

    def sparse(self, position: int) -> Iterator[tuple[int, Hashable]]:
        """What a hit needs beside full attention, and the tokens that each of it ends with."""
        tokens = position * self.sizes.block_tokens
        if self.sizes.state_bytes:
            yield tokens, self.state(position)
        for group, span in enumerate(self.sizes.spans):
            for block in reversed(span.read(tokens)):
                yield (block + 1) * span.block_tokens, self.span(group, block)


class Request:
    """A running request. Positions of `hit` and of the plan's points in blocks."""

    def __init__(self, order: Order, keys: Keys, plan: RetentionPlan, hit: int) -> None:
        self.order = order
        self.keys = keys
        self.sizes = keys.sizes
        grid = self.sizes.block_tokens
        self._interval = plan.intervals[0] // grid
        self._policy = {p // grid: k for p, k in zip(plan.positions, plan.declared, strict=True)}
        self._computed = hit
        """Blocks of full attention that have their key."""
        self._end = hit * grid
        """Tokens that are computed."""
        self._pages = hit
        """KV pages, with and without key."""
        self._state = hit if self.sizes.state_bytes else 0
        """Newest complete state, in blocks; 0: none."""
        self._state_keyed = bool(self._state)
        self._works = False
        """A working state between two grid points."""
        self._spans = [_Span(self, g, hit) for g in range(len(self.sizes.spans))]
        for block in keys.blocks[:hit]:
            order.pop(block)
        for _, key in keys.sparse(hit) if hit else ():
            order.adopt(key)
            if self._policy.get(hit):
                order.kept.add(key)

    # ---- what the policy says ------------------------------------------------------------------

    def kept(self, low: int, high: int) -> list[int]:
        """Positions that the policy keeps in (low, high], ascending."""
        points = {p for p in self._policy if low < p <= high}
        if self._interval:
            first = (low // self._interval + 1) * self._interval
            points.update(range(first, high + 1, self._interval))
        return sorted(points)

    def all_declared(self) -> list[int]:
        """Positions whose pages keep their place, ascending."""
        return sorted(p for p, kept in self._policy.items() if kept)

    def declared(self, position: int) -> bool:
        """Whether what is kept there keeps its place."""
        return bool(self._policy.get(position))

    def keyed_upto(self, tokens: int) -> int:
        """Blocks before `tokens` that can have keys."""
        return min(tokens // self.sizes.block_tokens, len(self.keys.blocks))

    # ---- a step --------------------------------------------------------------------------------

    def step(self, start: int, end: int, known: int) -> None:
        """Compute tokens (start, end], of which `known` are told: space first, then keys."""
        block = self.sizes.block_tokens
        pages = -(-end // block) - self._pages
        stops = self._stops(start, end) if self.sizes.state_bytes else []
        at_stop = bool(stops) and stops[-1] * block == end
        states = len(stops) - self._works + (not at_stop) if self.sizes.state_bytes else 0
        self.order.take(
            pages * self.sizes.kv_bytes
            + states * self.sizes.state_bytes
            + sum(span.grant(start, end, known) for span in self._spans)
        )
        self._pages += pages
        self._works = not at_stop
        self._end = end
        self._key_blocks(self.keyed_upto(end))
        for position in self.kept(start // block, self.keyed_upto(end)):
            for span in self._spans:
                span.key(position, declared=self.declared(position))
        for position in stops:
            self._supersede()
            self._state, self._state_keyed = position, position in self.kept(position - 1, position)
            if self._state_keyed:
                self._key_state()
        for span in self._spans:
            span.give_up(min(end, known), end)

    def _stops(self, start: int, end: int) -> list[int]:
        """States after (start, end] that are not updated in place, in blocks, ascending.

        The policy's, and the newest that can have a key: the end of the turn, if this is the end.
        """
        low, high = start // self.sizes.block_tokens, self.keyed_upto(end)
        return sorted({*self.kept(low, high), *([high] if high > low else [])})

    def _key_blocks(self, end: int) -> None:
        for key in self.keys.blocks[self._computed : end]:
            self.order.take_over(key)
        self._computed = max(self._computed, end)

    def _key_state(self) -> None:
        key = self.keys.state(self._state)
        self.order.take_over(key)
        self._state_keyed = True
        if self.declared(self._state):
            self.order.kept.add(key)

    def _supersede(self) -> None:
        """The newest state gives way to a later one."""
        if not self._state:
            return
        if self._state_keyed:
            self.order.supersede(self.keys.state(self._state), self.sizes.state_bytes)
        else:
            self.order.give_back(self.sizes.state_bytes)

    # ---- the end -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Everything goes back; the end of the turn gets its keys."""
        order, kv_bytes, grid = self.order, self.sizes.kv_bytes, self.sizes.block_tokens
        order.give_back((self._pages - self._computed) * kv_bytes)
        order.give_back(self._works * self.sizes.state_bytes)
        filed: list[tuple[int, Hashable, int]] = []
        if self._state:
            if not self._state_keyed:
                self._key_state()
            filed.append((self._state * grid, self.keys.state(self._state), self.sizes.state_bytes))
        last = self.keyed_upto(self._end)
        for span in self._spans:
            filed += [(end, key, span.pages.page_bytes) for end, key in span.close(last)]
        for position in self.all_declared():
            if position > last:
                continue
            touched = [(end, key) for end, key in self.keys.sparse(position) if order.resident(key)]
            filed += [(end, key, order.pop(key)) for end, key in touched]
        filed += [
            (i * grid, self.keys.blocks[i - 1], kv_bytes) for i in range(self._computed, 0, -1)
        ]
        filed.sort(key=lambda page: -page[0])
        order.lru.update((key, size) for _, key, size in filed)


class _Span:
    """What a request holds of one span group. Positions in tokens where nothing else is said."""

    def __init__(self, request: Request, group: int, hit: int) -> None:
        self._request = request
        self._group = group
        self.order = request.order
        self.keys = request.keys
        self._grid = request.sizes.block_tokens
        self.pages: SpanPages = request.sizes.spans[group]
        self._held: dict[int, bool] = dict.fromkeys(self.pages.read(hit * self._grid), True)
        """Whether the page of a block has its key; ascending blocks."""

    def grant(self, start: int, end: int, known: int) -> int:
        """Pages for a step; returns their bytes."""
        first = self.pages.blocks_upto(start)
        blocks = set(range(first, self.pages.blocks_upto(end)))
        if self.pages.transient:
            blocks &= self._stored(start, end, known)
        self._held.update((b, False) for b in sorted(blocks))
        return len(blocks) * self.pages.page_bytes

    def _stored(self, start: int, end: int, known: int) -> set[int]:
        grid, request = self._grid, self._request
        points = {p * grid for p in request.kept(start // grid, request.keyed_upto(end))}
        points |= {request.keyed_upto(min(end, known)) * grid, end}
        return {b for p in points for b in self.pages.read(p)}

    def key(self, position: int, *, declared: bool) -> None:
        """What is read at `position` (in grid blocks) gets its keys."""
        for b in self.pages.read(position * self._grid):
            key = self.keys.span(self._group, b)
            if self._held.get(b) is False:
                self.order.take_over(key)
                self._held[b] = True
            if declared:
                self.order.kept.add(key)

    def give_up(self, told: int, computed: int) -> None:
        """After a step: what the last grid point does not read."""
        point = told // self._grid * self._grid
        last = self._request.keyed_upto(computed) * self._grid
        passed = [b for b in self._held if b < self.pages.begin(point) // self.pages.block_tokens]
        if passed and point > last:
            self.key(last // self._grid, declared=False)
        for b in passed:
            keyed = self._held.pop(b)
            key = self.keys.span(self._group, b) if keyed else None
            if key is None:
                self.order.give_back(self.pages.page_bytes)
            elif point > last and (b + 1) * self.pages.block_tokens > self.pages.begin(last):
                self.order.lru[key] = self.pages.page_bytes
            else:
                self.order.supersede(key, self.pages.page_bytes)
        if not self.pages.transient:
            return
        unread = self.pages.begin(computed) // self.pages.block_tokens
        for b in [b for b in self._held if self.pages.blocks_upto(point) <= b < unread]:
            del self._held[b]
            self.order.give_back(self.pages.page_bytes)

    def close(self, last: int) -> list[tuple[int, Hashable]]:
        """At the end: the tokens that each keyed page ends with, and its key, the last block first."""
        self.key(last, declared=False)
        blocks = sorted(self._held, reverse=True)
        keyed = [b for b in blocks if self._held[b]]
        self.order.give_back((len(blocks) - len(keyed)) * self.pages.page_bytes)
        size = self.pages.block_tokens
        return [((b + 1) * size, self.keys.span(self._group, b)) for b in keyed]
