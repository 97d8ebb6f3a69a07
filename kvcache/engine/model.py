"""A stack of layers over paged storage: attention or state, then a gated MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import embedding

from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention, GroupSpec, RecurrentState
from kvcache.engine import ops
from kvcache.engine.batch import AttentionPlan, Batch, StatesPlan
from kvcache.engine.layers_attention import Attention
from kvcache.engine.layers_state import DeltaRule
from kvcache.engine.storage import PagedStorage

ATTENTION = "attention"
STATE = "state"


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer: `x += mixer(norm(x)); x += mlp(norm(x))`."""

    mixer_norm: Tensor
    mixer: Attention | DeltaRule
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
    rotation: Tensor
    """`ops.rotation_table` of `context_tokens` positions."""


class Model:
    """Weights with a page size.

    Attributes:
        geometry: at most one group of attention layers and one of state layers.
        vocab_size: token ids are below this.
        context_tokens: longest context.
    """

    def __init__(self, weights: Weights, *, block_tokens: int = 16) -> None:
        self.weights = weights
        self.name = weights.name
        self.vocab_size = len(weights.embed)
        self.context_tokens = weights.context_tokens
        mixers = [layer.mixer for layer in weights.layers]
        attention = [m for m in mixers if isinstance(m, Attention)]
        state = [m for m in mixers if isinstance(m, DeltaRule)]
        groups: list[GroupSpec] = []
        if attention:
            groups.append(
                FullAttention(
                    name=ATTENTION,
                    layers=len(attention),
                    kv_heads=attention[0].kv_heads,
                    head_dim=attention[0].head_dim,
                    block_tokens=block_tokens,
                    element_bytes=weights.embed.element_size(),
                )
            )
        if state:
            elements = state[0].heads * state[0].key_dim * state[0].value_dim
            groups.append(
                RecurrentState(
                    name=STATE,
                    layers=len(state),
                    state_bytes_per_layer=elements * weights.embed.element_size(),
                )
            )
        self.geometry = Geometry(tuple(groups), state_grid_tokens=block_tokens)
        self.heads_per_kv = attention[0].heads_per_kv if attention else 1
        self._state_shape = state[0].state_shape if state else ()

    def caches(self, storage: PagedStorage) -> list[Tensor]:
        """Each layer's view of its group's pages, in the order of the layers."""
        views = {
            g: iter(
                storage.attention(g)
                if isinstance(spec, FullAttention)
                else storage.states(g, self._state_shape)
            )
            for g, spec in enumerate(self.geometry.groups)
        }
        return [next(views[self._group(layer)]) for layer in self.weights.layers]

    def forward(self, batch: Batch, caches: Sequence[Tensor]) -> Tensor:
        """Logits `[chunks, vocabulary]` of each chunk's last token. Writes pages."""
        w = self.weights
        x = embedding(batch.tokens, w.embed)
        rotation = w.rotation[batch.positions]
        for layer, cache in zip(w.layers, caches, strict=True):
            plan = batch.groups[self._group(layer)]
            normed = ops.rms_norm(x, layer.mixer_norm, w.epsilon)
            if isinstance(layer.mixer, Attention):
                assert isinstance(plan, AttentionPlan)
                x += layer.mixer.forward(normed, rotation, plan, cache)
            else:
                assert isinstance(plan, StatesPlan)
                x += layer.mixer.forward(normed, plan, cache)
            normed = ops.rms_norm(x, layer.mlp_norm, w.epsilon)
            x += ops.linear(ops.swiglu(ops.linear(normed, layer.gate_up)), layer.down)
        return ops.linear(ops.rms_norm(x[batch.last], w.norm, w.epsilon), w.head)

    def _group(self, layer: Layer) -> int:
        return 0 if isinstance(layer.mixer, Attention) else len(self.geometry.groups) - 1
