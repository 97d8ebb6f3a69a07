"""Load or compute: what a prefix would cost either way, from what loads and prefills have taken.

    load      seconds = a + b * bytes          from the tier itself, and from one below: the longer
    compute   seconds = a * steps + b * tokens + c * tokens * context

Each is fitted to the last `SAMPLES` measurements, by relative error, outliers weighed down, no
coefficient below 0. A choice that is never made is never measured: so of the time that computing
in place of loading has taken, a share (`TRIAL_SHARE`) may be spent on loads that look too dear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import LoadBytes
from kvcache.core.layout import Geometry

SAMPLES = 32
"""Measurements that are remembered: the newest."""

TRIAL_SHARE = 0.05
"""Of the seconds computed in place of loading: what loads against the estimate may cost, in all."""

PREFILL_SHARE = 0.5
"""A step is a measurement of prefill if at least so much of its tokens belongs to prompts."""

ROUNDS = 4
"""Of weighing outliers down."""

TOLERANCE = 0.02
"""Relative errors below this are no sign of an outlier."""


class Loads(Enum):
    """What to do with what only a tier holds."""

    AUTO = "auto"
    """Load it, unless computing it looks cheaper."""
    ALWAYS = "always"
    NEVER = "never"
    """Compute it. What is computed is still stored."""


class Fit:
    """Seconds as a sum of features with coefficients of 0 or more. O(`SAMPLES`) memory.

    Args:
        features: how many there are.
    """

    def __init__(self, features: int) -> None:
        self._rows = np.empty((SAMPLES, features))
        self._seconds = np.empty(SAMPLES)
        self._count = 0
        self._coefficients: NDArray[np.float64] | None = None

    def add(self, features: Sequence[float], seconds: float) -> None:
        """A measurement; one that cannot be (no time, not finite) is left out."""
        row = np.array(features, np.float64)
        if not (0 < seconds < math.inf and np.isfinite(row).all() and row.any()):
            return
        place = self._count % SAMPLES
        self._rows[place], self._seconds[place] = row, seconds
        self._count += 1
        self._coefficients = None

    def seconds(self, features: Sequence[float]) -> float | None:
        """The estimate; None: nothing was measured yet."""
        if not self._count:
            return None
        if self._coefficients is None:
            n = min(self._count, SAMPLES)
            self._coefficients = robust(self._rows[:n], self._seconds[:n])
        return float(np.array(features, np.float64) @ self._coefficients)


def robust(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficients, none below 0, whose relative errors are small for most rows.

    Least squares, repeated: a row counts less the farther it lies outside of what is usual.
    """
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    relative = rows / scale / seconds[:, None]
    weights: NDArray[np.float64] = np.ones(len(rows))
    found = np.zeros(rows.shape[1])
    for _ in range(ROUNDS):
        found = _not_negative(relative * weights[:, None], weights)
        error = np.abs(relative @ found - 1)
        usual = max(float(np.median(error)), TOLERANCE)
        weights = np.minimum(1.0, 2 * usual / np.maximum(error, TOLERANCE)) ** 2
    coefficients: NDArray[np.float64] = found / scale
    return coefficients


