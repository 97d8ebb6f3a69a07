"""Recurrent layers of a model by their shapes, and the state that they become on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.core.specs import GroupSpec, RecurrentState
from kvcache.presets.serving import Serving

_CONVOLUTION_BYTES = 2
"""Element of a convolution's state: the model's own type (bfloat16), vLLM's mamba_cache_dtype auto."""


@dataclass(frozen=True, kw_only=True)
class DeltaAttention:
    """Kimi delta attention (KDA): a state of `head_dim` x `head_dim` a head; q, k, v convolved."""

    layers: int
    heads: int
    head_dim: int
    kernel: int
    state_element_bytes: int = 4

    def dealt(self) -> dict[str, int]:
        """Heads."""
        return {"heads of the group kda": self.heads}

    def groups(self, serving: Serving) -> tuple[GroupSpec, ...]:
        """One group, `kda`."""
        heads = serving.heads_of_rank(self.heads)
        return _recurrent(
            "kda",
            self.layers,
            state_elements=heads * self.head_dim * self.head_dim,
            element_bytes=self.state_element_bytes,
            convolved=(self.kernel - 1) * 3 * heads * self.head_dim,
        )


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Gated delta network (GDN): a state of `key_dim` x `value_dim` for each value head."""

    layers: int
    value_heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    state_element_bytes: int = 4

    def dealt(self) -> dict[str, int]:
        """Heads of values and of keys."""
        return {
            "value heads of the group gdn": self.value_heads,
            "key heads of the group gdn": self.key_heads,
        }

    def groups(self, serving: Serving) -> tuple[GroupSpec, ...]:
        """One group, `gdn`."""
        values = serving.heads_of_rank(self.value_heads)
        keys = serving.heads_of_rank(self.key_heads)
        channels = 2 * keys * self.key_dim + values * self.value_dim
        return _recurrent(
            "gdn",
            self.layers,
            state_elements=values * self.key_dim * self.value_dim,
            element_bytes=self.state_element_bytes,
            convolved=(self.kernel - 1) * channels,
        )


@dataclass(frozen=True, kw_only=True)
class StateSpace:
    """Mamba2: a state of `head_dim` x `state_dim` a head; its input, B and C convolved."""

    layers: int
    heads: int
    head_dim: int
    state_dim: int
    state_groups: int
    kernel: int
    state_element_bytes: int = 4

    def dealt(self) -> dict[str, int]:
        """Heads, and groups that share B and C."""
        return {
            "heads of the group mamba2": self.heads,
            "state groups (n_groups) of the group mamba2": self.state_groups,
        }

    def groups(self, serving: Serving) -> tuple[GroupSpec, ...]:
        """One group, `mamba2`."""
        heads = serving.heads_of_rank(self.heads)
        shared = serving.heads_of_rank(self.state_groups)
        channels = heads * self.head_dim + 2 * shared * self.state_dim
        return _recurrent(
            "mamba2",
            self.layers,
            state_elements=heads * self.head_dim * self.state_dim,
            element_bytes=self.state_element_bytes,
            convolved=(self.kernel - 1) * channels,
        )


def _recurrent(
    name: str, layers: int, *, state_elements: int, element_bytes: int, convolved: int
) -> tuple[GroupSpec, ...]:
    size = state_elements * element_bytes + convolved * _CONVOLUTION_BYTES
    return (RecurrentState(name=name, layers=layers, state_bytes_per_layer=size),)
