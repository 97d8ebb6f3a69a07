"""Attention layers of a model by their shapes, and the cache groups that they become on one rank.

One class for each way in which layers keep something. They know nothing of pages: `groups` gives
the specs of `kvcache.core.specs` for a `Serving`. Equal layers compare equal, whatever file they
were read from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvcache.core.specs import (
    Compressed,
    FullAttention,
    GroupSpec,
    IndexedAttention,
    LatentAttention,
    LatentWindow,
    PoolingState,
    SlidingWindow,
)
from kvcache.presets.serving import Serving

_POOL_BYTES = 4
"""Element of a pooling state: float32, as vLLM's CompressorStateCache asserts."""
_SCALED = 128
"""Elements that share one float32 scale in index keys and in fp8_ds_mla rows."""


class Layers(Protocol):
    """Some layers of one model that keep the same."""

    def groups(self, serving: Serving) -> tuple[GroupSpec, ...]:
        """Their groups on one rank. `ConfigError` where the serving does not suit them."""

    def dealt(self) -> dict[str, int]:
        """What tensor parallelism deals out to the ranks, and how many there are."""


@dataclass(frozen=True, kw_only=True)
class Full:
    """MHA, GQA, MQA: K and V of every token."""

    layers: int
    kv_heads: int
    head_dim: int

    def dealt(self) -> dict[str, int]:
        """KV heads."""
        return {"KV heads of the group full": self.kv_heads}

    def groups(self, serving: Serving) -> tuple[GroupSpec, ...]:
        """One group, `full`."""
        return (
            FullAttention(
                name="full",
                layers=self.layers,
                kv_heads=serving.heads_of_rank(self.kv_heads),
                head_dim=self.head_dim,
                block_tokens=serving.block_tokens,
                element_bytes=serving.element_bytes("full"),
                dcp_shards=serving.dcp,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Window:
    """Sliding-window attention: K and V of the last `window` tokens, the query's own among them."""

    layers: int
    kv_heads: int
    head_dim: int
    window: int

    def dealt(self) -> dict[str, int]:
        """KV heads."""
        return {"KV heads of the group window": self.kv_heads}

    def groups(self, serving: Serving) -> tuple[GroupSpec, ...]:
        """One group, `window`."""
        return (
            SlidingWindow(
                name="window",
                layers=self.layers,
                kv_heads=serving.heads_of_rank(self.kv_heads),
                head_dim=self.head_dim,
                window=self.window,
                block_tokens=serving.block_tokens,
                element_bytes=serving.element_bytes("window"),
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """GQA whose queries pick blocks by index keys, which `indexed_layers` of the layers keep."""

    layers: int
    indexed_layers: int
    kv_heads: int
    head_dim: int
    index_dim: int

    def dealt(self) -> dict[str, int]:
        """KV heads."""
        return {"KV heads of the group full": self.kv_heads}

    def groups(self, serving: Serving) -> tuple[GroupSpec, ...]:
        """One group, `full`. The index keys have the format of K and V."""
        size = serving.element_bytes("full")
        return (
            IndexedAttention(
                name="full",
                layers=self.layers,
                indexed_layers=self.indexed_layers,
                kv_heads=serving.heads_of_rank(self.kv_heads),
                head_dim=self.head_dim,
                index_dim=self.index_dim,
                block_tokens=serving.block_tokens,
                element_bytes=size,
                index_element_bytes=size,
                dcp_shards=serving.dcp,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Latent:
    """MLA: a latent of `rank` elements and a rotary key of `rope_dim`, one row a token.

    With `index_dim` above 0 a lightning indexer (DeepSeek V3.2, GLM-5) keeps a key beside it: one
    byte an element and a scale, whatever the format of the row.
    """

    layers: int
    rank: int
    rope_dim: int
    index_dim: int = 0
    name: str = "mla"

    def dealt(self) -> dict[str, int]:
        """Nothing: all of it is on every rank."""
        return {}

    def groups(self, serving: Serving) -> tuple[GroupSpec, ...]:
        """One group of this name."""
        packed = self.rank + 4 * -(-self.rank // _SCALED) + 2 * self.rope_dim
        return (
            LatentAttention(
                name=self.name,
                layers=self.layers,
                block_tokens=serving.block_tokens,
                rank=self.rank,
                rope_dim=self.rope_dim,
                element_bytes=1 if serving.kv_dtype == "fp8" else 2,
                entry_bytes=packed if serving.kv_dtype == "fp8_ds_mla" else 0,
                index_bytes=_index_bytes(self.index_dim),
                dcp_shards=serving.dcp,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class CompressedLatent:
    """DeepSeek V4: `windows` layers with a latent window, most of which also pool tokens to entries.

    `light` layers make an entry of `light_ratio` tokens, overlapping by as many, with an index key;
    `heavy` ones of `heavy_ratio` tokens. Every rank holds all of it.
    """

    windows: int
    light: int
    heavy: int
    head_dim: int
    rope_dim: int
    index_dim: int
    window: int
    light_ratio: int = 4
    heavy_ratio: int = 128
    window_block_tokens: int = 64

    def dealt(self) -> dict[str, int]:
        """Nothing: all of it is on every rank."""
        return {}

    def groups(self, serving: Serving) -> tuple[GroupSpec, ...]:
        """`light`, `heavy`, `window` and the pooling states, those that have layers.

        `block_tokens` must be a multiple of the heavy ratio. All hits end on multiples of it, where
        a heavy pooling state is empty: a request needs one only while it runs.
        """
        row = self._row_bytes(serving)
        groups: list[GroupSpec] = []
        if self.light:
            groups.append(
                Compressed(
                    name="light",
                    layers=self.light,
                    ratio=self.light_ratio,
                    entry_bytes=row,
                    index_bytes=_index_bytes(self.index_dim),
                    block_tokens=serving.block_tokens,
                    dcp_shards=serving.dcp,
                )
            )
        if self.heavy:
            groups.append(
                Compressed(
                    name="heavy",
                    layers=self.heavy,
                    ratio=self.heavy_ratio,
                    entry_bytes=row,
                    block_tokens=serving.block_tokens,
                    dcp_shards=serving.dcp,
                )
            )
        groups.append(
            LatentWindow(
                name="window",
                layers=self.windows,
                entry_bytes=row,
                window=self.window,
                block_tokens=self.window_block_tokens,
            )
        )
        return (*groups, *self._pools())

    def _row_bytes(self, serving: Serving) -> int:
        """fp8_ds_mla unless bf16 is asked for: fp8, the rotary part in bf16, a scale byte for 64."""
        if serving.kv_dtype == "bf16":
            return 2 * self.head_dim
        plain = self.head_dim - self.rope_dim
        return plain + 2 * self.rope_dim + plain // 64 + 1

    def _pools(self) -> list[GroupSpec]:
        """K and gate of the tokens that are not an entry yet; light ones of the index keys too."""
        pools: list[GroupSpec] = []
        if self.light:
            pools.append(
                PoolingState(
                    name="light_pool",
                    layers=self.light,
                    ratio=self.light_ratio,
                    token_bytes=2 * 2 * (self.head_dim + self.index_dim) * _POOL_BYTES,
                    block_tokens=self.light_ratio,
                    overlap=True,
                )
            )
        if self.heavy:
            pools.append(
                PoolingState(
                    name="heavy_pool",
                    layers=self.heavy,
                    ratio=self.heavy_ratio,
                    token_bytes=2 * self.head_dim * _POOL_BYTES,
                    block_tokens=self.heavy_ratio,
                )
            )
        return pools


def _index_bytes(index_dim: int) -> int:
    """An index key of a lightning indexer: fp8 and float32 scales."""
    return index_dim + 4 * -(-index_dim // _SCALED)
