"""A linear-attention layer with the gated delta rule: one state of fixed size for each request.

Shapes: T = tokens, N = requests, H = heads, K = key dimension, V = value dimension. The state is
`[H, K, V]`. Tokens run one by one, so that a state does not depend on how a prompt was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvcache.engine.batch import StatesPlan
from kvcache.engine.ops import Ops, delta_rule, rms_norm, sigmoid


@dataclass(frozen=True, eq=False)
class DeltaRule:
    """One layer of recurrent state."""

    qkv: Tensor
    """`[H * (2 * K + V), width]`: queries, keys, values."""
    gates: Tensor
    """`[H * (2 + V), width]`: decay, write rate, output gate."""
    decay_bias: Tensor
    """`[H]`: decay = sigmoid(gate + bias)."""
    norm: Tensor
    """`[V]`: weight of the norm before the output gate."""
    out: Tensor
    """`[width, H * V]`."""
    heads: int
    key_dim: int
    value_dim: int
    epsilon: float

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one layer's state."""
        return (self.heads, self.key_dim, self.value_dim)

    def forward(self, x: Tensor, plan: StatesPlan, states: Tensor, ops: Ops) -> Tensor:
        """Run every request from its source page to its target pages. `states [pages, H, K, V]`."""
        operands = self._project(x, ops)
        mixed = torch.empty_like(operands[2])
        if len(plan.targets):
            at = slice(plan.rows.start, plan.rows.stop)
            old = torch.where(plan.fresh[:, None, None, None], 0.0, states[plan.sources])
            mixed[at] = delta_rule(old, *(o[at, None] for o in operands))[:, 0]
            states[plan.targets] = old
        for span in plan.spans:
            state = states.new_zeros((1, *self.state_shape))
            if span.source >= 0:
                state[0] = states[span.source]
            for rows, page in span.segments:
                mixed[rows] = delta_rule(state, *(o[None, rows] for o in operands))[0]
                states[page] = state[0]
        return self._output(x, mixed, ops)

    def _project(self, x: Tensor, ops: Ops) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Query, key `[T, H, K]`, value `[T, H, V]`, decay, rate `[T, H]`."""
        qkv = ops.linear(x, self.qkv).view(len(x), self.heads, -1)
        query, key, value = qkv.tensor_split([self.key_dim, 2 * self.key_dim], dim=-1)
        query, key = (F.normalize(part, dim=-1, eps=self.epsilon) for part in (query, key))
        gates = ops.linear(x, self.gates[: 2 * self.heads])
        decay, rate = gates.tensor_split(2, dim=-1)
        return query, key, value, sigmoid(decay + self.decay_bias), sigmoid(rate)

    def _output(self, x: Tensor, mixed: Tensor, ops: Ops) -> Tensor:
        """Norm, gate, projection of `mixed [T, H, V]`."""
        gate = ops.linear(x, self.gates[2 * self.heads :]).view_as(mixed)
        normed = rms_norm(mixed, self.norm, self.epsilon)
        return ops.linear((normed * gate * sigmoid(gate)).flatten(1), self.out)
