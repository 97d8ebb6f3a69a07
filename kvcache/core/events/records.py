"""KV events: what a pool tells the outside about its keys, field by field as vLLM 0.33.0 has it.

Field names, order and defaults are those of `vllm/distributed/kv_events.py` (vLLM 0.33.0), so that
its consumers read ours. One field is our own and last: `namespace`, set for foreign keys alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from kvcache.core.errors import InputError
from kvcache.core.values import shown

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"

BlockHash: TypeAlias = bytes | int
"""A key on the wire: 32 bytes from us; vLLM sends bytes or, by default, the low 64 bits as int."""

ExtraKeys: TypeAlias = tuple[object, ...] | None
"""What one block's key covers beside its tokens: LoRA name, (media id, offset), cache salt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A run of blocks got keys: `block_hashes[i]` follows `parent_block_hash` by i + 1 blocks.

    `token_ids` has `len(block_hashes) * block_size` tokens, or none where the publisher does not
    know them. (Sparse streams of vLLM 0.33.0 break this: see docs/events.md.)
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    """The key of the block before the first; None at the start of a request."""
    token_ids: tuple[int, ...]
    block_size: int
    """Tokens per block."""
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[ExtraKeys, ...] | None = None
    """One entry per block, or None if no block has any."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    """Tokens."""
    locality: str | None = None
    """LOCAL or REMOTE, seen from the publisher."""
    ownership: str | None = None
    session_id: str | None = None
    """The session whose request wrote the blocks; others may share them."""
    lookahead_token_ids: tuple[tuple[int, ...], ...] | None = None
    namespace: bytes | None = None
    """32 bytes for foreign keys: equal digests of two namespaces are different keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """These keys are gone from one group of one medium. Order means nothing."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    namespace: bytes | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Forget every key of the publisher, in every group and medium.

    They are gone, or events were lost and the publisher starts over: then some are still there, and
    are not told again until they are stored again. So a consumer never believes too much.
    """


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
EVENT_KINDS = frozenset({BlockStored, BlockRemoved, AllBlocksCleared})


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """The events of one step, in the order in which they happened."""

    ts: float
    """Seconds since the epoch."""
    events: tuple[Event, ...]
    data_parallel_rank: int | None = None


def int_hash(key: BlockHash) -> int:
    """The low 64 bits of a key, as vLLM sends them by default. `InputError`: it is no key."""
    if isinstance(key, bytes):
        return int.from_bytes(key, "big") & (2**64 - 1)
    if _is_key(type(key)):
        return int(key)
    raise InputError(f"a key is {shown(key)}: it must be bytes or an int")


def require_event(event: object) -> None:
    """`InputError` unless it is one of the three kinds of events."""
    if type(event) not in EVENT_KINDS:
        several = isinstance(event, list | tuple)
        raise InputError(
            f"{shown(event)} ({type(event).__name__}) is no KV event"
            + (": call this for each event of the list" if several else "")
        )


def without_salts(event: Event) -> Event:
    """The event without the cache salts of its `extra_keys`: texts there, but for the adapter's name.

    `InputError`: it is no event, or has other `extra_keys`.
    """
    require_event(event)
    if not isinstance(event, BlockStored) or event.extra_keys is None:
        return event
    require_extra_keys(event)
    named = event.lora_name is not None  # then each entry begins with it
    entries: list[ExtraKeys] = []
    for keys in event.extra_keys:
        kept = [
            key
            for i, key in enumerate(keys or ())
            if not isinstance(key, str) or (named and i == 0 and key == event.lora_name)
        ]
        entries.append(tuple(kept) or None)
    return replace(event, extra_keys=tuple(entries) if any(entries) else None)


def require_keys(event: BlockStored | BlockRemoved) -> None:
    """`InputError` unless `block_hashes` is a tuple, or a list, of keys, and the parent one."""
    keys: object = event.block_hashes
    if not isinstance(keys, tuple | list) or not all(map(_is_key, set(map(type, keys)))):
        raise InputError(
            f"{type(event).__name__}.block_hashes is {shown(keys)}: it must be a tuple of bytes or"
            " ints"
        )
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        if parent is not None and not _is_key(type(parent)):
            raise InputError(
                f"BlockStored.parent_block_hash is {shown(parent)}: it must be bytes, an int or None"
            )


def require_extra_keys(event: BlockStored) -> None:
    """`InputError` unless `extra_keys` is None, or has a tuple, a list or None for each block."""
    found: object = event.extra_keys
    if found is not None and not (
        isinstance(found, tuple | list)
        and all(keys is None or isinstance(keys, tuple | list) for keys in found)
    ):
        raise InputError(
            f"BlockStored.extra_keys is {shown(found)}: it must be None, or a tuple with a tuple or"
            " None for each block"
        )


def _is_key(kind: type) -> bool:
    return kind in {bytes, int} or issubclass(kind, np.integer)


def with_int_hashes(event: Event) -> Event:
    """The event with every key as `int_hash`. `InputError`: it is no event, or has other keys."""
    require_event(event)
    if isinstance(event, AllBlocksCleared):
        return event
    require_keys(event)
    hashes = tuple(map(int_hash, event.block_hashes))
    if isinstance(event, BlockRemoved):
        return replace(event, block_hashes=hashes)
    parent = event.parent_block_hash
    return replace(
        event,
        block_hashes=hashes,
        parent_block_hash=None if parent is None else int_hash(parent),
    )
