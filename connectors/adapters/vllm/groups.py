"""vLLM's cache groups as a tier sees them, and where their blocks lie.

vLLM has one pool of blocks for all groups, in one allocation: a block id belongs to one group at a
time. What a tier keeps is a page: the bytes of all layers of a group in one block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.kv_cache_utils import (
    partial_hash_hits_enabled,
    resolve_dcp_kv_block_size,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    iter_layer_specs,
)

from kvcache.connectors.base import PageRegion
from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.specs.base import GroupRules

MAX_PARTS = 4096
"""Of a page: each is a copy of its own."""

MOST_WASTE = 1.25
"""Bytes of a page of the tier for one that a block has of its own, where groups share pages."""


@dataclass(frozen=True, kw_only=True)
class BlockGroup:
    """A `GroupSpec` of the blocks of one vLLM group, or of several: what of them a tier has to know."""

    name: str
    kind: str
    layers: int
    page_bytes: int
    rules: GroupRules
    window_tokens: int | None = None
    alignment_bytes: int = 1


@dataclass(frozen=True, kw_only=True)
class CachedGroup:
    """One of vLLM's groups whose blocks have hashes."""

    id: int
    """Its number in vLLM."""
    rules: GroupRules
    """What a hit needs of it."""
    span: int
    """Tokens of a block, over all ranks."""
    step: int
    """Tokens from one of its keys to the next."""
    kind: str
    window_tokens: int | None
    tier_group: int
    """Whose pages its blocks are in the tier."""
    tag: int
    """What tells its keys from those of the others there: each vLLM group has the same hashes."""


