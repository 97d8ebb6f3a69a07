"""How long a step takes: a roofline over its prefill chunks and decodes, and their contexts.

    step = max(multiply, read weights) + max(attend, read and write KV) + constant

Both terms are of one rank, in FLOPs over what arithmetic reaches and bytes over what memory
reaches; communication between ranks is not in it. Source of the form: Williams, Waterman and
Patterson, "Roofline" (CACM 52(4), 2009), once for the products with weights, where all tokens of the
batch share what is read, and once for attention, where each request reads its own.

A chunk of n tokens that ends at token e reads, of each kind of group, once a step:

| group | bytes | pairs of query and key |
|---|---|---|
| full, latent, compressed | KV of e tokens | sum of t for its tokens t |
| window W | KV of min(e, W - 1 + n) tokens | sum of min(t, W) |
| with index keys, S selected | index keys of e, KV of min(e, n * S) | sum of min(t, S); all, by the index |
| recurrent | the state, and writes it | 8 FLOPs an element and token |

Of routed experts, each token takes k of E at random: n tokens read 1 - (1 - k/E)^n of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.core.layout import Geometry
from kvcache.core.specs import (
    Compressed,
    FullAttention,
    GroupSpec,
    IndexedAttention,
    LatentAttention,
    LatentWindow,
    SlidingWindow,
)
from kvcache.engine.simulated_hardware import Hardware
from kvcache.presets.weights import Weights

STATE_FLOPS = 8
"""Of an element of a recurrent state for one token: decay, read by the key, correction, read by the
query, two each (arXiv 2412.06464, equation of the gated delta rule)."""

STATE_ELEMENT_BYTES = 4

ENDLESS = 2**62
"""As a window: none."""


class GroupCost(NamedTuple):
    """What one request costs in one group of a rank."""

    kv_bytes: float
    """Read for each token of context that is attended to, written for each new one."""
    index_bytes: float
    """Read for each token of context, whether it is attended to or not."""
    pair_flops: float
    """For each query and token of context that it attends to."""
    index_flops: float
    """For each query and token of context."""
    reach: int
    """Tokens before and with its own that a query can attend to."""
    selects: bool
    """It picks `reach` of them all, other queries others; else the last ones."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What steps are made of, in numbers: see `Roofline.costs`."""

    flops: NDArray[np.float64]
    """Products with weights."""
    weight_bytes: NDArray[np.float64]
    attention_flops: NDArray[np.float64]
    kv_bytes: NDArray[np.float64]


