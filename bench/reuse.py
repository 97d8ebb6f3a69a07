"""How a trace uses what is cached: how often, and how far from a kept boundary reuse ends.

    tokens   0 ------- kept boundary ............ reuse ends ------- prompt ends
             | what a hit covers    | reuse distance |  new          |

With interval 0 a hit ends at the last boundary that is known to be of use (docs/retention.md): the ends
of prompts, and junctions, which a model without full attention never finds. The
*reuse distance* is what full attention would have served beyond: a state or window kept in between
saves a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.traces import TraceFile, TraceRequest
from kvcache.core.errors import ConfigError


class IntervalUse(NamedTuple):
    """What keeping a boundary every `interval_tokens` adds to interval 0, over the whole trace."""

    interval_tokens: int
    boundaries: int
    """Kept in new text, beside those of interval 0."""
    saved_tokens: int
    """Of the reuse distances: not computed again."""


class ReuseProfile(NamedTuple):
    """One trace, with a cache that nothing is evicted from."""

    source: str
    unit_tokens: int
    """All positions are multiples of this: of the trace's blocks and of the grid."""
    requests: int
    prompt_tokens: int
    hit_tokens: int
    """What full attention serves, or would."""
    unique_tokens: int
    """Computed at least once: what full attention keeps."""
    boundaries: int
    """Kept at interval 0, each prefix once."""
    distance_tokens: tuple[int, int, int]
    """Reuse distances, median, 90th and 99th percentile of those above 0."""
    distant_requests: int
    """Requests with a reuse distance above 0."""
    uses: tuple[IntervalUse, ...]
    """By interval, unit times powers of two, ascending."""


CODING_AGENTS = ReuseProfile(
    source="500 recorded Claude Code sessions",
    unit_tokens=128,
    requests=35_320,
    prompt_tokens=4_366_755_654,
    hit_tokens=4_207_314_432,
    unique_tokens=157_206_912,
    boundaries=36_666,
    distance_tokens=(768, 15_360, 182_144),
    distant_requests=1_214,
    uses=(
        IntervalUse(128, 1_228_179, 13_598_592),
        IntervalUse(256, 613_989, 13_515_520),
        IntervalUse(512, 306_868, 13_376_128),
        IntervalUse(1_024, 153_285, 13_179_264),
        IntervalUse(2_048, 76_505, 12_872_704),
        IntervalUse(4_096, 38_171, 12_217_088),
        IntervalUse(8_192, 18_979, 11_195_648),
        IntervalUse(16_384, 9_466, 8_588_160),
        IntervalUse(32_768, 4_455, 7_609_856),
        IntervalUse(65_536, 1_982, 6_467_712),
        IntervalUse(131_072, 765, 4_754_176),
        IntervalUse(262_144, 133, 2_605_312),
        IntervalUse(524_288, 21, 524_288),
    ),
)
"""What is assumed without a trace: `profile_trace` of claude_code_sessions_500.csv.gz (README,
"Traces") on a grid of 128."""

_SAVED_WITHOUT_JUNCTIONS = (
    *(19_455_488, 19_363_328, 19_185_920, 18_925_952, 18_461_696, 17_386_880, 15_555_968),
    *(10_682_624, 9_230_336, 7_750_912, 5_390_336, 2_883_584, 524_288),
)
CODING_AGENTS_WITHOUT_JUNCTIONS = CODING_AGENTS._replace(
    boundaries=35_452,
    distance_tokens=(4_864, 15_872, 183_808),
    distant_requests=1_377,
    uses=tuple(
        use._replace(saved_tokens=saved)
        for use, saved in zip(CODING_AGENTS.uses, _SAVED_WITHOUT_JUNCTIONS, strict=True)
    ),
)
"""The same for a model without full attention."""


def profile_trace(trace: TraceFile, grid_tokens: int, *, junctions: bool = True) -> ReuseProfile:
    """Reads a trace in file order. Memory is O(unique blocks).

    Args:
        junctions: the model has full attention, which shows where prompts part.

    Raises:
        InputError: a broken line, named.
    """
    return profile_requests(
        trace.requests(), trace.block_tokens, grid_tokens, str(trace.path), junctions=junctions
    )