@dataclass(frozen=True, kw_only=True)
class CachedGroups:
    """The groups that a tier keeps.

    vLLM lays all groups over each other: a block has the same bytes whosever it is. So groups whose
    blocks are about as large are one group to the tier, and share its room as it is needed.
    """

    groups: tuple[CachedGroup, ...]
    geometry: Geometry
    """Of the tier."""
    hash_tokens: int
    """Tokens that one block hash goes on for: every span is a multiple."""
    align_tokens: int
    """Hits end at multiples of this, and states are kept there."""

    def join(self, rows: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
        """Of each tier group the keys, from those of each group: one group after the other."""
        out: list[NDArray[np.uint8]] = []
        for g in range(len(self.geometry.groups)):
            own = [r for r, group in zip(rows, self.groups, strict=True) if group.tier_group == g]
            out.append(own[0] if len(own) == 1 else np.concatenate(own))
        return out

    def split(
        self, flags: Sequence[NDArray[np.uint8]], rows: Sequence[NDArray[np.uint8]]
    ) -> list[NDArray[np.uint8]]:
        """Of each group the flags, from those of each tier group; `rows` as for `join`."""
        at = [0] * len(flags)
        out = []
        for own, group in zip(rows, self.groups, strict=True):
            begin = at[group.tier_group]
            at[group.tier_group] = begin + len(own)
            out.append(flags[group.tier_group][begin : begin + len(own)])
        return out


def cached_groups(config: KVCacheConfig, vllm_config: Any) -> CachedGroups:
    """The groups of a model, as vLLM's engine core resolved them.

    Raises:
        ConfigError: a kind of group, or a placement, that is not known here.
    """
    ids = config.prefix_cacheable_group_ids
    if not ids:
        raise ConfigError(
            "no cache group of this model has blocks with hashes: nothing could be stored, leave the"
            " connector out"
        )
    ranks = vllm_config.parallel_config.decode_context_parallel_size
    block_tokens, hash_tokens = resolve_kv_cache_block_sizes(config, vllm_config)
    align = config.cache_hit_alignment_tokens
    if align is None:
        fine = partial_hash_hits_enabled(config.kv_cache_groups, hash_tokens, ranks)
        align = hash_tokens if fine else block_tokens
    placed = _tier_groups(config)
    groups = []
    for g in ids:
        spec = config.kv_cache_groups[g].kv_cache_spec
        rules, span = _rules(spec, ranks)
        (number,) = [n for n, members in enumerate(placed) if g in members]
        groups.append(
            CachedGroup(
                id=g,
                rules=rules,
                span=span,
                step=align if rules.kind == "state" else span,
                kind=get_kv_cache_spec_kind(spec).value,
                window_tokens=get_kv_cache_spec_sliding_window(spec),
                tier_group=number,
                tag=placed[number].index(g),
            )
        )
    return CachedGroups(
        groups=tuple(groups),
        geometry=Geometry(
            tuple(_tier_group(config, groups, n, it) for n, it in enumerate(placed)),
            state_grid_tokens=align,
        ),
        hash_tokens=hash_tokens,
        align_tokens=align,
    )


def _tier_group(
    config: KVCacheConfig, groups: Sequence[CachedGroup], number: int, members: Sequence[int]
) -> BlockGroup:
    own = [group for group in groups if group.tier_group == number]
    kinds = [group.kind for group in own]
    # Blocks of full attention are those that a budget is split by: they are kept for every token.
    first = next((group for group in own if group.rules.kind == "full"), own[0])
    parts = _parts(config, members[0])
    return BlockGroup(
        name="+".join(f"{g}:{kind}" for g, kind in zip(members, kinds, strict=True)),
        kind=first.kind,
        layers=len(config.kv_cache_groups[members[0]].layer_names),
        page_bytes=sum(part.bytes for part in parts),
        rules=first.rules,
        window_tokens=first.window_tokens,
    )


def _tier_groups(config: KVCacheConfig) -> list[list[int]]:
    """Groups that are one to the tier. The first of each has the bytes of all of them."""
    sizes = {
        g: sum(part.bytes for part in _parts(config, g)) for g in config.prefix_cacheable_group_ids
    }
    found: list[list[int]] = []
    for g in sorted(sizes, key=lambda g: (-sizes[g], g)):
        for members in found:
            first = members[0]
            if sizes[first] <= MOST_WASTE * sizes[g] and _covers(
                _parts(config, first), _parts(config, g)
            ):
                members.append(g)
                break
        else:
            found.append([g])
    return found


def _covers(parts: Sequence[_Part], others: Sequence[_Part]) -> bool:
    """Whether the bytes of block 0 of the others are among those of the parts."""
    if parts[0].step != others[0].step:
        return False
    ends: list[list[int]] = []
    for part in sorted(parts, key=lambda part: part.offset):
        if ends and part.offset <= ends[-1][1]:
            ends[-1][1] = max(ends[-1][1], part.offset + part.bytes)
        else:
            ends.append([part.offset, part.offset + part.bytes])
    return all(
        any(begin <= part.offset and part.offset + part.bytes <= end for begin, end in ends)
        for part in others
    )


def block_regions(config: KVCacheConfig, caches: Mapping[str, Any]) -> list[PageRegion]:
    """Where the blocks of each tier group lie, in the memory of one rank.

    Args:
        config: as for `cached_groups`.
        caches: vLLM's tensors by layer, or of a layer with several a list: views of one allocation.

    Raises:
        ConfigError: memory that is not on the host, or no larger than its placement says.
    """
    address = _storage(config, caches)
    regions = []
    for members in _tier_groups(config):
        parts = _parts(config, members[0])
        starts = [address + part.offset for part in parts]
        whole = all(start == starts[0] + i * parts[0].bytes for i, start in enumerate(starts))
        regions.append(
            PageRegion(
                starts[0] if whole else 0,
                sum(part.bytes for part in parts),
                config.num_blocks,
                parts[0].step,
                () if whole else tuple((start,) for start in starts),
            )
        )
    return regions


class _Part(NamedTuple):
    """Bytes in a block that touch: at `offset + block * step` of the one allocation."""

    offset: int
    bytes: int
    step: int


def _parts(config: KVCacheConfig, group: int) -> list[_Part]:
    """Of each layer its parts, all of one size; a layout with heads outermost has several of each."""
    parts = []
    layers = config.kv_cache_groups[group].layer_names
    for layer in layers:
        tensor = _placement(config, layer)
        offset = tensor.offset + tensor.layers.index(layer) * tensor.layer_stride
        span = config.num_blocks * tensor.block_stride
        if tensor.layer_stride >= span:  # blocks of a layer, or of one of its heads, touch
            count, size = tensor.layer_stride // span, tensor.block_stride
        else:  # a block has the pages of several layers
            count, size = 1, tensor.layer_stride
        parts += [_Part(offset + i * span, size, tensor.block_stride) for i in range(count)]
    if len({part.step for part in parts}) > 1:
        raise ConfigError(
            f"layers {layers[0]!r} to {layers[-1]!r} share blocks, and from one block to the next it is"
            f" not equally far in all of them ({sorted({part.step for part in parts})} bytes): such a"
            " layout is not supported"
        )
    size = math.gcd(*(part.bytes for part in parts))
    pieces = [
        part._replace(offset=part.offset + at, bytes=size)
        for part in parts
        for at in range(0, part.bytes, size)
    ]
    if len(pieces) > MAX_PARTS:
        raise ConfigError(
            f"a block of layers {layers[0]!r} to {layers[-1]!r} lies in {len(pieces)} pieces of {size}"
            f" bytes: at most {MAX_PARTS} are supported"
        )
    return pieces


def _placement(config: KVCacheConfig, layer: str) -> KVCacheTensor:
    for tensor in config.kv_cache_tensors:
        if layer in tensor.layers:
            if tensor.host_resident:
                break
            return tensor
    raise ConfigError(f"layer {layer!r} has no place in the device's KV cache")


def _storage(config: KVCacheConfig, caches: Mapping[str, Any]) -> int:
    """Address of the one allocation that has all layers' blocks."""
    addresses = set()
    for g in config.prefix_cacheable_group_ids:
        for layer in config.kv_cache_groups[g].layer_names:
            cache = caches.get(layer)
            if isinstance(cache, list | tuple):
                cache = cache[0]
            if cache is None:
                raise ConfigError(f"vLLM has no KV cache for layer {layer!r}")
            if cache.device.type != "cpu":
                raise ConfigError(
                    f"the KV cache of layer {layer!r} is on {cache.device}: so far only host memory is"
                    " copied from and to"
                )
            storage, size = cache.untyped_storage(), _placement(config, layer).size
            if storage.nbytes() < size:
                raise ConfigError(
                    f"the KV cache of layer {layer!r} lies in {storage.nbytes()} bytes, its placement"
                    f" needs {size}"
                )
            addresses.add(int(storage.data_ptr()))
    if len(addresses) > 1:
        raise ConfigError(
            f"vLLM's KV cache lies in {len(addresses)} allocations: one is supported, as vLLM 0.33 makes"
            " it"
        )
    (address,) = addresses
    return address


def _rules(spec: Any, ranks: int) -> tuple[GroupRules, int]:
    """What a hit needs of a group, as vLLM's own managers have it; and the tokens of its blocks."""
    span = resolve_dcp_kv_block_size(spec, ranks)
    layer = next(iter(iter_layer_specs(spec)))
    if isinstance(layer, MambaSpec):
        return GroupRules("state"), span
    if isinstance(layer, SlidingWindowSpec):
        lead = layer.sliding_window - 1 + layer.extra_retained_tokens
        return GroupRules("span", span, lead_tokens=lead), span
    if isinstance(layer, ChunkedLocalAttentionSpec):
        return GroupRules("span", span, chunk_tokens=layer.attention_chunk_size), span
    if isinstance(layer, FullAttentionSpec):
        return GroupRules("full", span), span
    raise ConfigError(
        f"a cache group of kind {type(layer).__name__} is not known: leave the connector out for this"
        " model"
    )
