"""Sizes of each kind of layer, and the layer that they make with random weights.

Each class is one kind. `make` draws the weights of one layer from a stream of random numbers, so
that equal seeds give equal models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvcache.core.errors import ConfigError
from kvcache.core.specs.base import require_not_negative, require_positive
from kvcache.engine.layers import (
    Attention,
    CompressedAttention,
    GatedDelta,
    KimiDelta,
    Latent,
    Mixer,
)
from kvcache.engine.layers.compressor import Compressor, Index, Series
from kvcache.engine.layers.latent import LowRank
from kvcache.engine.layers.recurrence import Heads

EPSILON = 1e-5
"""Of every norm."""

FORGETTING = (0.002, 0.2)
"""Range of a state's speed: it keeps exp(-speed log 2) a token, 0.9986 to 0.87, where its gate is 0."""


class Random:
    """One stream of random numbers, and what layers of one model share.

    Args:
        rotation: the table of rotary positions for a head dimension.
    """

    def __init__(self, seed: int, width: int, rotation: Callable[[int], Tensor]) -> None:
        self.width = width
        self.rotation = rotation
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, scale: float | None = None) -> Tensor:
        """Normal numbers that keep the size of what they are multiplied with."""
        values = torch.randn(rows, columns, generator=self._generator)
        return values * (columns**-0.5 if scale is None else scale)

    def stack(self, count: int, rows: int, columns: int) -> Tensor:
        """As many matrices."""
        return self.matrix(count * rows, columns).view(count, rows, columns)

    def vector(self, size: int, scale: float = 1.0) -> Tensor:
        """Normal numbers around 0."""
        return self.matrix(1, size, scale)[0]

    def norm(self, size: int) -> Tensor:
        """A norm's weight: around 1."""
        return 1 + self.vector(size, 0.1)

    def speed(self, size: int) -> Tensor:
        """A state's speed of forgetting, evenly over orders of magnitude."""
        low, high = torch.tensor(FORGETTING).log()
        return torch.exp(low + (high - low) * torch.rand(size, generator=self._generator))


class LayerSettings(Protocol):
    """One kind of layer with its sizes."""

    def make(self, random: Random) -> Mixer:
        """A layer with random weights."""


