"""What a replay is asked for, and what follows from it: geometry, bytes of the arena, slabs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvcache.bench.byte_lru_pages import PageSizes, SpanPages
from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.native_manager import most_slabs
from kvcache.core.records import MOST_TOKENS, UNLIMITED
from kvcache.core.retain import RetentionPolicy
from kvcache.presets import Model
from kvcache.presets.find import find_model
from kvcache.retention import Dense, Sparse

DEFAULT_PRESET = "llama-3-8b"
"""One full-attention group."""

STEP_TOKENS = 8192
"""Token budget of one step."""

MOST_RANKS = 4096
"""No model has so many heads: further ranks would only hold copies."""


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """One run. `pool_tokens` None: no bound; `retention_tokens` None: dense, else the interval.

    Args:
        preset: a name, or the path of a config.json or of its folder.
        tp, dcp: tensor- and context-parallel ranks; pages and bytes are those of one of them.
        kv_dtype: format of the KV: all as in `kvcache.presets.serving.Serving`.
        pool_tokens: the arena has the bytes that the KV of so many tokens takes. States and
            windows share them.
        movable: the engine copies cached pages when the manager says so.
        oracle: also play every request on a page-exact LRU of as many bytes.
    """

    block_tokens: int
    pool_tokens: int | None = None
    preset: str = DEFAULT_PRESET
    tp: int = 1
    dcp: int = 1
    kv_dtype: str = "auto"
    retention_tokens: int | None = None
    movable: bool = True
    oracle: bool = False
    check: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"--block-tokens is {self.block_tokens}: it must be above 0")
        for option, ranks in (("--tp", self.tp), ("--dcp", self.dcp)):
            if not 1 <= ranks <= MOST_RANKS:
                raise ConfigError(f"{option} is {ranks}: it must be from 1 to {MOST_RANKS}")
        geometry = self.geometry  # names an unknown preset
        if self.pool_tokens is not None and self.pool_tokens < self.block_tokens:
            raise ConfigError(
                f"--pool-tokens {self.pool_tokens} is less than one block of {self.block_tokens}"
                " tokens: raise it, or lower --block-tokens"
            )
        interval, grid = self.retention_tokens, geometry.grid_tokens
        if interval is not None and (not 0 <= interval <= MOST_TOKENS or interval % grid):
            raise ConfigError(
                f"--retention {interval} is neither dense, nor 0, nor a multiple of the hit grid"
                f" of {grid} tokens (--block-tokens), up to {MOST_TOKENS}"
            )
        if self.oracle:
            page_sizes(geometry, self.preset)

    @cached_property
    def model(self) -> Model:
        """The preset, or what the config says."""
        return find_model(self.preset)[0]

    @cached_property
    def geometry(self) -> Geometry:
        """The preset's groups, as one rank has them."""
        try:
            return self.model.geometry(
                block_tokens=self.block_tokens, tp=self.tp, dcp=self.dcp, kv_dtype=self.kv_dtype
            )
        except ConfigError as error:
            raise ConfigError(
                f"--preset {self.preset} with pages of {self.block_tokens} tokens (--block-tokens):"
                f" {error}"
            ) from error

    def policy(self) -> RetentionPolicy:
        """The retention policy."""
        return Dense() if self.retention_tokens is None else Sparse(self.retention_tokens)


def fitting_block(least: int, **serving: Any) -> int:
    """The smallest of `least`, twice that, and so on that the model can have; `least` if none can."""
    for factor in (1, 2, 4, 8, 16):
        try:
            ReplaySettings(block_tokens=factor * least, **serving)
        except ConfigError:
            continue
        return factor * least
    return least


def kv_bytes_per_grid(geometry: Geometry) -> int:
    """Bytes of the KV that grows, for one grid unit of tokens: full attention, else windows."""
    for kind in ("full", "span"):
        sizes = [
            group.page_bytes * (geometry.grid_tokens // rules.block_tokens)
            for group, rules in zip(geometry.groups, geometry.rules, strict=True)
            if rules.kind == kind
        ]
        if sizes:
            return sum(sizes)
    raise ConfigError("the geometry has no KV that grows: --pool-tokens cannot size its arena")


def arena_bytes(tokens: int, geometry: Geometry) -> int:
    """Bytes that the KV of `tokens` tokens takes."""
    return tokens * kv_bytes_per_grid(geometry) // geometry.grid_tokens


def arena_slabs(tokens: int | None, geometry: Geometry) -> int:
    """Slabs of an arena of so many KV tokens; None: no bound.

    Raises:
        ConfigError: not even one fits, or there are more than the core can number.
    """
    if tokens is None:
        return UNLIMITED
    slabs = arena_bytes(tokens, geometry) // geometry.slab_bytes
    if slabs < 1:
        raise ConfigError(
            f"--pool-tokens {tokens} is less than one slab takes ({geometry.slab_bytes} bytes,"
            f" {tokens_of_slabs(1, geometry)} tokens): raise it"
        )
    most = most_slabs(geometry)
    if slabs > most:
        enough = tokens_of_slabs(most + 1, geometry) - geometry.grid_tokens
        raise ConfigError(
            f"--pool-tokens {tokens} takes {slabs} slabs of {geometry.slab_bytes} bytes: at most"
            f" {most} are possible; give {enough} or less, or inf"
        )
    return slabs


def state_group(geometry: Geometry) -> int | None:
    """The first recurrent group: its states are counted once for all of them."""
    return next((i for i, rules in enumerate(geometry.rules) if rules.kind == "state"), None)


def tokens_of_slabs(slabs: int, geometry: Geometry) -> int:
    """The smallest whole number of grid units of tokens whose arena has so many slabs."""
    return -(-slabs * geometry.slab_bytes // kv_bytes_per_grid(geometry)) * geometry.grid_tokens


def page_sizes(geometry: Geometry, name: str) -> PageSizes:
    """What the byte LRU has to know; `ConfigError` for groups that it does not know."""
    kv_bytes = state_bytes = 0
    spans: list[SpanPages] = []
    for group, rules in zip(geometry.groups, geometry.rules, strict=True):
        if rules.lookahead_tokens or rules.kind == "private":
            raise ConfigError(
                f"--oracle bytes knows no draft models and no private pages: {name} has the group"
                f" {group.name!r} ({group.kind})"
            )
        if rules.kind == "full":
            kv_bytes += group.page_bytes * (geometry.grid_tokens // rules.block_tokens)
        elif rules.kind == "state":
            state_bytes += group.page_bytes
        else:
            spans.append(SpanPages(*rules[1:4], group.page_bytes, rules.transient))
    if not kv_bytes:
        raise ConfigError(f"--oracle bytes needs full attention, and {name} has none")
    return PageSizes(geometry.grid_tokens, kv_bytes, state_bytes, tuple(spans))
