"""Long BlockStored events in pieces, so that a prompt of any length fits what a decoder takes.

stored parent=None  [a b c d e]     ->     stored parent=None [a b]   stored parent=b [c d]   ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from kvcache.core.events.records import BlockStored

T = TypeVar("T")

MAX_STORED_HASHES = 16_384
MAX_STORED_TOKENS = 131_072
"""Of one event, as long as that is a block or more: under 1 MiB on the wire with blocks of 16."""


def pieces(event: BlockStored) -> Iterator[BlockStored]:
    """The event, or several that say the same: each follows the last block of the one before.

    One whose tokens are not those of its blocks (vLLM's sparse streams) is left whole: which tokens
    belong to which block is not known.
    """
    n, block = len(event.block_hashes), event.block_size
    most = MAX_STORED_HASHES
    if event.token_ids:
        most = max(1, min(most, MAX_STORED_TOKENS // max(block, 1)))
    if n <= most or len(event.token_ids) not in {0, n * block}:
        yield event
        return
    for first in range(0, n, most):
        last = min(first + most, n)
        extra_keys = _part(event.extra_keys, first, last)
        yield replace(
            event,
            block_hashes=event.block_hashes[first:last],
            parent_block_hash=event.block_hashes[first - 1] if first else event.parent_block_hash,
            token_ids=event.token_ids[first * block : last * block],
            extra_keys=extra_keys if extra_keys is not None and any(extra_keys) else None,
            lookahead_token_ids=_part(event.lookahead_token_ids, first, last),
        )


def _part(entries: tuple[T, ...] | None, first: int, last: int) -> tuple[T, ...] | None:
    return None if entries is None else entries[first:last]
