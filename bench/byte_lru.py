"""A page-exact LRU by bytes: what an arena without slabs would hit. Plain dictionaries, no part of the manager.

Full attention, windows, pooling states and recurrent states, one request after the other, as
`kvcache.bench.replay` serves them. Written from the rules in docs/architecture.md and
docs/retention.md, not from the core's code, so that the two check each other:

- one order over pages of all sizes; the victims before the rest, each oldest first, one page at a time;
- a request holds the pages of its prefix; of its states the newest complete one and the working one;
  of a span what its last grid point reads, and all that is newer (transient ones: what the last
  grid point and the next token read);
- what a later grid point of its request supersedes goes to the victims, unless it is declared (a
  junction is) or served more than one request;
- at the end pages go back by position, tail first, what serves a boundary just before the block
  that ends with it;
- a page computed again takes the key of its older twin, and what that was marked with; the twin is
  freed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from kvcache.bench.byte_lru_pages import Order, PageSizes
from kvcache.bench.byte_lru_request import Keys, Request
from kvcache.core.retain import RetentionPolicy, TurnShape


class ByteLru:
    """The cache.

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
        self.order = Order(capacity_bytes)

    def serve(self, blocks: Sequence[int], prompt_tokens: int, output_tokens: int) -> int:
        """Play one request from lookup to finish; returns the tokens of its hit.

        `blocks` has one number for each full block of the prompt; the reply has no keys.

        Raises:
            CapacityError: what the request holds at once is more than the capacity.
        """
        grid = self.sizes.block_tokens
        keys = Keys(blocks, self.sizes)
        hit, run = self._lookup(keys, prompt_tokens)
        shape = TurnShape(prompt_tokens, grid)
        if hit < run:
            shape = shape._replace(junctions=(run * grid,))
        request = Request(self.order, keys, self.policy.plan(shape), hit)
        start = hit * grid
        for end in (prompt_tokens, prompt_tokens + max(0, output_tokens - 1)):
            known = end if end == prompt_tokens else prompt_tokens + output_tokens
            while start < end:
                stop = min(start + self.step_tokens, end)
                request.step(start, stop, known)
                start = stop
        request.finish()
        return hit * grid

    def _lookup(self, keys: Keys, prompt_tokens: int) -> tuple[int, int]:
        """Blocks of the hit, and of the run that attention alone would hit."""
        limit = (prompt_tokens - 1) // self.sizes.block_tokens
        run = sum(1 for _ in takewhile(self.order.lru.__contains__, keys.blocks[:limit]))
        hit = run
        while hit and not all(self.order.resident(key) for _, key in keys.sparse(hit)):
            hit -= 1
        return hit, run
