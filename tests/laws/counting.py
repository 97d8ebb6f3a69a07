"""How much the law tests did: calls that change or query a manager, and what came about by them.

The laws prove little where what they are about never happens, so that is counted, for each geometry
of `cases.GEOMETRIES`, and `shortfalls` says what is missing. session.py fails the session for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

OPERATIONS = 200_000
"""Least number in one run of all law tests at the scale 1."""

operations: Counter[str] = Counter()
seen: Counter[tuple[str, str]] = Counter()
"""What came about, and in which geometry; those that only one test has are called `OTHER`."""
OTHER = "other"

CALLS = (
    "abandon_load",
    "abort",
    "allocate",
    "begin_step",
    "clear",
    "commit",
    "end_load",
    "end_step",
    "extend",
    "finish",
    "lookup",
    "open",
    "pin",
    "preempt",
    "retire",
    "unpin",
)
ANYWHERE = (
    "crowds: frozen",
    "crowds: loads",
    "crowds: preempt",
    "crowds: restart",
    "crowds: wait",
    "event of a writer that is gone",
    "gap between events",
    "moved page",
    "refused: frozen",
    "refused: preempt",
    "refused: wait",
    "repeated hit: longer",
    "repeated hit: more tokens",
    "repeated hit: other pages",
    "repeated hit: pending",
    "repeated hit: shorter",
    "shortened",
)
EVERYWHERE = (
    "event: BlockRemoved",
    "event: BlockStored",
    "evicted key",
    "hit",
    "hit of other weights",
    "image or embeddings in a hit",
    "load",
    "load that failed",
    "pin across a step",
    "pin that outlived a request",
    "rejected guess",
    "retired key",
    "retired request",
    "space refused",
)
"""In each geometry."""
WHERE = {
    "hole": {"draft"},
    "junction": {"full", "kept in part"},
}
"""In each geometry with groups of all these kinds, see `cases.kinds`."""


def count(name: str) -> None:
    operations[name] += 1


def shortfalls(
    operations: Mapping[str, int],
    seen: Mapping[tuple[str, str], int],
    geometries: Mapping[str, Collection[str]],
    *,
    scale: int,
) -> list[str]:
    """What the tests lacked, in words. `geometries`: names, and the kinds of groups in each."""
    total, least = sum(operations.values()), OPERATIONS * scale
    lacks = [] if total >= least else [f"{total} operations of at least {least}"]
    lacks += [f"no call of {name}" for name in CALLS if not operations.get(name)]
    whats = {what for (what, _), times in seen.items() if times}
    lacks += [f"never: {what}" for what in ANYWHERE if what not in whats]
    for geometry, kinds in geometries.items():
        wanted = [*EVERYWHERE, *(w for w, where in WHERE.items() if where <= set(kinds))]
        lacks += [
            f"never in {geometry!r}: {what}" for what in wanted if not seen.get((what, geometry))
        ]
    return lacks
