"""How a model is dealt out to ranks, and how what they keep becomes one page of a tier.

Ranks are a grid: `tp` ranks share the heads (tensor parallelism), and of each such share `dcp` ranks
take turns with the tokens (decode context parallelism). Rank `t * dcp + c` has the t-th heads and,
of what keeps every token, the tokens at positions c, c + dcp, c + 2 dcp, ...

    TP 2 x DCP 2       tokens 0 2 4 ..   tokens 1 3 5 ..
    heads 0 1          rank 0            rank 1
    heads 2 3          rank 2            rank 3

All ranks have the same pages: one block table serves them, page p of a group lies at the same place
of every rank's arena. What differs is what it holds:

| kept | over `tp` ranks | over `dcp` ranks |
|---|---|---|
| K and V of everything | by KV heads; fewer heads than ranks: neighbours hold the same | tokens in turns |
| latent rows, compressed entries | the same on all | tokens, entries in turns |
| windows | by KV heads; rows of compressed layers: the same | the same on all |
| pooling rows | the same | the same |
| recurrent states | by heads | the same |

A tier keeps of each page number what differs, once: its *parts*. `tier_geometry` has pages of all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from kvcache.connectors.base import PageRegion
from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.specs.base import GroupRules, GroupSpec, require_positive


@dataclass(frozen=True, slots=True)
class Shards:
    """How many ranks there are of each kind."""

    tp: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        require_positive(self, "tp", "dcp")

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tp * self.dcp

    def places(self, rank: int) -> tuple[int, int]:
        """Which heads a rank has, and whose turn of the tokens."""
        return divmod(rank, self.dcp)


UNSHARDED = Shards()
"""One rank has everything."""


def heads_of_rank(heads: int, rank: int, tp: int, what: str) -> slice:
    """Those of a layer's heads that a tensor-parallel rank has.

    Raises:
        ConfigError: they cannot be dealt out evenly, nor is each kept by as many ranks.
    """
    if heads % tp == 0:
        each = heads // tp
        return slice(rank * each, (rank + 1) * each)
    if tp % heads:
        raise ConfigError(
            f"tp is {tp}: {heads} {what} are neither a multiple nor a divisor of it, so that ranks"
            " would differ; choose a tp that fits every layer"
        )
    first = rank * heads // tp
    return slice(first, first + 1)


def even_heads(heads: int, rank: int, tp: int) -> slice:
    """As `heads_of_rank`, of heads of queries or of a state: none is on two ranks."""
    if heads % tp:
        raise ConfigError(
            f"tp is {tp}: it must divide the heads of every layer, and one has {heads}"
        )
    return heads_of_rank(heads, rank, tp, "heads")


def of_heads(values: Tensor, heads: slice, count: int, dim: int = 0) -> Tensor:
    """What belongs to some of `count` heads, which lie one after another in a dimension."""
    each = values.shape[dim] // count
    return values.narrow(dim, heads.start * each, (heads.stop - heads.start) * each).contiguous()


# ---- pages of all ranks ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AllRanks:
    """A group as a tier sees it: one page has the parts of all ranks, one after another.

    It says how they are sharded: `DiskConnector` puts that into the name of its folder, so that
    another sharding finds no file of it.
    """

    spec: GroupSpec
    """Of one rank."""
    parts: int
    """What differs between the ranks' pages of one number."""
    shards: Shards

    @property
    def name(self) -> str:
        """As on a rank."""
        return self.spec.name

    @property
    def kind(self) -> str:
        """As on a rank."""
        return self.spec.kind

    @property
    def window_tokens(self) -> int | None:
        """As on a rank."""
        return self.spec.window_tokens

    @property
    def layers(self) -> int:
        """As on a rank."""
        return self.spec.layers

    @property
    def page_bytes(self) -> int:
        """Of all parts."""
        return self.spec.page_bytes * self.parts

    @property
    def alignment_bytes(self) -> int:
        """As on a rank."""
        return self.spec.alignment_bytes

    @property
    def rules(self) -> GroupRules:
        """As on a rank: they span the tokens of all ranks there."""
        return self.spec.rules


def tier_geometry(geometry: Geometry, shards: Shards, heads: Sequence[int]) -> Geometry:
    """Groups whose pages have the parts of all ranks: for connectors, in place of `geometry`.

    Args:
        geometry: of one rank.
        heads: of each group how many different contents tensor parallelism makes of a page.
    """
    if shards == UNSHARDED:
        return geometry
    return replace(
        geometry,
        groups=tuple(
            cast("GroupSpec", AllRanks(spec, parts * turns(spec, shards), shards))
            for spec, parts in zip(geometry.groups, heads, strict=True)
        ),
    )


def turns(spec: GroupSpec, shards: Shards) -> int:
    """How many different contents context parallelism makes of a page of a group."""
    return shards.dcp if getattr(spec, "dcp_shards", 1) > 1 else 1


def tier_regions(
    regions: Sequence[Sequence[PageRegion]], tier: Geometry, shards: Shards, heads: Sequence[int]
) -> list[PageRegion]:
    """The page memory of all ranks, for each group one region whose pages have all parts.

    Args:
        regions: of each rank, for each group.
        tier: `tier_geometry`.
        heads: as there.
    """
    if shards == UNSHARDED:
        return list(regions[0])
    joint = []
    for group, spec in enumerate(tier.groups):
        of_ranks = [rank[group] for rank in regions]
        assert isinstance(spec, AllRanks)
        of_turns = turns(spec.spec, shards)
        parts: list[list[int]] = [[] for _ in range(spec.parts)]
        for rank, region in enumerate(of_ranks):
            t, c = shards.places(rank)
            parts[t * heads[group] // shards.tp * of_turns + c % of_turns].append(region.address)
        first = of_ranks[0]
        joint.append(
            PageRegion(
                0,
                spec.page_bytes,
                first.pages,
                first.step_bytes,
                parts=tuple(map(tuple, parts)),
            )
        )
    return joint
