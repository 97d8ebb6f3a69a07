"""What the toy engine knows of a request, of its work in one step, and of a load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from laws.oracle import Prefix, Space

from kvcache.core.records import Hit, StatePlan

Page = tuple[int, int]
"""Group and page number."""


@dataclass(eq=False)
class Request:
    """The engine's view of one request. Token counts as in `RequestInfo`."""

    handle: int
    space: Space
    tokens: list[int]
    prompt: int
    max_tokens: int
    key_limit: int
    """No keys beyond this position (foreign requests bring keys for their prompt only)."""
    marks: list[int]
    """Declared boundaries, and junctions seen."""
    computed: int = 0
    committed: int = 0
    granted: int = 0
    hit: Hit | None = None
    looked_at: int = 0
    """Tokens known at the last lookup."""
    present: list[set[Prefix]] = field(default_factory=list)
    tables: dict[int, list[int]] = field(default_factory=dict)
    plans: dict[int, StatePlan] = field(default_factory=dict)
    state: str = "waiting"
    load: int = 0
    last_step: int = 0

    def prefix(self, end: int) -> Prefix:
        return self.space, tuple(self.tokens[:end])

    def has_key(self, end: int) -> bool:
        return 0 < end <= min(len(self.tokens), self.key_limit)

    def planned(self) -> Iterator[Page]:
        for group, plan in self.plans.items():
            yield from ((group, int(page)) for page in plan.pages)

    def pages(self) -> Iterator[Page]:
        """What it needs now: its tables, and the states of its grant or the last one computed."""
        for group, table in self.tables.items():
            yield from ((group, page) for page in table)
        for group, plan in self.plans.items():
            if self.granted == self.committed:
                yield from ((group, int(page)) for page in plan.pages[-1:])
                continue
            yield from ((group, int(page)) for page in (plan.source, *plan.pages) if page >= 0)


@dataclass(eq=False)
class Work:
    """What one step computes for one request: reads [0, start), writes [start, end)."""

    request: Request
    start: int
    end: int
    tables: dict[int, list[int]]
    plans: dict[int, StatePlan]
    live: bool = True

    def written(self, blocks: Sequence[int]) -> Iterator[Page]:
        for group, table in self.tables.items():
            block = blocks[group]
            yield from ((group, p) for p in table[self.start // block : -(-self.end // block)])
        for group, plan in self.plans.items():
            yield from ((group, int(page)) for page in plan.pages)

    def touched(self) -> Iterator[Page]:
        for group, table in self.tables.items():
            yield from ((group, page) for page in table)
        for group, plan in self.plans.items():
            yield from ((group, int(page)) for page in (plan.source, *plan.pages) if page >= 0)


@dataclass(eq=False)
class Load:
    """A load in flight: `(group, page, prefix)` of each item."""

    request: Request | None
    items: list[tuple[int, int, Prefix]]
