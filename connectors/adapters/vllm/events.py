"""KV events of our tiers, as vLLM publishes them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvcache.connectors.adapters.vllm.groups import CachedGroup, CachedGroups
from kvcache.connectors.adapters.vllm.requests import DIGEST_BYTES, Tracked, key_of
from kvcache.connectors.key_events import KeyEvent, KeysLost, KeysRemoved

MAX_REMEMBERED = 1 << 16
"""Blocks on their way into the tier whose tokens are known; of others the key alone is told."""


MAX_TAGGED = 1 << 20
"""Keys in the tier whose group is known, 150 bytes each; older ones count as the first group's."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What of a block a request told."""

    group: CachedGroup
    parent: BlockHash | None
    tokens: list[int]
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None
    session: str | None


class TierEvents:
    """Turns a tier's reports of keys into vLLM's events of blocks.

    Args:
        groups: those that the tier keeps.
        medium: the tier's, where its reports name none.
    """

    def __init__(self, groups: CachedGroups, medium: str) -> None:
        self._groups = groups
        self._medium = medium
        self._hash_bytes = DIGEST_BYTES
        self._told: OrderedDict[bytes, _Told] = OrderedDict()
        self._group_of: OrderedDict[bytes, CachedGroup] = OrderedDict()
        """Of keys that have a tag."""

    def tell(self, group: CachedGroup, tokens: int, r: Tracked) -> None:
        """A block of `r`, which ends after so many tokens, is to be stored."""
        request, unit = r.request, self._groups.hash_tokens
        begin = (tokens - 1) // group.step * group.step
        self._hash_bytes = r.digests.hash_bytes
        lora = request.lora_request
        self._told[key_of(request.block_hashes[tokens // unit - 1], group.tag)] = _Told(
            group,
            request.block_hashes[begin // unit - 1] if begin else None,
            list(request.all_token_ids[begin:tokens]),
            lora.adapter_id if lora else None,
            lora.name if lora else None,
            generate_block_hash_extra_keys(request, begin, tokens, 0)[0],
            request.session_id,
        )
        while len(self._told) > MAX_REMEMBERED:
            self._told.popitem(last=False)

    def events(self, reports: Iterable[KeyEvent]) -> Iterator[KVCacheEvent]:
        """In their order, each key once."""
        for report in reports:
            if isinstance(report, KeysLost):
                yield AllBlocksCleared()
                continue
            raw = report.keys.tobytes()
            keys = [raw[i : i + DIGEST_BYTES] for i in range(0, len(raw), DIGEST_BYTES)]
            medium = report.medium or self._medium
            make = self._removed if isinstance(report, KeysRemoved) else self._stored
            for key in keys:
                yield make(key, report.group, medium)

    def _hash(self, key: bytes, group: CachedGroup) -> Any:
        own = key_of(key, group.tag)  # without its tag
        return maybe_convert_block_hash(BlockHash(own[: self._hash_bytes]))

    def _any(self, tier_group: int) -> CachedGroup:
        """Of a key that was there before this process: as if it were of the first of them."""
        return next(group for group in self._groups.groups if group.tier_group == tier_group)

    def _removed(self, key: bytes, tier_group: int, medium: str) -> BlockRemoved:
        group = self._group_of.get(key) or self._any(tier_group)
        return BlockRemoved(
            block_hashes=[self._hash(key, group)],
            medium=medium,
            group_idx=group.id,
            locality="LOCAL",
        )

    def _stored(self, key: bytes, tier_group: int, medium: str) -> BlockStored:
        told = self._told.get(key)
        group = told.group if told else self._group_of.get(key) or self._any(tier_group)
        if group.tag:
            self._group_of[key] = group
            if len(self._group_of) > MAX_TAGGED:
                self._group_of.popitem(last=False)
        return BlockStored(
            block_hashes=[self._hash(key, group)],
            parent_block_hash=None
            if told is None or told.parent is None
            else maybe_convert_block_hash(told.parent),
            token_ids=told.tokens if told else [],
            block_size=len(told.tokens) if told else group.step,
            lora_id=told.lora_id if told else None,
            medium=medium,
            lora_name=told.lora_name if told else None,
            extra_keys=to_event_extra_keys(told.extra_keys and [told.extra_keys]) if told else None,
            group_idx=group.id,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window_tokens,
            locality="LOCAL",
            session_id=told.session if told else None,
        )