class Roofline:
    """Seconds of steps of one model on one rank.

    Args:
        geometry: the groups of one rank.
        weights: figures of the whole model.
        hardware: one rank's device.
        tp: ranks that share weights and query heads.
    """

    def __init__(
        self, geometry: Geometry, weights: Weights, hardware: Hardware, *, tp: int = 1
    ) -> None:
        self.geometry = geometry
        self.weights = weights
        self.hardware = hardware
        self._tp = tp
        self._groups = [
            group_cost(group, weights, tp)
            for group, rules in zip(geometry.groups, geometry.rules, strict=True)
            if rules.kind in {"full", "span"}
        ]
        self._state_bytes = sum(
            group.page_bytes
            for group, rules in zip(geometry.groups, geometry.rules, strict=True)
            if rules.kind == "state"
        )

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights on one rank."""
        return self.weights.parameters * self.weights.parameter_bytes / self._tp

    def costs(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> StepCosts:
        """Of steps whose chunks compute tokens [start, end): both `[..., chunks]`, a step a row.

        O(chunks * groups).
        """
        new = (ends - starts).astype(np.float64)
        tokens = new.sum(-1)
        weights, tp = self.weights, self._tp
        share = weights.chosen / weights.experts
        touched = 1.0 - (1.0 - share) ** tokens if weights.routed else 0.0
        read = weights.parameters - weights.routed * (1.0 - touched)
        attention_flops = new * (STATE_FLOPS * self._state_bytes / STATE_ELEMENT_BYTES)
        kv_bytes = np.full_like(new, 2.0 * self._state_bytes)
        for group in self._groups:
            flops, size = _attention(group, starts, ends, new)
            attention_flops += flops
            kv_bytes += size
        return StepCosts(
            flops=2.0 * weights.multiplied * tokens / tp,
            weight_bytes=read * weights.parameter_bytes / tp * np.ones_like(tokens),
            attention_flops=attention_flops.sum(-1),
            kv_bytes=kv_bytes.sum(-1),
        )

    def seconds(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.float64]:
        """How long steps take; arguments as of `costs`."""
        costs, hardware = self.costs(starts, ends), self.hardware
        flops = hardware.flops * hardware.flops_share
        memory = hardware.memory * hardware.memory_share
        dense = np.maximum(costs.flops / flops, costs.weight_bytes / memory)
        attention = np.maximum(costs.attention_flops / flops, costs.kv_bytes / memory)
        return dense + attention + hardware.step_seconds


def group_cost(group: GroupSpec, weights: Weights, tp: int) -> GroupCost:
    """Costs of a group with blocks on one rank, from its shapes."""
    spans = group.rules.block_tokens
    stored = group.page_bytes / spans
    heads = -(-weights.query_heads // tp)
    if isinstance(group, FullAttention | SlidingWindow):
        reach = group.window if isinstance(group, SlidingWindow) else ENDLESS
        flops = 2.0 * 2 * group.head_dim * heads * group.layers
        return GroupCost(stored, 0.0, flops * _own(group, spans), 0.0, reach, selects=False)
    if isinstance(group, IndexedAttention):
        layers = group.indexed_layers or group.layers
        keys = float(layers * group.index_dim * group.index_element_bytes)
        flops = 2.0 * 2 * group.head_dim * heads * group.layers
        return _indexed(group, weights, flops, keys, layers)
    if isinstance(group, LatentAttention):
        dims = weights.latent_dims or 2 * group.rank + group.rope_dim
        flops = 2.0 * dims * heads * group.layers
        return _indexed(
            group, weights, flops, float(group.layers * group.index_bytes), group.layers
        )
    if isinstance(group, Compressed):
        flops = 2.0 * weights.latent_dims * heads * group.layers / group.ratio
        index = group.layers * group.index_bytes / group.ratio
        return _indexed(group, weights, flops, index, group.layers, ratio=group.ratio)
    if isinstance(group, LatentWindow):
        flops = 2.0 * weights.latent_dims * heads * group.layers
        return GroupCost(stored, 0.0, flops, 0.0, group.window, selects=False)
    # Pooling states and whatever else keeps the last tokens: bytes alone.
    reach = group.rules.lead_tokens + 1 if group.rules.kind == "span" else ENDLESS
    return GroupCost(stored, 0.0, 0.0, 0.0, reach, selects=False)


def _own(group: GroupSpec, spans: int) -> float:
    """Share of the tokens that the rank has: 1 / DCP."""
    return float(getattr(group, "block_tokens", spans)) / spans


def _indexed(
    group: IndexedAttention | LatentAttention | Compressed,
    weights: Weights,
    pair_flops: float,
    index_bytes: float,
    index_layers: int,
    *,
    ratio: int = 1,
) -> GroupCost:
    """Attention that keeps every token, and reads a selection of them where it has index keys."""
    spans = group.rules.block_tokens
    own, stored = _own(group, spans), group.page_bytes / spans
    if not (index_bytes and weights.selected):
        return GroupCost(stored, 0.0, pair_flops * own, 0.0, ENDLESS, selects=False)
    index_flops = 2.0 * weights.index_dims * index_layers / ratio
    return GroupCost(
        stored - index_bytes * own,
        index_bytes * own,
        pair_flops * own,
        index_flops * own,
        weights.selected * ratio,
        selects=True,
    )


def _attention(
    group: GroupCost,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    new: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """FLOPs and bytes of each chunk."""
    every = _pairs(ends) - _pairs(starts)
    written = new * (group.kv_bytes + group.index_bytes)
    if group.reach == ENDLESS:
        return every * group.pair_flops, ends * group.kv_bytes + written
    pairs = _pairs_within(ends, group.reach) - _pairs_within(starts, group.reach)
    if group.selects:
        read = np.minimum(ends, new * group.reach)
        return (
            pairs * group.pair_flops + every * group.index_flops,
            read * group.kv_bytes + ends * group.index_bytes + written,
        )
    read = np.minimum(ends, new + (group.reach - 1))
    return pairs * group.pair_flops, read * group.kv_bytes + written


def _pairs(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Pairs of the first `tokens` queries with the tokens up to each."""
    n = tokens.astype(np.float64)
    return n * (n + 1.0) / 2.0


def _pairs_within(tokens: NDArray[np.int64], reach: int) -> NDArray[np.float64]:
    """The same, with at most `reach` tokens for each query."""
    inside = np.minimum(tokens, reach)
    return _pairs(inside) + (tokens - inside).astype(np.float64) * reach
