"""The figures of a replay: sums over the counted requests, and what they say as JSON values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcache.bench.replay_settings import ReplaySettings
from kvcache.bench.traces import TraceRequest
from kvcache.core.explanation import CAUSES
from kvcache.core.layout import Geometry
from kvcache.core.records import UNLIMITED


@dataclass(slots=True)
class Served:
    """What one request got."""

    hit_tokens: int
    ideal_tokens: int
    oracle_tokens: int
    policy_states: int
    """States that the retention policy had written."""
    end_of_turn_states: int
    """States that got their key when the request ended."""
    lost: dict[str, int]


@dataclass(slots=True)
class Totals:
    """Sums over the counted requests."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: int = 0
    ideal_tokens: int = 0
    oracle_tokens: int = 0
    policy_states: int = 0
    end_of_turn_states: int = 0
    lost: Counter[str] = field(default_factory=Counter)

    def add(self, request: TraceRequest, served: Served) -> None:
        """Count a request."""
        self.requests += 1
        self.prompt_tokens += request.prompt_tokens
        self.output_tokens += request.output_tokens
        self.hit_tokens += served.hit_tokens
        self.ideal_tokens += served.ideal_tokens
        self.oracle_tokens += served.oracle_tokens
        self.policy_states += served.policy_states
        self.end_of_turn_states += served.end_of_turn_states
        self.lost.update(served.lost)

    def values(self, *, oracle: bool) -> dict[str, Any]:
        """Rates, and where the other tokens went."""
        prompt, requests = max(1, self.prompt_tokens), max(1, self.requests)
        rate = self.hit_tokens / prompt
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rate": rate,
            "ideal_hit_rate": self.ideal_tokens / prompt,
            "oracle_hit_rate": self.oracle_tokens / prompt if oracle else None,
            "hit_rate_by_source": {"device": rate},
            "lost_tokens_by_cause": {cause: self.lost[cause] for cause in CAUSES},
            "checkpoints_per_request": self.policy_states / requests,
            "end_of_turn_checkpoints_per_request": self.end_of_turn_states / requests,
        }


def setting_values(path: Path, settings: ReplaySettings, geometry: Geometry) -> dict[str, Any]:
    """What was replayed, and how."""
    interval = settings.retention_tokens
    return {
        "trace": str(path),
        "preset": settings.preset,
        "tp": settings.tp,
        "dcp": settings.dcp,
        "kv_dtype": settings.model.kv_format(settings.kv_dtype),
        "block_tokens": settings.block_tokens,
        "grid_tokens": geometry.grid_tokens,
        "pool_tokens": "inf" if settings.pool_tokens is None else settings.pool_tokens,
        "retention": "dense" if interval is None else interval,
        "movable": settings.movable,
        "seed": settings.seed,
        "notes": settings.model.kv_notes(settings.kv_dtype),
    }


def arena_values(slabs: int, geometry: Geometry) -> dict[str, Any]:
    """How the arena is laid out."""
    names = [group.name for group in geometry.groups]
    per_slab = [geometry.pages_per_slab[c] for c in geometry.class_of_group]
    return {
        "pool_slabs": "inf" if slabs == UNLIMITED else slabs,
        "slab_bytes": geometry.slab_bytes,
        "pages_per_slab": dict(zip(names, per_slab, strict=True)),
        "bytes_per_page": {group.name: group.page_bytes for group in geometry.groups},
    }
