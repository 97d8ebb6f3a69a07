"""From what the manager reports to events, in order: one BlockStored for each run of blocks.

    runs:    stored g0 [a b]   stored g0 [c]   removed g1 [x]   removed g1 [y]
    events:  BlockStored(a b c)                BlockRemoved(x y)

A run is contiguous by contract. Runs that continue each other are joined, long ones cut
(`pieces`); removals between two other reports are grouped by group and namespace; nothing is sent
for an empty run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.core.errors import InvariantError
from kvcache.core.events.labels import Labels, NamespaceLabel, RequestLabel, extra_keys
from kvcache.core.events.pieces import pieces
from kvcache.core.events.records import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
)

DIGEST_BYTES = 32
MAX_REMOVED_HASHES = 65_536
"""Of one event; more are sent in several."""


class StoredRun(NamedTuple):
    """Blocks of one request and group, one after the other, that got their keys."""

    group: int
    handle: int
    namespace: int
    parent: bytes | None
    """Key of the group's block before the first, 32 bytes; None if the first starts at token 0."""
    keys: NDArray[np.uint8]
    """[n, 32]"""
    ends: NDArray[np.int64]
    """[n]: tokens of the request up to the end of each block."""
    tokens: NDArray[np.int32]
    """[n * block_tokens], or empty where keys are foreign and tokens not known."""


class RemovedRun(NamedTuple):
    """Keys that no page of a group carries any more."""

    group: int
    namespace: int
    keys: NDArray[np.uint8]
    """[n, 32]"""


class ClearedRun(NamedTuple):
    """No page of any group carries a key any more.

    The wire has no word for less: one namespace or one tier cleared is reported as `RemovedRun`s.
    """


Run: TypeAlias = StoredRun | RemovedRun | ClearedRun

_NO_NAMESPACE = NamespaceLabel()
_NO_REQUEST = RequestLabel()


def to_events(runs: Iterable[Run], labels: Labels, *, medium: str = MEDIUM_GPU) -> list[Event]:
    """The events of `runs`, in order; nothing is kept. Cost: linear in keys and tokens.

    `InvariantError` if a run is not what its fields promise: a fault of whoever reported it.
    """
    events: list[Event] = []
    removed: dict[tuple[int, int], list[bytes]] = {}
    run_on: list[StoredRun] = []  # runs that continue each other, not yet an event

    def flush() -> None:
        if run_on:
            events.extend(pieces(_stored(run_on, labels, medium)))
            run_on.clear()
        events.extend(_removals(removed, labels, medium))
        removed.clear()

    for run in runs:
        if isinstance(run, ClearedRun):
            flush()
            events.append(AllBlocksCleared())
        elif not len(run.keys):
            continue
        elif isinstance(run, RemovedRun):
            if run_on:
                flush()
            removed.setdefault((run.group, run.namespace), []).extend(_digests(run.keys))
        else:
            if removed or (run_on and not _continues(run_on[-1], run, labels)):
                flush()
            run_on.append(run)
    flush()
    return events


def _continues(before: StoredRun, run: StoredRun, labels: Labels) -> bool:
    return (
        (before.group, before.handle, before.namespace) == (run.group, run.handle, run.namespace)
        and int(before.ends[-1]) + labels.groups[run.group].block_tokens == int(run.ends[0])
        and before.keys[-1].tobytes() == run.parent
        and bool(len(before.tokens)) == bool(len(run.tokens))
    )


def _digests(keys: NDArray[np.uint8]) -> list[bytes]:
    if keys.ndim != 2 or keys.shape[1] != DIGEST_BYTES:
        raise InvariantError(f"keys of a run have shape {keys.shape}: it must be [n, 32]")
    raw = keys.tobytes()
    return [raw[i : i + DIGEST_BYTES] for i in range(0, len(raw), DIGEST_BYTES)]


def _stored(runs: list[StoredRun], labels: Labels, medium: str) -> BlockStored:
    first = runs[0]
    group = labels.groups[first.group]
    namespace = labels.namespaces.get(first.namespace, _NO_NAMESPACE)
    request = labels.requests.get(first.handle, _NO_REQUEST)
    block = group.block_tokens
    for run in runs:
        _check_stored(run, block)
    hashes = tuple(key for run in runs for key in _digests(run.keys))
    start = int(first.ends[0]) - block
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=first.parent,
        token_ids=tuple(np.concatenate([run.tokens for run in runs]).tolist()),
        block_size=block,
        medium=medium,
        lora_name=namespace.lora_name,
        extra_keys=extra_keys(start, len(hashes), block, namespace, request),
        group_idx=first.group,
        kv_cache_spec_kind=group.kind,
        kv_cache_spec_sliding_window=group.window_tokens,
        session_id=request.session_id,
        namespace=namespace.foreign,
    )


def _check_stored(run: StoredRun, block: int) -> None:
    n = len(run.keys)
    start = int(run.ends[0]) - block
    if len(run.ends) != n or not np.array_equal(run.ends, start + block * np.arange(1, n + 1)):
        raise InvariantError(
            f"a run of {n} blocks of {block} tokens in group {run.group} is not contiguous:"
            f" its blocks end at {run.ends[:8].tolist()}"
        )
    if len(run.tokens) not in {0, n * block}:
        raise InvariantError(
            f"a run of {n} blocks of {block} tokens in group {run.group} has {len(run.tokens)}"
            " tokens"
        )
    if (run.parent is None) != (start == 0):
        raise InvariantError(
            f"a run of group {run.group} that starts at token {start}"
            f" has {'no' if run.parent is None else 'a'} parent"
        )


def _removals(
    removed: dict[tuple[int, int], list[bytes]], labels: Labels, medium: str
) -> Iterator[BlockRemoved]:
    for (group, namespace), keys in removed.items():
        foreign = labels.namespaces.get(namespace, _NO_NAMESPACE).foreign
        for first in range(0, len(keys), MAX_REMOVED_HASHES):
            yield BlockRemoved(
                block_hashes=tuple(keys[first : first + MAX_REMOVED_HASHES]),
                medium=medium,
                group_idx=group,
                namespace=foreign,
            )
