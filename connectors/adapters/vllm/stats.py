"""What vLLM logs and exports of a tier: counters since the last report, and the present fill."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvcache.connectors.tier_stats import TierStats

COUNTERS = {
    "stored_pages": "Pages stored in the tier.",
    "loaded_pages": "Pages loaded from the tier: prefill that was not computed.",
    "stored_bytes": "Bytes stored in the tier.",
    "loaded_bytes": "Bytes loaded from the tier.",
    "evicted_pages": "Pages that the tier evicted.",
    "dropped_store_pages": "Pages not stored: no room, or given away before their turn.",
    "failed_pages": "Pages whose load or store failed: a miss.",
    "gone_pages": "Pages that were missing or damaged when they were to be loaded.",
    "late_transfers": "Transfers that were not done at their deadline.",
    "unknown_ids": "Results and requests that nobody knew.",
}
"""Fields of `TierStats` that only grow, and what they count."""

GAUGES = {
    "used_bytes": "Bytes of the tier that are in use.",
    "capacity_bytes": "Bytes of the tier.",
    "pinned_pages": "Pages that lookups and transfers hold.",
}
"""Fields that go up and down."""


class TierReport(KVConnectorStats):
    """Plain numbers: what was added since the last one, and what is."""

    data: dict[str, dict[str, int]]
    """`{"counters": {name: added}, "gauges": {name: value}}`."""

    def reset(self) -> None:
        """Nothing was counted."""
        self.data = {"counters": {}, "gauges": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Counters add up; of the fill the later one counts."""
        for kind in ("counters", "gauges"):
            mine = self.data.setdefault(kind, {})
            for name, value in other.data.get(kind, {}).items():
                mine[name] = value + (mine.get(name, 0) if kind == "counters" else 0)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log: one flat dictionary."""
        return {**self.data.get("counters", {}), **self.data.get("gauges", {})}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data.get("counters") and not self.data.get("gauges")


class Reporter:
    """Makes reports of counters that only grow."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def report(self, stats: TierStats) -> TierReport | None:
        """What was added since the last one; None if nothing."""
        added = {}
        for name in COUNTERS:
            value = getattr(stats, name)
            if value > self._told.get(name, 0):
                added[name] = value - self._told.get(name, 0)
                self._told[name] = value
        if not added:
            return None
        gauges = {name: getattr(stats, name) for name in GAUGES}
        return TierReport({"counters": added, "gauges": gauges})


class TierMetrics(KVConnectorPromMetrics):
    """`kvcache:tier_...` of each engine."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: self._counter_cls(f"kvcache:tier_{name}", text, labelnames=self._labelnames)
            for name, text in COUNTERS.items()
        } | {
            name: self._gauge_cls(
                f"kvcache:tier_{name}",
                text,
                labelnames=self._labelnames,
                multiprocess_mode="mostrecent",
            )
            for name, text in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes up a report. What another version of this file counts is ignored."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, added in transfer_stats_data.get("counters", {}).items():
            if name in COUNTERS:
                self._metrics[name].labels(*labels).inc(added)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            if name in GAUGES:
                self._metrics[name].labels(*labels).set(value)