def _not_negative(rows: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares, the most negative coefficient left out until there is none."""
    found = np.zeros(rows.shape[1])
    used = list(range(rows.shape[1]))
    while used:
        values = np.linalg.lstsq(rows[:, used], target, rcond=1e-9)[0]
        if values.min() >= 0:
            found[used] = values
            break
        del used[int(values.argmin())]
    return found


class Costs:
    """The choice between loading and computing. Never measures itself: it is told.

    Args:
        loads: see `Loads`.
        chunk_tokens: most tokens that a step computes.
    """

    def __init__(self, loads: Loads, chunk_tokens: int) -> None:
        self.loads = loads
        self._chunk_tokens = chunk_tokens
        self._loads = {far: Fit(2) for far in (False, True)}
        """From the tier itself, and from one below it."""
        self._compute = Fit(3)
        self._credit_seconds = 0.0

    def note_load(self, loaded_bytes: int, seconds: float, *, far: bool = False) -> None:
        """A load has ended, or what of it came from one tier. `far`: from a tier below."""
        self._loads[far].add((1.0, loaded_bytes), seconds)

    def note_step(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step has computed tokens `[start, end)` of each request."""
        tokens = sum(end - start for start, end in chunks)
        prefill = sum(end - start for start, end in chunks if end - start > 1)
        if prefill and prefill >= PREFILL_SHARE * tokens:
            context = sum((end - start) * (end + start) / 2 for start, end in chunks)
            self._compute.add((1.0, tokens, context), seconds)

    def load_seconds(self, loaded: LoadBytes) -> float | None:
        """Of a load that waits for no other one. What two tiers bring comes side by side."""
        sizes = {far: size for far, size in ((False, loaded.near), (True, loaded.far)) if size}
        times = [self._loads[far].seconds((1.0, size)) for far, size in sizes.items()]
        known = [seconds for seconds in times if seconds is not None]
        return max(known, default=0.0) if len(known) == len(times) else None

    def compute_seconds(self, start: int, end: int) -> float | None:
        """Of a prefill of tokens [start, end) on its own."""
        tokens = end - start
        steps = -(-tokens // self._chunk_tokens)
        return self._compute.seconds((steps, tokens, tokens * (start + end) / 2))

    def excess_seconds(self, loaded: LoadBytes, start: int, end: int) -> float:
        """What loading tokens [start, end) takes longer than computing them.

        0: it does not, or there is no choice, or nothing is known.
        """
        load, compute = self.load_seconds(loaded), self.compute_seconds(start, end)
        if self.loads is not Loads.AUTO or load is None or compute is None:
            return 0.0
        return max(0.0, load - compute)

    def affords(self, excess_seconds: float) -> bool:
        """Whether to load what takes so much longer than computing: if nothing, or now and then."""
        return self.loads is not Loads.NEVER and excess_seconds <= self._credit_seconds

    def note_load_begun(self, excess_seconds: float) -> None:
        """A load was submitted that takes so much longer than computing: paid for out of the credit."""
        self._credit_seconds = max(0.0, self._credit_seconds - excess_seconds)

    def note_computed_instead(self, start: int, end: int) -> None:
        """Tokens [start, end) are computed though a tier has them: that earns a try now and then."""
        self._credit_seconds += TRIAL_SHARE * (self.compute_seconds(start, end) or 0.0)

    def keeping_pays(self, kept: LoadBytes, tokens: int) -> bool:
        """Whether a preempted request resumes sooner by a load of all it had than by computing it."""
        if self.loads is not Loads.AUTO:
            return self.loads is Loads.ALWAYS
        load, compute = self.load_seconds(kept), self.compute_seconds(0, tokens)
        return load is None or compute is None or load <= compute


def hit_bytes(
    geometry: Geometry, begin: int, end: int, far: Sequence[NDArray[np.uint8]] | None = None
) -> LoadBytes:
    """Most bytes that a load brings for a hit at `end`, where the full groups have `begin` tokens.

    They may have more than `end`: then they load nothing. Spans and states are counted whole: what
    of them is on the device is not known.

    Args:
        far: of each group's keys, 1 where only a tier below has it; None: nowhere.
    """
    total = below = 0
    for group, rules in enumerate(geometry.rules):
        span, size = geometry.block_tokens[group], geometry.groups[group].page_bytes
        if rules.kind == "full":
            last = end // span
            first = min(begin // span, last)
        elif rules.kind == "span":
            first, last = rules.need_begin(end) // span, -(-end // span)
        elif rules.kind == "state":
            first, last = end // span - 1, end // span
        else:
            continue
        total += (last - first) * size
        below += 0 if far is None else int(far[group][max(first, 0) : last].sum()) * size
    return LoadBytes(total - below, below)
