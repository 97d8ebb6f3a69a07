"""A stack of layers over paged storage: each mixes tokens in its own way, then a gated MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import embedding

from kvcache.core.errors import ConfigError
from kvcache.core.hashing import Fingerprint
from kvcache.core.layout import Geometry
from kvcache.engine import ops
from kvcache.engine.batch import Batch
from kvcache.engine.kv_format import Rows, find_kv_format
from kvcache.engine.layers.base import GroupUse, LayerStep, Mixer
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


@dataclass(frozen=True, eq=False)
class Weights:
    """All weights of a model, fp32. Shared by every `Model` made from them."""

    name: str
    """Of the model and its weights: part of every cache key's root."""
    embed: Tensor
    """`[vocabulary, width]`."""
    layers: Sequence[Layer]
    norm: Tensor
    head: Tensor
    """`[vocabulary, width]`; may be `embed`."""
    epsilon: float
    context_tokens: int


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

    Attributes:
        geometry: the groups.
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
    ) -> None:
        self.weights = weights
        self.name = weights.name
        self.kv_dtype = kv_dtype
        self.vocab_size = len(weights.embed)
        self.context_tokens = weights.context_tokens
        self.ops = ops.EXACT if exact else ops.FAST
        self._mixers = [layer.mixer for layer in weights.layers]
        kv, blocks = find_kv_format(kv_dtype), dict(group_blocks or {})
        of_layer = [
            mixer.groups(lambda name: blocks.get(name, block_tokens), kv) for mixer in self._mixers
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

    def fingerprint(self) -> Fingerprint:
        """What the manager hashes into every key: these weights, and K and V as they are stored."""
        return Fingerprint(model=self.name, kv_dtype=self.kv_dtype)

    def caches(self, storage: PagedStorage) -> list[object]:
        """What each layer's forward takes: its part of its groups' pages."""
        parts = [
            iter([Rows(pages, use.format) for pages in storage.layers(g, use.format.carrier)])
            for g, use in enumerate(self._uses)
        ]
        return [
            mixer.cache([next(parts[g]) for g in groups])
            for mixer, groups in zip(self._mixers, self.groups, strict=True)
        ]

    def forward(self, batch: Batch, caches: Sequence[object]) -> Tensor:
        """Logits `[chunks, vocabulary]` of each chunk's last token. Writes pages."""
        w, linear = self.weights, self.ops.linear
        x = embedding(batch.tokens, w.embed)
        turns: dict[int, Tensor] = {}
        for layer, groups, cache in zip(w.layers, self.groups, caches, strict=True):
            step = LayerStep(
                self._turns(layer.mixer, batch.positions, turns), [batch.groups[g] for g in groups]
            )
            normed = ops.rms_norm(x, layer.mixer_norm, w.epsilon)
            x += layer.mixer.forward(normed, step, cache, self.ops)
            normed = ops.rms_norm(x, layer.mlp_norm, w.epsilon)
            x += linear(self.ops.swiglu(linear(normed, layer.gate_up)), layer.down)
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
