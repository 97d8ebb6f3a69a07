"""A stack of layers over paged storage: each mixes tokens in its own way, then a gated MLP.

Dealt out to tensor-parallel ranks, layers and MLPs are smaller ones whose results are added up, in the
order of the ranks; what is not dealt out (norms, embedding, head, residuals), all ranks would compute
alike, and it is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch
from torch import Tensor
from torch.nn.functional import embedding

from kvcache.core.errors import ConfigError
from kvcache.core.hashing import Fingerprint
from kvcache.core.layout import Geometry
from kvcache.engine import ops
from kvcache.engine.batch import Batch
from kvcache.engine.kv_format import Rows, find_kv_format
from kvcache.engine.layers.base import GroupUse, LayerStep, Mixer
from kvcache.engine.shards import UNSHARDED, Shards, tier_geometry
from kvcache.engine.storage import PagedStorage

_PLACES = {"full": 0, "span": 1, "state": 2}


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer: `x += mixer(norm(x)); x += mlp(norm(x))`."""

    mixer_norm: Tensor
    mixer: Mixer
    mlp_norm: Tensor
    gate_up: Tensor
    """`[2 * hidden, width]`."""
    down: Tensor
    """`[width, hidden]`."""

    def shard(self, rank: int, tp: int) -> Layer:
        """The part of a tensor-parallel rank."""
        if tp == 1:
            return self
        gate, up = (half.tensor_split(tp)[rank] for half in self.gate_up.chunk(2))
        return replace(
            self,
            mixer=self.mixer.shard(rank, tp),
            gate_up=torch.cat((gate, up)),
            down=self.down.tensor_split(tp, dim=1)[rank].contiguous(),
        )


@dataclass(frozen=True, eq=False)
class Weights:
    """All weights of a model, fp32. Shared by every `Model` made from them."""

    name: str
    """Of the model and its weights: part of every cache key's root, as `digest` is."""
    embed: Tensor
    """`[vocabulary, width]`."""
    layers: Sequence[Layer]
    norm: Tensor
    head: Tensor
    """`[vocabulary, width]`; may be `embed`."""
    epsilon: float
    context_tokens: int
    digest: str = ""
    """Of what the weights were made from, where the name does not tell it."""


