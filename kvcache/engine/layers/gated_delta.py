"""Gated delta network (GDN): linear attention with one decay a head and token.

The recurrence is that of arXiv 2412.06464; sizes, convolution and gates are those of Qwen3-Next and
Qwen3.5 (`Qwen3_5GatedDeltaNet` of transformers, against which it is tested).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvcache.engine.kv_format import KVFormat, Rows
from kvcache.engine.layers.base import BlockSizes, GroupUse, LayerStep
from kvcache.engine.layers.recurrence import Heads, Inputs, States, recur
from kvcache.engine.ops import Ops, rms_norm, sigmoid, softplus
from kvcache.engine.shards import Shards, of_heads

NAME = "gdn"


@dataclass(frozen=True, eq=False)
class GatedDelta:
    """One layer. Shapes: H = value heads, V = value dimension, C = `heads.channels`."""

    heads: Heads
    qkv: Tensor
    """`[C, width]`: queries, keys, values."""
    taps: Tensor
    """`[taps, C]` of the convolution, the last for the token itself."""
    decay: Tensor
    """`[H, width]`: decay = exp(-speed softplus(this + bias))."""
    decay_bias: Tensor
    """`[H]`."""
    speed: Tensor
    """`[H]`, above 0; checkpoints have its logarithm, `A_log`."""
    rate: Tensor
    """`[H, width]`, before the sigmoid."""
    gate: Tensor
    """`[H * V, width]`: output gate, before the silu."""
    norm: Tensor
    """`[V]`: weight of the norm before the output gate."""
    out: Tensor
    """`[width, H * V]`."""
    epsilon: float
    rotation: ClassVar[None] = None

    def groups(
        self, block_tokens: BlockSizes, kv: KVFormat, shards: Shards
    ) -> tuple[GroupUse, ...]:
        """One group of states, `gdn`."""
        del block_tokens, kv
        return (self.heads.group(NAME, shards),)

    def shard(self, rank: int, tp: int) -> GatedDelta:
        """Its heads, and what makes their inputs."""
        if tp == 1:
            return self
        heads, keys, values = self.heads.of_rank(rank, tp)
        count = self.heads.value_heads
        return replace(
            self,
            heads=heads,
            qkv=self.heads.channels_of(self.qkv, keys, values),
            taps=self.heads.channels_of(self.taps, keys, values, dim=1),
            decay=self.decay[values],
            decay_bias=self.decay_bias[values],
            speed=self.speed[values],
            rate=self.rate[values],
            gate=of_heads(self.gate, values, count),
            out=of_heads(self.out, values, count, dim=1),
        )

    def cache(self, parts: Sequence[Rows]) -> States:
        """The layer's states."""
        return self.heads.states(parts)

    def forward(self, x: Tensor, step: LayerStep, caches: Sequence[States], ops: Ops) -> Tensor:
        """Run every request from its source page to its target pages."""
        speed = softplus(ops.linear(x, self.decay) + self.decay_bias) * self.speed
        inputs = Inputs(
            qkv=ops.linear(x, self.qkv),
            decay=torch.exp(-speed).unsqueeze(-1),
            rate=sigmoid(ops.linear(x, self.rate)),
        )
        mixed = recur(self.heads, self.taps, inputs, step.states(), caches, ops)
        gate = ops.linear(x, self.gate).reshape(mixed.shape)
        normed = rms_norm(mixed, self.norm, self.epsilon)
        return ops.linear((normed * (gate * sigmoid(gate))).flatten(1), self.out)
