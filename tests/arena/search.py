"""Exhaustive search through all that an adversary can do: is there a way never to finish?

Depth first over canonical states. A state that is met again on the path that leads to it is a
livelock, one that leads only to itself a dead end. A state below which everything ends is met
only once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from arena.model import Model, State
from arena.rules import Instance, Rule


class Verdict(NamedTuple):
    """`outcome`: finishes, livelock, dead end, or undecided (more states than the limit)."""

    outcome: str
    states: int
    path: tuple[State, ...]


def worst_first(model: Model, state: State) -> Iterator[State]:
    """Where the oldest is held back most: a failure, if there is one, is met early."""
    return iter(sorted(model.successors(state), key=lambda s: [p % 99 for p in s.progress]))


def search(instance: Instance, rule: Rule, *, limit: int = 200_000) -> Verdict:
    """O(states). The path leads from the start to the state that is met again."""
    model = Model(instance, rule)
    first = model.start()
    path = [first]
    open_states, closed = {first}, set[State]()
    waiting = [worst_first(model, first)]
    while waiting:
        state = next(waiting[-1], None)
        if state is None:
            waiting.pop()
            closed.add(path[-1])
            open_states.discard(path.pop())
            continue
        if state in open_states:
            outcome = "dead end" if state == path[-1] else "livelock"
            return Verdict(outcome, len(closed) + len(path), (*path, state))
        if state in closed or model.ended(state):
            continue
        if len(closed) + len(path) >= limit:
            return Verdict("undecided", limit, ())
        path.append(state)
        open_states.add(state)
        waiting.append(worst_first(model, state))
    return Verdict("finishes", len(closed), ())
