"""What the two sides of the vLLM connector tell each other: each step once in each direction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvcache.connectors.base import Transfer, TransferResult


@dataclass
class StepPlan(KVConnectorMetadata):
    """To every worker: what to move in this step."""

    loads: list[tuple[str, Transfer]] = field(default_factory=list)
    """With the request that waits for it, as vLLM names it."""
    stores: list[Transfer] = field(default_factory=list)
    """Of blocks that this step's forward pass has written at the latest."""


@dataclass
class StepResults(KVConnectorWorkerMetadata):
    """From the workers: what has ended. An item is good where it is good at every rank."""

    results: list[tuple[TransferResult, int]] = field(default_factory=list)
    """With the number of ranks that it is of."""
    unknown: int = 0
    """Results of the tier that nobody waits for."""
    given_up: bool = False
    """A rank has closed its tier: nothing is moved any more."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Those of two ranks, or of groups of ranks."""
        if not isinstance(other, StepResults):
            return self
        merged = {(result.id, result.late): (result, ranks) for result, ranks in self.results}
        for result, ranks in other.results:
            key = result.id, result.late
            merged[key] = merge(*merged[key], result, ranks) if key in merged else (result, ranks)
        return StepResults(
            list(merged.values()),
            self.unknown + other.unknown,
            self.given_up or other.given_up,
        )


def merge(
    one: TransferResult, of_one: int, other: TransferResult, of_other: int
) -> tuple[TransferResult, int]:
    """One result for the ranks of both."""
    same = len(one.ok) == len(other.ok)
    gone = [r.gone for r in (one, other) if r.gone is not None and len(r.gone) == len(one.ok)]
    result = replace(
        one,
        ok=one.ok & other.ok if same else one.ok * 0,
        error=one.error or other.error,
        seconds=max(one.seconds, other.seconds),
        bytes=one.bytes + other.bytes,
        gone=gone[0] | gone[-1] if gone else None,
        far_seconds=max(one.far_seconds, other.far_seconds),
    )
    return result, of_one + of_other