class Model:
    """Weights with page sizes and a format of K and V.

    Layers that keep the same kind of thing in the same shape share a cache group. Groups that keep
    every token come first, then windows, then states.

    Args:
        block_tokens: of every group, except those of
        group_blocks: block sizes by the name of the group.
        kv_dtype: format of K and V in the pages, one of `kv_format.KV_FORMATS`. What is computed is
            float32; recurrent and pooling states are too.
        exact: compute so that no result depends on how a prompt was cut, or on what else is in the
            batch. Slow: for tests.
        shards: ranks that the layers, and what they keep, are dealt out to.

    Attributes:
        geometry: the groups, as each rank has them.
        tier_geometry: the same with pages of all ranks: for connectors. Unsharded: `geometry`.
        readings: how layers read each of them.
        vocab_size: token ids are below this.
        context_tokens: longest context.

    Raises:
        ConfigError: sizes that cannot be, or a name that is unknown.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        block_tokens: int = 16,
        group_blocks: Mapping[str, int] | None = None,
        kv_dtype: str = "fp32",
        exact: bool = False,
        shards: Shards = UNSHARDED,
    ) -> None:
        self.weights = weights
        self.name = weights.name
        self.kv_dtype = kv_dtype
        self.vocab_size = len(weights.embed)
        self.context_tokens = weights.context_tokens
        self.ops = ops.EXACT if exact else ops.FAST
        self.shards = shards
        self._parts = [
            [layer.shard(t, shards.tp) for t in range(shards.tp)] for layer in weights.layers
        ]
        """Of each layer what each tensor-parallel rank has."""
        kv, blocks = find_kv_format(kv_dtype), dict(group_blocks or {})
        of_layer = [
            layer.mixer.groups(lambda name: blocks.get(name, block_tokens), kv, shards)
            for layer in weights.layers
        ]
        counts: dict[GroupUse, int] = {}
        for use in (use for uses in of_layer for use in uses):
            counts[use] = counts.get(use, 0) + 1
        self._uses = sorted(counts, key=lambda use: _PLACES[use.spec.rules.kind])
        if unknown := set(blocks) - {use.spec.name for use in self._uses}:
            raise ConfigError(
                f"group_blocks names {sorted(unknown)}: the groups are"
                f" {[use.spec.name for use in self._uses]}"
            )
        self.groups: list[tuple[int, ...]] = [
            tuple(self._uses.index(use) for use in uses) for uses in of_layer
        ]
        """Of each layer, by index in the geometry."""
        self.readings = [use.reading for use in self._uses]
        self.geometry = Geometry(
            tuple(
                replace(use.spec, name=name, layers=counts[use])  # type: ignore[type-var]
                for name, use in zip(
                    _unique(use.spec.name for use in self._uses), self._uses, strict=True
                )
            ),
            state_grid_tokens=block_tokens,
        )
        self.parts = [use.parts for use in self._uses]
        """Of each group: different contents that tensor-parallel ranks have in a page."""
        self.tier_geometry = tier_geometry(self.geometry, shards, self.parts)

    def fingerprint(self) -> Fingerprint:
        """What the manager hashes into every key: these weights, and K and V as they are stored."""
        digest = self.weights.digest
        name = f"{self.name}-{digest}" if digest else self.name
        return Fingerprint(model=name, kv_dtype=self.kv_dtype)

    def caches(self, storage: PagedStorage, rank: int = 0) -> list[object]:
        """What each layer's forward takes of a rank: its part of its groups' pages."""
        heads, _ = self.shards.places(rank)
        parts = [
            iter([Rows(pages, use.format) for pages in storage.layers(g, use.format.carrier)])
            for g, use in enumerate(self._uses)
        ]
        return [
            of_ranks[heads].mixer.cache([next(parts[g]) for g in groups])
            for of_ranks, groups in zip(self._parts, self.groups, strict=True)
        ]

    def forward(self, batch: Batch, caches: Sequence[Sequence[object]]) -> Tensor:
        """Logits `[chunks, vocabulary]` of each chunk's last token. Writes pages.

        Args:
            caches: of each rank, by layer.
        """
        w, linear, dcp = self.weights, self.ops.linear, self.shards.dcp
        x = embedding(batch.tokens, w.embed)
        turns: dict[int, Tensor] = {}
        for i, (parts, groups) in enumerate(zip(self._parts, self.groups, strict=True)):
            layer = w.layers[i]
            step = LayerStep(
                self._turns(layer.mixer, batch.positions, turns), [batch.groups[g] for g in groups]
            )
            normed = ops.rms_norm(x, layer.mixer_norm, w.epsilon)
            mixed = [
                part.mixer.forward(
                    normed, step, [caches[t * dcp + c][i] for c in range(dcp)], self.ops
                )
                for t, part in enumerate(parts)
            ]
            x += reduce(add, mixed)
            normed = ops.rms_norm(x, layer.mlp_norm, w.epsilon)
            x += reduce(
                add,
                [linear(self.ops.swiglu(linear(normed, p.gate_up)), p.down) for p in parts],
            )
        return linear(ops.rms_norm(x[batch.last], w.norm, w.epsilon), w.head)

    @staticmethod
    def _turns(mixer: Mixer, positions: Tensor, known: dict[int, Tensor]) -> Tensor | None:
        """The rows of the layer's table; layers with one table share them."""
        table = mixer.rotation
        if table is None:
            return None
        if id(table) not in known:
            known[id(table)] = table[positions]
        return known[id(table)]


def _unique(names: Iterator[str]) -> Iterator[str]:
    """`name`, `name-2`, `name-3`, ...: groups with equal names differ in sizes."""
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}-{seen[name]}"
