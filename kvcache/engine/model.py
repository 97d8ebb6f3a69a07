"""A stack of layers over paged storage: attention, sliding window or state, then a gated MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import embedding

from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention, GroupSpec, RecurrentState, SlidingWindow
from kvcache.engine import ops
from kvcache.engine.batch import AttentionPlan, Batch, StatesPlan
from kvcache.engine.layers_attention import Attention
from kvcache.engine.layers_state import DeltaRule
from kvcache.engine.storage import PagedStorage

ATTENTION = "attention"
WINDOW = "window"
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


def group_name(mixer: Attention | DeltaRule) -> str:
    """Name of the cache group that a layer belongs to."""
    if isinstance(mixer, DeltaRule):
        return STATE
    return ATTENTION if mixer.window is None else WINDOW


class Model:
    """Weights with a page size.

    Args:
        exact: compute so that no result depends on how a prompt was cut, or on what else is in the
            batch. Slow: for tests.

    Attributes:
        geometry: at most one group each of attention, window and state layers.
        vocab_size: token ids are below this.
        context_tokens: longest context.
        heads_per_kv: query heads that share a KV head, the same in all layers.
    """

    def __init__(self, weights: Weights, *, block_tokens: int = 16, exact: bool = False) -> None:
        self.weights = weights
        self.name = weights.name
        self.vocab_size = len(weights.embed)
        self.context_tokens = weights.context_tokens
        self.ops = ops.EXACT if exact else ops.FAST
        groups: dict[str, list[Attention | DeltaRule]] = {}
        for layer in weights.layers:
            groups.setdefault(group_name(layer.mixer), []).append(layer.mixer)
        self.geometry = Geometry(
            tuple(
                _spec(groups[name], block_tokens, weights.embed.element_size())
                for name in (ATTENTION, WINDOW, STATE)
                if name in groups
            ),
            state_grid_tokens=block_tokens,
        )
        self._groups = {spec.name: g for g, spec in enumerate(self.geometry.groups)}
        mixers = [layer.mixer for layer in weights.layers]
        self.heads_per_kv = next((m.heads_per_kv for m in mixers if isinstance(m, Attention)), 1)
        self._state_shape = next((m.state_shape for m in mixers if isinstance(m, DeltaRule)), ())

    def caches(self, storage: PagedStorage) -> list[Tensor]:
        """Each layer's view of its group's pages, in the order of the layers."""
        views = {
            g: iter(
                storage.states(g, self._state_shape)
                if isinstance(spec, RecurrentState)
                else storage.attention(g)
            )
            for g, spec in enumerate(self.geometry.groups)
        }
        return [next(views[self.group(layer)]) for layer in self.weights.layers]

    def forward(self, batch: Batch, caches: Sequence[Tensor]) -> Tensor:
        """Logits `[chunks, vocabulary]` of each chunk's last token. Writes pages."""
        w, linear = self.weights, self.ops.linear
        x = embedding(batch.tokens, w.embed)
        rotation = w.rotation[batch.positions]
        for layer, cache in zip(w.layers, caches, strict=True):
            plan = batch.groups[self.group(layer)]
            normed = ops.rms_norm(x, layer.mixer_norm, w.epsilon)
            if isinstance(layer.mixer, Attention):
                assert isinstance(plan, AttentionPlan)
                x += layer.mixer.forward(normed, rotation, plan, cache, self.ops)
            else:
                assert isinstance(plan, StatesPlan)
                x += layer.mixer.forward(normed, plan, cache, self.ops)
            normed = ops.rms_norm(x, layer.mlp_norm, w.epsilon)
            x += linear(self.ops.swiglu(linear(normed, layer.gate_up)), layer.down)
        return linear(ops.rms_norm(x[batch.last], w.norm, w.epsilon), w.head)

    def group(self, layer: Layer) -> int:
        """Index of a layer's cache group."""
        return self._groups[group_name(layer.mixer)]


def _spec(
    mixers: Sequence[Attention | DeltaRule], block_tokens: int, element_bytes: int
) -> GroupSpec:
    """The group of layers that are alike."""
    first = mixers[0]
    if isinstance(first, DeltaRule):
        elements = first.heads * first.key_dim * first.value_dim
        return RecurrentState(
            name=STATE, layers=len(mixers), state_bytes_per_layer=elements * element_bytes
        )
    assert all(isinstance(m, Attention) and m.window == first.window for m in mixers)
    if first.window is None:
        return FullAttention(
            name=ATTENTION,
            layers=len(mixers),
            kv_heads=first.kv_heads,
            head_dim=first.head_dim,
            block_tokens=block_tokens,
            element_bytes=element_bytes,
        )
    return SlidingWindow(
        name=WINDOW,
        layers=len(mixers),
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        window=first.window,
        block_tokens=block_tokens,
        element_bytes=element_bytes,
    )
