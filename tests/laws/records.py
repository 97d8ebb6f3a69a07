"""What the toy engine knows of a request, of its work in one step, and of a load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from laws.oracle import Key, Oracle, Space
from laws.prompts import Token

from kvcache.core.records import Hit, StatePlan

Page = tuple[int, int]
"""Size class and page number: groups of one class share the numbers."""


def ceil_div(total: int, part: int) -> int:
    return -(-total // part)


@dataclass(eq=False)
class Request:
    """The engine's view of one request. Token counts as in `RequestInfo`."""

    handle: int
    space: Space
    tokens: list[Token]
    prompt: int
    max_tokens: int
    key_limit: int
    """No keys beyond this position (foreign requests bring keys for their prompt only)."""
    marks: list[int]
    """Declared boundaries, and junctions of earlier runs."""
    classes: Sequence[int]
    """Size class of each group."""
    computed: int = 0
    committed: int = 0
    granted: int = 0
    drafts: int = 0
    """How many of the granted tokens, the last ones, are guesses."""
    began: int = 0
    """The hit that it runs from, or is loading."""
    restarts: bool = False
    """It was told to start again: from a hit that may be shorter than what is there."""
    hit: Hit | None = None
    junction: int = 0
    """What the last lookup has noticed, since the last start; 0: nothing."""
    looked_at: int = 0
    """Tokens known at the last lookup."""
    present: list[set[Key]] = field(default_factory=list)
    tables: dict[int, list[int]] = field(default_factory=dict)
    """Pages of full and span groups; -1: given up, or not stored."""
    paged: dict[int, set[int]] = field(default_factory=dict)
    """Transient groups: the blocks that have a page."""
    private: dict[int, list[int]] = field(default_factory=dict)
    plans: dict[int, StatePlan] = field(default_factory=dict)
    snapshots: dict[int, dict[int, int]] = field(default_factory=dict)
    """State groups: page of the newest complete grid point, and of those beyond that are coming."""
    holes: dict[int, list[int]] = field(default_factory=dict)
    """Draft groups: blocks of the hit without content."""
    state: str = "waiting"
    load: int = 0
    last_step: int = 0
    """The newest step that it took part in, in an earlier life too."""
    wrote_private: bool = False
    muted: bool = False
    """Keys were cleared while it held pages: it leaves none until it starts anew."""
    retired: bool = False
    """The weights have changed since it was opened: it finds no keys and leaves none."""

    @property
    def lora(self) -> str:
        return (*self.space, "")[2]

    @property
    def keyless(self) -> bool:
        return self.muted or self.retired

    def page(self, group: int, number: int) -> Page:
        return self.classes[group], int(number)

    def key(self, oracle: Oracle, group: int, end: int) -> Key | None:
        return oracle.key(group, self.space, self.tokens, end, self.key_limit)

    def writes(self, oracle: Oracle, group: int, end: int) -> Key | None:
        """The key that its own page may get: a hole has nothing that could be found."""
        hole = end // oracle.blocks[group] - 1 in self.holes.get(group, ())
        return None if hole else self.key(oracle, group, end)

    def planned(self) -> Iterator[tuple[int, int]]:
        for group, plan in self.plans.items():
            yield from ((group, int(page)) for page in plan.pages)

    def pages(self) -> Iterator[Page]:
        """All that it holds now."""
        for group, table in (*self.tables.items(), *self.private.items()):
            yield from (self.page(group, number) for number in table if number >= 0)
        for group, kept in self.snapshots.items():
            yield from (self.page(group, number) for number in kept.values())
        for group, plan in self.plans.items():
            if self.granted == self.committed:
                last = plan.pages[-1] if len(plan.pages) else plan.source
                yield from (self.page(group, number) for number in (last,) if number >= 0)
                continue
            both = (plan.source, *plan.pages)
            yield from (self.page(group, number) for number in both if number >= 0)


@dataclass(eq=False)
class Work:
    """What one step computes for one request: reads before `start`, writes [start, end)."""

    request: Request
    blocks: Sequence[int]
    start: int
    end: int
    tables: dict[int, list[int]]
    private: dict[int, list[int]]
    plans: dict[int, StatePlan]
    live: bool = True
    told: int = 0
    """Tokens of the request that were known at the commit: keys of later ones come with the step's end."""
    twin: bool = False
    """Another step that was open wrote a key of its, when it was committed."""

    def page(self, group: int, number: int) -> Page:
        return self.request.page(group, number)

    def written(self) -> Iterator[Page]:
        for group, table in self.tables.items():
            block = self.blocks[group]
            numbers = table[self.start // block : ceil_div(self.end, block)]
            yield from (self.page(group, number) for number in numbers if number >= 0)
        for group, table in self.private.items():
            yield from (self.page(group, number) for number in table)
        for group, plan in self.plans.items():
            yield from (self.page(group, number) for number in plan.pages)

    def touched(self) -> Iterator[Page]:
        """What the step reads and writes."""
        for group, table in (*self.tables.items(), *self.private.items()):
            yield from (self.page(group, number) for number in table if number >= 0)
        for group, plan in self.plans.items():
            both = (plan.source, *plan.pages)
            yield from (self.page(group, number) for number in both if number >= 0)


@dataclass(eq=False)
class Load:
    """A load in flight: group, page, and key of each item."""

    request: Request | None
    items: list[tuple[int, int, Key]]
    muted: bool = False
