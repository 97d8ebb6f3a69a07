"""How far a request's lookup came: a repeated one asks the tier only for that, while it stands."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import RequestKeys, TierScheduler
from kvcache.core.layout import Geometry
from kvcache.core.records import Hit


@dataclass(slots=True)
class Reach:
    """How far the last lookup of a request came, and the tier's pins with it: no hit went further."""

    keys: list[int]
    """Of each group: those that the request had."""
    rows: list[int]
    """Of each group: those of them that are pinned."""
    tokens: int
    gap: list[NDArray[np.uint8]]
    """Of each group of full attention, the first key behind; all hits end before it."""
    version: Hashable
    """Of the tier, when it was last seen that this has not changed."""
    behind: list[NDArray[np.uint8]] | None = None
    """Whether the tier has the keys of the gap; None: it cannot be told."""


class Reaches:
    """Makes reaches from lookups, and tells which of them still stand. Keeps none."""

    def __init__(self, scheduler: TierScheduler, geometry: Geometry) -> None:
        self._scheduler = scheduler
        self._geometry = geometry
        self._gaps_end_hits = any(rules.kind == "full" for rules in geometry.rules)

    def stands(self, reach: Reach, keys: RequestKeys) -> bool:
        """Whether nothing that was stored since lets a hit go further. O(groups)."""
        version = self._scheduler.version
        if version is None or reach.keys != [len(rows) for rows in keys.digests]:
            return False
        if version != reach.version:
            behind = self._behind(reach.gap, keys)
            if behind is None or reach.behind is None:
                return False
            if not all(map(np.array_equal, behind, reach.behind)):
                return False
            reach.version = version
        return True

    def narrowed(
        self, keys: RequestKeys, present: list[NDArray[np.uint8]], hit: Hit, version: Hashable
    ) -> Reach:
        """The reach of a lookup. Ends pins behind the first gap in attention: no hit has a part there.

        Args:
            present: what the tier said it has of the keys.
            version: the tier's, from before the lookup.
        """
        tokens = max(hit.hit_tokens, hit.junction)
        rows = [tokens // span if span else 0 for span in self._geometry.block_tokens]
        gap = [
            digests[n : n + (rules.kind == "full")]
            for digests, n, rules in zip(keys.digests, rows, self._geometry.rules, strict=True)
        ]
        if any(flags[n:].any() for flags, n in zip(present, rows, strict=True)):
            digests = [d[:n] for d, n in zip(keys.digests, rows, strict=True)]
            self._scheduler.narrow(keys._replace(digests=digests))
        return Reach(
            keys=[len(d) for d in keys.digests],
            rows=rows,
            tokens=tokens,
            gap=[own.copy() for own in gap],
            version=version,
            behind=self._behind(gap, keys),
        )

    def _behind(
        self, gap: list[NDArray[np.uint8]], keys: RequestKeys
    ) -> list[NDArray[np.uint8]] | None:
        """Whether the tier has the keys of a gap; None: it cannot tell, or not whether that is all."""
        if not self._gaps_end_hits:
            return None
        return self._scheduler.holds(keys._replace(digests=gap)) if any(map(len, gap)) else []