def profile_requests(
    requests: Iterable[TraceRequest],
    block_tokens: int,
    grid_tokens: int,
    source: str,
    *,
    junctions: bool = True,
) -> ReuseProfile:
    """The same of any requests whose blocks have `block_tokens` tokens."""
    unit = math.lcm(block_tokens, grid_tokens)
    seen = _Seen(unit // block_tokens, unit, junctions=junctions)
    lengths: list[tuple[int, int, int]] = []
    prompt_tokens = 0
    for request in requests:
        prompt_tokens += request.prompt_tokens
        lengths.append(seen.turn(request.blocks, request.prompt_tokens))
    if not lengths:
        raise ConfigError(f"{source} has no request: nothing can be said of its reuse")
    units, full, kept = np.array(lengths, dtype=np.int64).T
    distances = (full - kept)[full > kept] * unit
    ranks = np.percentile(distances, [50, 90, 99], method="higher") if len(distances) else [0] * 3
    return ReuseProfile(
        source=source,
        unit_tokens=unit,
        requests=len(lengths),
        prompt_tokens=prompt_tokens,
        hit_tokens=int(full.sum()) * unit,
        unique_tokens=seen.units * unit,
        boundaries=seen.boundaries,
        distance_tokens=(int(ranks[0]), int(ranks[1]), int(ranks[2])),
        distant_requests=len(distances),
        uses=tuple(_uses(units, seen.new_from, full, kept, unit)),
    )


def _uses(
    units: NDArray[np.int64],
    new_from: Sequence[int],
    full: NDArray[np.int64],
    kept: NDArray[np.int64],
    unit: int,
) -> Iterable[IntervalUse]:
    first, step = np.array(new_from, dtype=np.int64), 1
    while step <= units.max():
        boundaries = int((units // step - first // step).sum())
        saved = int((np.maximum(full // step * step - kept, 0)).sum())
        yield IntervalUse(step * unit, boundaries, saved * unit)
        step *= 2


class _Seen:
    """Which units were computed before, and at the end of which a boundary is kept."""

    def __init__(self, blocks_per_unit: int, unit_tokens: int, *, junctions: bool) -> None:
        self._stride = blocks_per_unit
        self._unit = unit_tokens
        self._junctions = junctions
        self._known = np.zeros(1024, dtype=np.bool_)
        self._kept = np.zeros(1024, dtype=np.bool_)
        self.units = 0
        self.boundaries = 0
        self.new_from: list[int] = []
        """Of each request: units of its prompt that were known."""

    def turn(self, blocks: NDArray[np.int64], prompt_tokens: int) -> tuple[int, int, int]:
        """Units of the prompt, those that full attention serves, those that a hit covers."""
        ends = blocks[self._stride - 1 :: self._stride]  # a unit is known by its last block
        if not len(ends):
            self.new_from.append(0)
            return 0, 0, 0
        self._grow(int(ends.max()) + 1)
        known = self._known[ends]
        run = len(known) if known.all() else int(known.argmin())
        full = min(run, (prompt_tokens - 1) // self._unit)  # the last token is computed anew
        at = np.flatnonzero(self._kept[ends[:full]])
        kept = int(at[-1]) + 1 if len(at) else 0
        self._known[ends] = True
        self.units += len(ends) - run
        self.new_from.append(run)
        self._keep(ends, (prompt_tokens - 1) // self._unit)  # the replay boundary
        self._keep(ends, prompt_tokens // self._unit)  # the end of the turn
        if kept < full and self._junctions:
            self._keep(ends, full)  # a junction: the next sighting hits
        return len(ends), full, kept

    def _keep(self, ends: NDArray[np.int64], units: int) -> None:
        if units and not self._kept[ends[units - 1]]:
            self._kept[ends[units - 1]] = True
            self.boundaries += 1

    def _grow(self, size: int) -> None:
        if size > len(self._known):
            more = max(size, 2 * len(self._known)) - len(self._known)
            self._known = np.pad(self._known, (0, more))
            self._kept = np.pad(self._kept, (0, more))
