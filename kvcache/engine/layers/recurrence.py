"""Layers with a state of fixed size: a short convolution, then the gated delta rule, over state pages.

Tokens run one by one, so that a state does not depend on how a prompt was cut. A state page holds,
for each layer, the state `[H, K, V]` and the convolution's last inputs `[taps - 1, channels]`.

Shapes: T = tokens, N = requests, H = value heads, K = key dimension, V = value dimension,
C = channels of the convolution: queries, keys, values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvcache.core.specs import RecurrentState
from kvcache.engine.batch import StatesPlan
from kvcache.engine.kv_format import FP32, Rows
from kvcache.engine.layers.attend import agreed
from kvcache.engine.layers.base import GroupUse
from kvcache.engine.ops import Ops, delta_rule, short_convolution, unit
from kvcache.engine.shards import Shards, even_heads, heads_of_rank, of_heads

UNIT_EPSILON = 1e-6
"""Of the norm of queries and keys, as in flash-linear-attention's l2norm."""


class States(NamedTuple):
    """One layer's part of the state pages."""

    matrix: Tensor
    """`[pages, H, K, V]`."""
    tail: Tensor
    """`[pages, taps - 1, C]`."""


class Inputs(NamedTuple):
    """What each token brings."""

    qkv: Tensor
    """`[T, C]`, before the convolution."""
    decay: Tensor
    """`[T, H, 1]`, or `[T, H, K]`: what is left of the state, or of each of its rows."""
    rate: Tensor
    """`[T, H]`: how far the state is corrected."""

    def one_each(self, rows: slice) -> Inputs:
        """`[N, 1, ...]`: these rows are requests."""
        return Inputs(*(part[rows].unsqueeze(1) for part in self))

    def sequence(self, rows: slice) -> Inputs:
        """`[1, T, ...]`: these rows are one request's tokens."""
        return Inputs(*(part[rows].unsqueeze(0) for part in self))


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Sizes of one layer."""

    key_heads: int
    """A divisor of the value heads; each serves as many neighbouring ones."""
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """Tokens that the convolution reads, its own among them."""

    @property
    def channels(self) -> int:
        """C."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def of_rank(self, rank: int, tp: int) -> tuple[Heads, slice, slice]:
        """Sizes of a tensor-parallel rank's part; its key heads and its value heads."""
        keys = heads_of_rank(self.key_heads, rank, tp, "key heads")
        values = even_heads(self.value_heads, rank, tp)
        part = replace(
            self, key_heads=keys.stop - keys.start, value_heads=values.stop - values.start
        )
        return part, keys, values

    def channels_of(self, values: Tensor, keys: slice, heads: slice, dim: int = 0) -> Tensor:
        """Of all channels in a dimension those of some key heads and value heads."""
        width = self.key_heads * self.key_dim
        query, key, value = values.tensor_split([width, 2 * width], dim=dim)
        parts = [of_heads(part, keys, self.key_heads, dim) for part in (query, key)]
        return torch.cat([*parts, of_heads(value, heads, self.value_heads, dim)], dim)

    def group(self, name: str, shards: Shards) -> GroupUse:
        """The states of one layer. They are float32 whatever the format of K and V."""
        part, *_ = self.of_rank(0, shards.tp)
        elements = part.value_heads * part.key_dim * part.value_dim
        elements += (part.taps - 1) * part.channels
        spec = RecurrentState(
            name=name, layers=1, state_bytes_per_layer=elements * FP32.element_bytes
        )
        return GroupUse(spec, FP32, parts=shards.tp)

    def states(self, parts: Sequence[Rows]) -> States:
        """The two parts of each page."""
        matrix = (self.value_heads, self.key_dim, self.value_dim)
        tail = (self.taps - 1, self.channels)
        pages = parts[0].pages
        split = pages.shape[1] - tail[0] * tail[1]
        return States(
            torch.unflatten(pages[:, :split], 1, matrix), torch.unflatten(pages[:, split:], 1, tail)
        )

    def advance(self, state: States, inputs: Inputs, taps: Tensor) -> Tensor:
        """Tokens `[N, T, ...]` of N requests through their states, in place: `[N, T, H, V]`."""
        x = torch.cat((state.tail, inputs.qkv), 1)
        state.tail.copy_(x[:, x.shape[1] - state.tail.shape[1] :])
        keys = self.key_heads * self.key_dim
        query, key, value = short_convolution(x, taps).tensor_split([keys, 2 * keys], dim=-1)
        repeats = self.value_heads // self.key_heads
        query, key = (
            unit(torch.unflatten(part, -1, (self.key_heads, -1)), UNIT_EPSILON).repeat_interleave(
                repeats, dim=2
            )
            for part in (query, key)
        )
        value = torch.unflatten(value, -1, (self.value_heads, -1))
        query = query * self.key_dim**-0.5
        return delta_rule(state.matrix, query, key, value, inputs.decay, inputs.rate)


def recur(
    heads: Heads,
    taps: Tensor,
    inputs: Inputs,
    plan: StatesPlan,
    caches: Sequence[States],
    ops: Ops,
) -> Tensor:
    """Run every request from its source page to its target pages: `[T, H, V]`. `taps [taps, C]`.

    Context-parallel ranks all do so, each with its own pages.
    """
    return agreed([_recur(heads, taps, inputs, plan, states) for states in caches], ops)


def _recur(heads: Heads, taps: Tensor, inputs: Inputs, plan: StatesPlan, states: States) -> Tensor:
    mixed = inputs.qkv.new_empty((len(inputs.qkv), heads.value_heads, heads.value_dim))
    if len(plan.targets):
        old = States(*(_from(part, plan.sources, plan.fresh) for part in states))
        mixed[plan.rows] = heads.advance(old, inputs.one_each(plan.rows), taps)[:, 0]
        for part, new in zip(states, old, strict=True):
            part[plan.targets] = new
    for span in plan.spans:
        state = States(*(part.new_zeros((1, *part.shape[1:])) for part in states))
        if span.source >= 0:
            for part, pages in zip(state, states, strict=True):
                part[0] = pages[span.source]
        for rows, page in span.segments:
            mixed[rows] = heads.advance(state, inputs.sequence(rows), taps)[0]
            for part, pages in zip(state, states, strict=True):
                pages[page] = part[0]
    return mixed


def _from(pages: Tensor, sources: Tensor, fresh: Tensor) -> Tensor:
    """A copy of the source pages, zero where a request is fresh."""
    return torch.where(fresh.view(-1, *[1] * (pages.dim() - 1)), 0.0, pages[sources])
