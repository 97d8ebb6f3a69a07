"""What is to be stored: blocks that got a hash, in the order in which they were computed.

A block that waits for its turn is not held: vLLM may free it and give it away. Its hash is gone then,
which is looked at when its turn comes; until then its bytes are those of the hash.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, make_block_hash_with_group_id

from kvcache.connectors.adapters.vllm.groups import CachedGroup, CachedGroups
from kvcache.connectors.adapters.vllm.presence import NotKnownError, Presence
from kvcache.connectors.adapters.vllm.requests import DIGEST_BYTES, Tracked, key_of
from kvcache.connectors.base import KEYED_DTYPE, KeyedPages, TierScheduler, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

STORE_BYTES = 64 << 20
"""Most bytes of one store: its blocks are held until all of it is done."""

MAX_STORES = 8
"""Stores in flight; further blocks wait unheld, and are skipped if they are given away meanwhile."""

MAX_WAITING = 1 << 20
"""Blocks that wait; more are not stored."""


@dataclass(slots=True)
class _Waiting:
    tier_group: int
    block: KVCacheBlock
    hash: BlockHashWithGroupId
    """The block is worth storing as long as it has this one."""
    key: bytes
    """`DIGEST_BYTES` of it."""


class Stores:
    """Finds blocks to be stored and plans their stores.

    Args:
        tier: where they go.
        groups: those that it keeps.
        pool: vLLM's blocks.
        prompt_only: blocks that hold generated tokens are not stored.
        told: called with group, tokens and request of each block that is to be stored.
    """

    def __init__(
        self,
        tier: TierScheduler,
        groups: CachedGroups,
        pool: BlockPool,
        *,
        prompt_only: bool,
        told: Callable[[CachedGroup, int, Tracked], None] | None,
    ) -> None:
        self._tier = tier
        self._groups = groups
        self._pool = pool
        self._prompt_only = prompt_only
        self._told = told
        self._by_id = {group.id: group for group in groups.groups}
        self._waiting: deque[_Waiting] = deque()
        self._page_bytes = [group.page_bytes for group in groups.geometry.groups]
        self._fine = groups.align_tokens < max(group.span for group in groups.groups)
        self.gone_blocks = 0
        """Given away before their turn came, or one too many."""

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        """Nothing that waits is stored any more."""
        self._waiting.clear()

    # ---- what to store -------------------------------------------------------------------------

    def offer(self, r: Tracked, tables: Sequence[Sequence[KVCacheBlock]]) -> None:
        """Blocks of attention that are complete since the last call. O(new blocks)."""
        request = r.request
        done = request.num_computed_tokens - request.num_output_placeholders
        if self._prompt_only:
            done = min(done, request.num_prompt_tokens)
        done = min(done, r.digests.tokens)
        for g, group in enumerate(self._groups.groups):
            if group.rules.kind == "state":
                continue
            span, table = group.span, tables[group.id]
            end = min(done // span, len(table))
            for i in range(r.offered[g], end):
                self._add(group, table[i], (i + 1) * span, r)
            r.offered[g] = max(r.offered[g], end)
        if self._fine and not r.tail_offered:
            self._offer_tail(r, tables, done)

    def _offer_tail(self, r: Tracked, tables: Sequence[Sequence[KVCacheBlock]], done: int) -> None:
        """The block in which the prompt ends, up to there: vLLM gives it a hash of its own."""
        unit = self._groups.hash_tokens
        most = min(r.request.num_prompt_tokens, r.digests.tokens)
        if done < most // unit * unit:
            return
        r.tail_offered = True
        for group in self._groups.groups:
            span, table = group.span, tables[group.id]
            if group.rules.kind != "full":
                continue
            for tokens in {most // unit * unit, (most - 1) // unit * unit}:
                if tokens > 0 and tokens % span and tokens // span < len(table):
                    self._add(group, table[tokens // span], tokens, r)

    def offer_missing(
        self,
        r: Tracked,
        tables: Sequence[Sequence[KVCacheBlock]],
        begin: int,
        present: Presence,
    ) -> None:
        """Blocks on the device up to `begin` that the tier has not, or not any more. O(blocks)."""
        for g, group in enumerate(self._groups.groups):
            if group.rules.kind == "state":
                continue
            last = begin // group.span
            first = group.rules.need_begin(begin) // group.span if group.rules.kind == "span" else 0
            with suppress(NotKnownError):
                missing = np.flatnonzero(present.has(g, first, last) == 0) + first
                for i in missing.tolist():
                    self._add(group, tables[group.id][i], (i + 1) * group.span, r)

    def offer_states(self, r: Tracked, offers: Sequence[tuple[int, int, int]]) -> None:
        """States that vLLM hands over: (group, block, tokens)."""
        most = r.digests.tokens
        if self._prompt_only:
            most = min(most, r.request.num_prompt_tokens)
        for number, block, tokens in offers:
            group = self._by_id.get(number)
            if group is not None and 0 < tokens <= most and tokens % group.step == 0:
                self._add(group, self._pool.blocks[block], tokens, r)

    def _add(self, group: CachedGroup, block: KVCacheBlock, tokens: int, r: Tracked) -> None:
        number = group.id
        raw = r.request.block_hashes[tokens // self._groups.hash_tokens - 1]
        if block.is_null:  # out of the window; it may be in the pool still
            kept = self._pool.get_cached_block(raw, [number])
            if not kept:
                return
            block = kept[0]
        name = make_block_hash_with_group_id(raw, number)
        if not self._has(block, name):
            return
        if len(self._waiting) >= MAX_WAITING:
            self.gone_blocks += 1
            return
        self._waiting.append(_Waiting(group.tier_group, block, name, key_of(raw, group.tag)))
        if self._told is not None:
            self._told(group, tokens, r)

    def _has(self, block: KVCacheBlock, name: BlockHashWithGroupId) -> bool:
        others = self._pool.cached_block_hashes_by_block
        return block.block_hash == name or name in others.get(block.block_id, ())

    # ---- stores --------------------------------------------------------------------------------

    def plan(self, in_flight: int, namespace: bytes) -> list[tuple[Transfer, list[KVCacheBlock]]]:
        """Stores of what waits, as many as may be in flight; their blocks are held once more each."""
        planned: list[tuple[Transfer, list[KVCacheBlock]]] = []
        while self._waiting and in_flight + len(planned) < MAX_STORES:
            chosen = self._chunk()
            if not chosen:
                continue
            items = np.zeros(len(chosen), KEYED_DTYPE)
            items["group"] = [it.tier_group for it in chosen]
            items["page"] = [it.block.block_id for it in chosen]
            keys = np.frombuffer(b"".join(it.key for it in chosen), np.uint8)
            items["digest"] = keys.reshape(-1, DIGEST_BYTES)
            plan = self._tier.plan_store(KeyedPages(items, [namespace]))
            if plan is not None:
                transfer, rows = plan
                held = [chosen[row].block for row in rows.tolist()]
                self._pool.touch(held)
                planned.append((transfer, held))
        return planned

    def _chunk(self) -> list[_Waiting]:
        """The next ones that are worth storing still."""
        chosen: list[_Waiting] = []
        size = 0
        while self._waiting and size < STORE_BYTES:
            it = self._waiting.popleft()
            if self._has(it.block, it.hash):
                chosen.append(it)
                size += self._page_bytes[it.tier_group]
            else:
                self.gone_blocks += 1
        return chosen
