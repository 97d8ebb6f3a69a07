"""The longest hit of a request: what of it the tier has, and which blocks of vLLM's it would fill."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.adapters.vllm.groups import CachedGroups
from kvcache.connectors.adapters.vllm.hits import Found, longest_hit
from kvcache.connectors.adapters.vllm.presence import NotKnownError, Presence
from kvcache.connectors.adapters.vllm.requests import Hit, Tracked
from kvcache.connectors.base import RequestKeys, TierScheduler


class Lookups:
    """Asks one tier. What it promises it has pinned.

    Args:
        tier: asked.
        groups: those that it keeps.
        namespace: 32 bytes: whose keys these are. May be set anew.
        drop_tokens: a hit leaves out its last ones, which draft layers write anew.
    """

    def __init__(
        self, tier: TierScheduler, groups: CachedGroups, namespace: bytes, *, drop_tokens: int
    ) -> None:
        self._tier = tier
        self._groups = groups
        self._drop = drop_tokens
        self.namespace = namespace

    def presence(self, r: Tracked, limit: int) -> Presence:
        """What the tier has of a request's first `limit` tokens."""
        return Presence(self._tier, self._groups, self.namespace, r, limit)

    def ask(self, r: Tracked, begin: int, most: int) -> Hit | None:
        """The longest hit, of which the tier pins what the device lacks. O(blocks)."""
        groups, align = self._groups.groups, self._groups.align_tokens
        version, limit = self._tier.version, min(most + self._drop, r.digests.tokens)
        present = self.presence(r, limit)
        try:
            tails = [self._tail(r, present, g, begin, limit) for g in range(len(groups))]
            found = [
                Found(group.rules, partial(present.has, g), tail)
                for g, (group, tail) in enumerate(zip(groups, tails, strict=True))
            ]
            found.sort(key=lambda it: it.rules.kind != "full")
            end = longest_hit(found, begin=begin, most=limit, align=align)
            end = max(begin, min(end - self._drop, most // align * align))
            for g, group in enumerate(groups):
                if tails[g] and present.has(g, end // group.span, end // group.span + 1)[0]:
                    tails[g] = 0
        except NotKnownError:
            return None
        hit = Hit(version, begin, most, end, tails, r.faults.loads)
        if end == begin:
            self.release(r)
            return hit
        r.asked = True
        needed = [self.needed(r, hit, g, end)[1] for g in range(len(groups))]
        flags = self._tier.lookup(RequestKeys(r.number, self.namespace, self._groups.join(needed)))
        # Another process may have evicted some of it just now.
        return hit if flags is not None and all(own.all() for own in flags) else None

    def _tail(self, r: Tracked, present: Presence, g: int, begin: int, limit: int) -> int:
        """Tokens up to which the tier has the first block that it has not as a whole; 0: none."""
        group, align = self._groups.groups[g], self._groups.align_tokens
        if group.rules.kind != "full" or group.span <= align:
            return 0
        first = begin // group.span
        missing = np.flatnonzero(present.has(g, first, limit // group.span + 1) == 0)
        start = (first + int(missing[0])) * group.span
        ends = range(start + align, min(start + group.span, limit + 1), align)
        keys = [r.digests.at(tokens, group.tag) for tokens in ends]
        there = np.flatnonzero(present.of(g, np.stack(keys))).tolist() if keys else []
        return ends[there[-1]] if there else 0

    def needed(self, r: Tracked, hit: Hit, g: int, end: int) -> tuple[slice, NDArray[np.uint8]]:
        """Of group g, the blocks that a hit at `end` reads and the device lacks, and their keys."""
        group = self._groups.groups[g]
        span, last = group.span, -(-end // group.span)
        if group.rules.kind == "state":
            return slice(last - 1, last), r.digests.at(end, group.tag)[None]
        first = hit.begin // span
        if group.rules.kind == "span":
            first = max(group.rules.need_begin(end), hit.begin) // span
        keys = r.digests.rows(span, first, last, group.tag)
        tail = hit.tails[g]
        if tail and end % span and tail // span == end // span:
            keys = np.concatenate([keys[: last - 1 - first], r.digests.at(tail, group.tag)[None]])
        return slice(first, last), keys

    def release(self, r: Tracked) -> None:
        """What the tier has pinned for it, if it has."""
        if r.asked:
            r.asked = False
            self._tier.release(r.number)
