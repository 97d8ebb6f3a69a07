"""Whether a waiting request will find room: a forecast for admission, no reservation.

`allocate` and preemption have the last word; without the forecast half-computed prompts would push
each other out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kvcache.core.manager import Manager
from kvcache.core.records import Hit
from kvcache.engine.request import Request


def common_tokens(manager: Manager, one: Request, other: Request, limit: int) -> int:
    """Tokens of the common prefix, at most `limit`, in whole hash units.

    O(log limit): each link of a chain stands for all before it.
    """
    unit = manager.geometry.hash_unit_tokens
    a, b = manager.digests(one.id), manager.digests(other.id)
    links = range(min(limit // unit, len(a), len(b)))
    return unit * bisect_left(links, True, key=lambda i: bool((a[i] != b[i]).any()))


def has_room(manager: Manager, request: Request, hit: Hit, admitted: Sequence[Request]) -> bool:
    """Whether there is memory for all known tokens, beside what admitted prompts still need.

    In bytes: pages of all groups share the arena. A request alone has room.
    """
    if not admitted:
        return True
    # Pages of the hit cost nothing where an admitted request holds them already; cached ones count
    # as free, and are not any more once they are adopted.
    shared = max(
        common_tokens(manager, request, r, min(hit.device_tokens, r.granted)) for r in admitted
    )
    geometry, stats = manager.geometry, manager.arena_stats()
    free = stats.slabs * geometry.slab_bytes
    for held, stride in zip(stats.classes, geometry.stride_bytes, strict=True):
        free -= held.held * stride
    need = 0
    least = geometry.pages_needed(request.known)
    for g, rules in enumerate(geometry.rules):
        pages = least[g]
        if rules.kind == "full":
            block = rules.block_tokens
            pages -= shared // block
            pages += sum(-(-r.known // block) - -(-r.granted // block) for r in admitted)
        need += pages * geometry.stride_bytes[geometry.class_of_group[g]]
    return need <= free


def lacks_room(manager: Manager, handle: int, tokens: int) -> bool:
    """Whether a running request's next tokens need more memory than is free or cached. In bytes."""
    geometry, stats = manager.geometry, manager.arena_stats()
    free = stats.slabs * geometry.slab_bytes
    for held, stride in zip(stats.classes, geometry.stride_bytes, strict=True):
        free -= held.held * stride
    need = manager.need(handle, tokens)
    strides = (geometry.stride_bytes[c] for c in geometry.class_of_group)
    return sum(n * stride for n, stride in zip(need, strides, strict=True)) > free
