"""Kimi delta attention (KDA): the gated delta rule with a decay for each row of the state.

Formulas: arXiv 2510.26692; sizes, convolution and gates are those of `KimiLinearDeltaAttention` of
transformers, against which it is tested.
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

NAME = "kda"


@dataclass(frozen=True, eq=False)
class KimiDelta:
    """One layer. Shapes: H = heads, D = their dimension, of keys and of values, C = 3 * H * D."""

    heads: Heads
    qkv: Tensor
    """`[C, width]`: queries, keys, values."""
    taps: Tensor
    """`[taps, C]` of the convolution, the last for the token itself."""
    decay_in: Tensor
    """`[D, width]`; with `decay_out [H * D, D]`: decay = exp(-speed softplus(these + bias))."""
    decay_out: Tensor
    decay_bias: Tensor
    """`[H * D]`."""
    speed: Tensor
    """`[H]`, above 0; checkpoints have its logarithm, `A_log`."""
    rate: Tensor
    """`[H, width]`, before the sigmoid."""
    gate_in: Tensor
    """`[D, width]`; with `gate_out [H * D, D]`: output gate, before the sigmoid."""
    gate_out: Tensor
    norm: Tensor
    """`[D]`: weight of the norm before the output gate."""
    out: Tensor
    """`[width, H * D]`."""
    epsilon: float
    rotation: ClassVar[None] = None

    def groups(
        self, block_tokens: BlockSizes, kv: KVFormat, shards: Shards
    ) -> tuple[GroupUse, ...]:
        """One group of states, `kda`."""
        del block_tokens, kv
        return (self.heads.group(NAME, shards),)

    def shard(self, rank: int, tp: int) -> KimiDelta:
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
            decay_out=of_heads(self.decay_out, values, count),
            decay_bias=of_heads(self.decay_bias, values, count),
            speed=self.speed[values],
            rate=self.rate[values],
            gate_out=of_heads(self.gate_out, values, count),
            out=of_heads(self.out, values, count, dim=1),
        )

    def cache(self, parts: Sequence[Rows]) -> States:
        """The layer's states."""
        return self.heads.states(parts)

    def forward(self, x: Tensor, step: LayerStep, caches: Sequence[States], ops: Ops) -> Tensor:
        """Run every request from its source page to its target pages."""
        forget = ops.linear(ops.linear(x, self.decay_in), self.decay_out)
        forget = softplus(forget + self.decay_bias).view(len(x), self.heads.value_heads, -1)
        inputs = Inputs(
            qkv=ops.linear(x, self.qkv),
            decay=torch.exp(-(forget * self.speed[:, None])),
            rate=sigmoid(ops.linear(x, self.rate)),
        )
        mixed = recur(self.heads, self.taps, inputs, step.states(), caches, ops)
        gate = ops.linear(ops.linear(x, self.gate_in), self.gate_out).reshape(mixed.shape)
        normed = rms_norm(mixed, self.norm, self.epsilon)
        return ops.linear((normed * sigmoid(gate)).flatten(1), self.out)
