"""What the model is asked about: an arena with its requests, and a rule with every part to leave out."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Group(NamedTuple):
    """`window` 0: keeps every page; w: keeps the last w. Groups of one class share slabs."""

    size_class: int
    window: int


class Instance(NamedTuple):
    """One arena and its requests, oldest first.

    shared: pages at the start that all requests have in common.
    transfers: most pages pinned at a time, each for two steps.
    fence: steps for which pages that are given up stay busy, at most 2.
    stream: whoever finishes behind the oldest comes again; the search ends with the oldest.
    """

    pages_per_slab: tuple[int, ...]
    groups: tuple[Group, ...]
    lengths: tuple[int, ...]
    shared: int = 0
    transfers: int = 0
    fence: int = 0
    stream: bool = False


class Rule(NamedTuple):
    """Who may take what.

    guaranteed: the oldest request that is unfinished, or (wrong) that is running.
    quota: of the guaranteed request: off; "eager": tested when it becomes guaranteed and when it
        starts; "lazy": kept from when it holds, restored by one restart when it is stuck alone.
    whole_slabs: near its quota it takes pages of its own slabs, then slabs that nobody holds
        anything of; otherwise anything that keeps the quota.
    take_in_quota: the quota is asked when it takes pages.
    cut_hits: the quota is asked when it adopts a hit after a restart.
    freeze: while it is refused nobody else is served.
    freeze_pins: while it is refused nothing is pinned.
    working: pages of a window or state group needed beyond those it keeps (wrong if not 1).
    round_up: slabs needed are rounded up (wrong if down).
    """

    guaranteed: Literal["unfinished", "running"] = "unfinished"
    quota: Literal["off", "eager", "lazy"] = "lazy"
    whole_slabs: bool = True
    take_in_quota: bool = True
    cut_hits: bool = True
    freeze: bool = True
    freeze_pins: bool = True
    working: int = 1
    round_up: bool = True


def pages_held(group: Group, length: int, working: int = 1) -> int:
    """Most pages of the group that a request of `length` holds at one time."""
    return length if not group.window else min(length, group.window + working)


def slabs_needed(instance: Instance, length: int, rule: Rule) -> tuple[int, ...]:
    """N of each class."""
    pages = [0] * len(instance.pages_per_slab)
    for group in instance.groups:
        pages[group.size_class] += pages_held(group, length, rule.working)
    up = (lambda k: k - 1) if rule.round_up else (lambda k: 0)
    return tuple(
        max(1, (n + up(k)) // k) for n, k in zip(pages, instance.pages_per_slab, strict=True)
    )


def smallest_arena(instance: Instance) -> int:
    """Slabs that `open` asks for, the longest request's."""
    return max(sum(slabs_needed(instance, n, Rule())) for n in instance.lengths)