@dataclass(frozen=True, kw_only=True)
class FullLayer:
    """Attention (GQA) over everything, or over a window."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    window: int = 0
    """Tokens that a query sees, its own among them; 0: all before it."""

    def __post_init__(self) -> None:
        require_positive(self, "heads", "kv_heads", "head_dim")
        require_not_negative(self, "window")
        _require_even(self, "head_dim")
        _require_divisor(self, "kv_heads", "heads")

    def make(self, random: Random) -> Attention:
        """A layer with random weights."""
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        return Attention(
            qkv=random.matrix(rows, random.width),
            out=random.matrix(random.width, self.heads * self.head_dim),
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rotation=random.rotation(self.head_dim),
            window=self.window or None,
        )


@dataclass(frozen=True, kw_only=True)
class LatentLayer:
    """Latent attention (MLA). `rope_dim` 0: without positions. `q_rank` 0: queries made directly."""

    heads: int = 4
    rank: int = 24
    nope_dim: int = 16
    rope_dim: int = 8
    value_dim: int = 16
    q_rank: int = 0

    def __post_init__(self) -> None:
        require_positive(self, "heads", "rank", "nope_dim", "value_dim")
        require_not_negative(self, "rope_dim", "q_rank")
        _require_even(self, "rope_dim")

    def make(self, random: Random) -> Latent:
        """A layer with random weights."""
        asked = self.heads * (self.nope_dim + self.rope_dim)
        return Latent(
            query=random.matrix(asked, self.q_rank or random.width),
            row=random.matrix(self.rank + self.rope_dim, random.width),
            row_norm=random.norm(self.rank),
            key_up=random.stack(self.heads, self.rank, self.nope_dim),
            value_up=random.stack(self.heads, self.value_dim, self.rank),
            out=random.matrix(random.width, self.heads * self.value_dim),
            rope_dim=self.rope_dim,
            epsilon=EPSILON,
            rotation=random.rotation(self.rope_dim) if self.rope_dim else None,
            low_rank=_low_rank(random, self.q_rank) if self.q_rank else None,
        )


@dataclass(frozen=True, kw_only=True)
class CompressedLayer:
    """Compressed attention. `ratio` 0: the window alone. `index_heads` 0: all entries are read."""

    heads: int = 4
    head_dim: int = 16
    rope_dim: int = 8
    q_rank: int = 24
    window: int = 16
    ratio: int = 4
    overlap: bool = True
    index_heads: int = 2
    index_dim: int = 8
    top: int = 6
    out_parts: int = 2
    out_rank: int = 16

    def __post_init__(self) -> None:
        require_positive(self, "heads", "head_dim", "rope_dim", "q_rank", "window", "out_parts")
        require_positive(self, "out_rank", "top")
        require_not_negative(self, "ratio", "index_heads")
        for name in ("head_dim", "rope_dim", "index_dim"):
            _require_even(self, name)
        _require_divisor(self, "out_parts", "heads")
        least = self.index_dim if self.ratio and self.index_heads else self.head_dim
        if self.rope_dim > min(least, self.head_dim):
            raise ConfigError(
                f"CompressedLayer.rope_dim is {self.rope_dim}: it is a part of head_dim"
                f" ({self.head_dim}) and of index_dim ({self.index_dim}), and must not be larger"
            )

    def make(self, random: Random) -> CompressedAttention:
        """A layer with random weights."""
        part = self.heads // self.out_parts * self.head_dim
        return CompressedAttention(
            low_rank=_low_rank(random, self.q_rank),
            query=random.matrix(self.heads * self.head_dim, self.q_rank),
            row=random.matrix(self.head_dim, random.width),
            row_norm=random.norm(self.head_dim),
            sinks=random.vector(self.heads),
            out_in=random.stack(self.out_parts, self.out_rank, part),
            out=random.matrix(random.width, self.out_parts * self.out_rank),
            window=self.window,
            rotation=random.rotation(self.rope_dim),
            epsilon=EPSILON,
            compressor=self._compressor(random) if self.ratio else None,
        )

    def _compressor(self, random: Random) -> Compressor:
        series = self._series(random, self.head_dim)
        if not self.index_heads:
            return Compressor(self.ratio, series, None)
        index = Index(
            series=self._series(random, self.index_dim),
            query=random.matrix(self.index_heads * self.index_dim, self.q_rank),
            weight=random.matrix(self.index_heads, random.width),
            top=self.top,
        )
        return Compressor(self.ratio, series, index)

    def _series(self, random: Random, elements: int) -> Series:
        rows = (2 if self.overlap else 1) * elements
        return Series(
            value=random.matrix(rows, random.width),
            gate=random.matrix(rows, random.width),
            bias=random.matrix(self.ratio, rows, scale=0.5),
            norm=random.norm(elements),
        )


@dataclass(frozen=True, kw_only=True)
class GatedDeltaLayer:
    """Gated delta network (GDN)."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 16
    taps: int = 4

    def __post_init__(self) -> None:
        require_positive(self, "key_heads", "value_heads", "key_dim", "value_dim", "taps")
        _require_divisor(self, "key_heads", "value_heads")

    def make(self, random: Random) -> GatedDelta:
        """A layer with random weights."""
        heads = Heads(
            key_heads=self.key_heads,
            value_heads=self.value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            taps=self.taps,
        )
        values = self.value_heads * self.value_dim
        return GatedDelta(
            heads=heads,
            qkv=random.matrix(heads.channels, random.width),
            taps=random.matrix(self.taps, heads.channels, scale=self.taps**-0.5),
            decay=random.matrix(self.value_heads, random.width),
            decay_bias=random.vector(self.value_heads),
            speed=random.speed(self.value_heads),
            rate=random.matrix(self.value_heads, random.width),
            gate=random.matrix(values, random.width),
            norm=random.norm(self.value_dim),
            out=random.matrix(random.width, values),
            epsilon=EPSILON,
        )


@dataclass(frozen=True, kw_only=True)
class KimiDeltaLayer:
    """Kimi delta attention (KDA)."""

    heads: int = 4
    head_dim: int = 16
    taps: int = 4

    def __post_init__(self) -> None:
        require_positive(self, "heads", "head_dim", "taps")

    def make(self, random: Random) -> KimiDelta:
        """A layer with random weights."""
        values = self.heads * self.head_dim
        heads = Heads(
            key_heads=self.heads,
            value_heads=self.heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            taps=self.taps,
        )
        return KimiDelta(
            heads=heads,
            qkv=random.matrix(heads.channels, random.width),
            taps=random.matrix(self.taps, heads.channels, scale=self.taps**-0.5),
            decay_in=random.matrix(self.head_dim, random.width),
            decay_out=random.matrix(values, self.head_dim),
            decay_bias=random.vector(values),
            speed=random.speed(self.heads),
            rate=random.matrix(self.heads, random.width),
            gate_in=random.matrix(self.head_dim, random.width),
            gate_out=random.matrix(values, self.head_dim),
            norm=random.norm(self.head_dim),
            out=random.matrix(random.width, values),
            epsilon=EPSILON,
        )


def _low_rank(random: Random, q_rank: int) -> LowRank:
    return LowRank(random.matrix(q_rank, random.width), random.norm(q_rank))


def _require_even(settings: object, field: str) -> None:
    value = getattr(settings, field)
    if value % 2:
        raise ConfigError(
            f"{type(settings).__name__}.{field} is {value}: positions rotate pairs, so it must be even"
        )


def _require_divisor(settings: object, field: str, of: str) -> None:
    value, whole = getattr(settings, field), getattr(settings, of)
    if whole % value:
        raise ConfigError(
            f"{type(settings).__name__}.{field} is {value}: it must divide {of}, {whole}"
        )
