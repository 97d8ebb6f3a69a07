"""How a tier's counters take the result of a transfer."""

from __future__ import annotations

from kvcache.connectors.base import QUEUE_FULL, Direction, TierStats, TransferResult

MAX_ERROR_KINDS = 64


def count_result(counts: TierStats, result: TransferResult, good: int, total: int) -> None:
    """A final result of which `good` of `total` items are good."""
    if result.direction is Direction.LOAD:
        counts.loaded_pages += good
        counts.loaded_bytes += result.bytes
        counts.load_seconds += result.seconds
    else:
        counts.stored_pages += good
        counts.stored_bytes += result.bytes
        counts.store_seconds += result.seconds
    count_failure(counts, result, total - good)


def count_failure(counts: TierStats, result: TransferResult, bad: int) -> None:
    """So many items of a final result are not good, and why. Kinds of errors are bounded."""
    kind = result.error.partition(":")[0]
    if kind:
        known = kind in counts.errors or len(counts.errors) < MAX_ERROR_KINDS
        name = kind if known else "other"
        counts.errors[name] = counts.errors.get(name, 0) + 1
    if kind != QUEUE_FULL:
        counts.failed_pages += bad
