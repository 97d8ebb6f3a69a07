"""What a replay that takes time is asked for: hardware, limits of a step, a host tier; and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcache.bench.replay_settings import (
    STEP_TOKENS,
    ReplaySettings,
    arena_bytes,
    kv_bytes_per_grid,
)
from kvcache.bench.traces import TraceRequest
from kvcache.core.errors import ConfigError
from kvcache.core.values import human_bytes
from kvcache.engine.simulated_hardware import Hardware
from kvcache.engine.simulated_roofline import Roofline
from kvcache.presets.weights import WEIGHTS, Weights

MEMORY_SHARE = 0.9
"""Of a device's memory, for weights and pool: vLLM's gpu_memory_utilization by default."""

MAX_REQUESTS = 256
"""Running at a time, by default: vLLM's max_num_seqs."""

MAX_SPEED = 1_000_000.0

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class TimingSettings:
    """How time passes in a replay.

    Args:
        hardware: the device of each rank.
        hardware_name: as it was asked for.
        weights: of the model; None: those of the preset of its name.
        token_budget: most tokens of one step.
        max_requests: most requests that run or load at one time.
        host_tokens: a host tier of the bytes that the KV of so many tokens takes; None: no tier.

    Raises:
        ConfigError: a limit out of range.
    """

    hardware: Hardware
    hardware_name: str
    weights: Weights | None = None
    token_budget: int = STEP_TOKENS
    max_requests: int = MAX_REQUESTS
    host_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_requests < 1:
            raise ConfigError(f"--max-requests is {self.max_requests}: it must be above 0")
        if self.token_budget < self.max_requests:
            raise ConfigError(
                f"--token-budget is {self.token_budget}, below --max-requests ({self.max_requests}):"
                " one prefill could wait for ever behind the decodes; raise it or lower --max-requests"
            )

    def values(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {
            "hardware": self.hardware_name,
            "token_budget": self.token_budget,
            "max_requests": self.max_requests,
            "host_tokens": self.host_tokens,
        }

    def roofline(self, replay: ReplaySettings) -> Roofline:
        """Times of the replayed model's steps. `ConfigError`: its weights are not known."""
        weights = self.weights or WEIGHTS.get(replay.preset)
        if weights is None:
            raise ConfigError(
                f"--hardware needs to know the weights of {replay.preset}, which is no preset: give"
                " --weights parameters=8.03G,query_heads=32, with active=, experts= and chosen= for"
                " routed experts"
            )
        return Roofline(replay.geometry, weights, self.hardware, tp=replay.tp)


def pool_tokens_beside(roofline: Roofline) -> int:
    """Tokens of KV that fit into a device beside the weights.

    Raises:
        ConfigError: not even the weights fit, or no page.
    """
    capacity = roofline.hardware.capacity
    left = capacity * MEMORY_SHARE - roofline.weight_bytes
    geometry = roofline.geometry
    tokens = int(left) // kv_bytes_per_grid(geometry) * geometry.grid_tokens if left > 0 else 0
    if arena_bytes(tokens, geometry) < geometry.slab_bytes:
        raise ConfigError(
            f"{MEMORY_SHARE:.0%} of a device's memory ({human_bytes(capacity)}) has no room beside the"
            f" weights of one rank ({human_bytes(roofline.weight_bytes)}): raise --tp, give"
            " --pool-tokens, or --hardware with more capacity="
        )
    return tokens


@dataclass(slots=True)
class Times:
    """Seconds of the counted requests."""

    first_token: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    queue: list[float] = field(default_factory=list)
    per_output_token: list[float] = field(default_factory=list)
    begun: float = float("inf")
    ended: float = 0.0

    def add(
        self, request: TraceRequest, *, started: float, first_token: float, finished: float
    ) -> None:
        """A request that has ended."""
        arrival = request.arrival_seconds
        self.begun, self.ended = min(self.begun, arrival), max(self.ended, finished)
        self.first_token.append(first_token - arrival)
        self.latency.append(finished - arrival)
        self.queue.append(started - arrival)
        if request.output_tokens > 1:
            self.per_output_token.append((finished - first_token) / (request.output_tokens - 1))

    def values(self) -> dict[str, Any]:
        """Percentiles, in seconds."""
        return {
            "ttft_seconds": spread(self.first_token),
            "latency_seconds": spread(self.latency),
            "queue_seconds": spread(self.queue),
            "seconds_per_output_token": spread(self.per_output_token),
        }

    @property
    def seconds(self) -> float:
        """From the first counted arrival to the last counted end."""
        return max(self.ended - self.begun, 0.0)


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, percentiles and maximum; None where there are no values."""
    if not values:
        return dict.fromkeys(("mean", *(f"p{p}" for p in PERCENTILES), "max"))
    array = np.array(values)
    found = {f"p{p}": float(np.percentile(array, p)) for p in PERCENTILES}
    return {"mean": float(array.mean()), **found, "max": float(array.max())}
