"""Small arenas searched through: the rule always finishes, and every part of it is needed."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from arena.instances import instances
from arena.rules import Group, Instance, Rule, smallest_arena
from arena.search import Verdict, search
from laws.cases import SCALE

pytestmark = pytest.mark.long

STATES, STREAM_STATES = 3000, 1000
"""An instance with more is undecided, which is no failure; most have fewer. A stream's cost more."""
ALL = list(instances())
SAMPLED = ALL[7::40] if SCALE == 1 else ALL[7::4]
DECIDED = {0: (58, 15), 2: (48, 11)} if SCALE == 1 else {0: (478, 128), 2: (623, 62)}
"""By fence: searches of `SAMPLED` that finish, and that stay undecided. In docs/memory.md too."""


def small(pages: tuple[int, ...], windows: tuple[int, ...], lengths: tuple[int, ...]) -> Instance:
    """Every group in a class of its own."""
    return Instance(pages, tuple(Group(c, w) for c, w in enumerate(windows)), lengths)


THIN = small((1, 3), (0, 2), (3, 2))
"""Pages of the oldest spread over slabs until another group's page has none."""
DRAINS = small((2, 3), (0, 1), (3, 2, 2))._replace(fence=2)
"""What the first refusal drains is taken while the second drains."""
PINS = small((3, 1), (0, 2), (3, 2))._replace(transfers=2)
"""Every pin ends, and the next one has begun."""
FLIP = small((6, 5), (0, 5), (3, 6))
"""The second request lies in too many slabs by the time it becomes the oldest."""
OLDER_WAITS = small((1, 3), (0, 2), (2, 3))._replace(shared=1)
ROUNDED = small((2, 3, 2), (0, 2, 1), (3, 2, 2))._replace(shared=1, transfers=2)


def schedule(verdict: Verdict) -> str:
    return "\n".join(map(str, verdict.path))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fence", [0, 2])
def test_small_arenas_always_finish(fence: int) -> None:
    """As built; in some also if it took any page that keeps its quota, or restarted at once."""
    outcomes = Counter[str]()
    for n, instance in enumerate(i for i in SAMPLED if i.fence == fence):
        rules = [Rule(), Rule(whole_slabs=False), Rule(quota="eager")]
        for rule in rules[: 1 + (n % 3 == 0) + (n % 9 == 0)]:
            verdict = search(instance, rule, limit=STATES)
            assert verdict.outcome in {"finishes", "undecided"}, f"{instance}\n{schedule(verdict)}"
            outcomes[verdict.outcome] += 1
    found = outcomes["finishes"], outcomes["undecided"]
    sys.stdout.write(f"fence {fence}: {found[0]} finish, {found[1]} undecided\n")
    assert found == DECIDED[fence]


WRONG = {
    "no rule": (Rule(quota="off", freeze=False, freeze_pins=False), THIN),
    "no quota": (Rule(quota="off"), THIN),
    "quota not asked when pages are taken": (Rule(take_in_quota=False), FLIP),
    "quota not asked when a hit is adopted": (Rule(cut_hits=False), FLIP),
    "younger ones served while it is refused": (Rule(freeze=False), DRAINS),
    "pins taken while it is refused": (Rule(freeze_pins=False), PINS),
    "oldest running": (Rule(guaranteed="running"), OLDER_WAITS),
    "no page to write the next state to": (Rule(working=0), PINS),
    "slabs needed rounded down": (Rule(round_up=False), ROUNDED),
}


@pytest.mark.parametrize("name", WRONG)
def test_every_part_of_the_rule_is_needed(name: str) -> None:
    rule, instance = WRONG[name]
    assert search(instance, rule).outcome in {"dead end", "livelock"}
    assert search(instance, Rule()).outcome == "finishes"


def test_a_stream_of_new_requests_does_not_starve_the_oldest() -> None:
    undecided, chosen = 0, SAMPLED[::6]
    for instance in chosen:
        verdict = search(instance._replace(stream=True), Rule(), limit=STREAM_STATES)
        assert verdict.outcome in {"finishes", "undecided"}, f"{instance}\n{schedule(verdict)}"
        undecided += verdict.outcome == "undecided"
    assert undecided <= (0 if SCALE == 1 else 0.1 * len(chosen))


def test_arenas_are_as_small_as_open_allows() -> None:
    assert smallest_arena(THIN) == 4
    assert max(map(smallest_arena, SAMPLED)) <= 4
