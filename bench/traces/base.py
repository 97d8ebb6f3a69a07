"""The record that every reader yields, and what a field of a trace may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.core.errors import InputError

MAX_TOKENS = 2**24
"""Longest prompt or reply that a reader takes: sixteen 1M contexts. A wild number in a broken file
must end in an error, not in an attempt to number its blocks."""

MAX_SECONDS = 1e9
"""Largest time stamp that a reader takes, about 30 years."""


class TraceRequest(NamedTuple):
    """One request of a trace.

    `blocks` numbers the *full* blocks of the prompt, `prompt_tokens // block_tokens` of them. Equal
    numbers, anywhere in one trace, mean an equal prefix up to the end of that block; so merging g
    neighbours into one block, known by the number of the last, is exact. Numbers are dense from 0.
    """

    line: int
    """Line of the file, the first is 1."""
    arrival_seconds: float
    session: str
    """Name of the session, empty where the trace has none."""
    agent: int
    """0: the main agent of the session; above 0: a sub-agent."""
    prompt_tokens: int
    output_tokens: int
    blocks: NDArray[np.int64]
    counted: bool = True
    """False while the caches warm up: served, but not part of the figures."""


def bad_line(path: Path, line: int, found: str, expected: str) -> InputError:
    """The error of one broken line: where, what, and what should stand there."""
    return InputError(f"{path}, line {line}: {found}: expected {expected}")


def shorten(value: object) -> str:
    """A value as an error message may show it: at most 60 characters, whatever the input."""
    text = repr(value[:60] if isinstance(value, str | list) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_whole(value: Any, low: int, high: int) -> bool:
    """A true int (no bool, no float) in [low, high]."""
    return type(value) is int and low <= value <= high


def is_number(value: Any, high: float) -> bool:
    """An int or float (no NaN, no bool) in [0, high]."""
    return type(value) in (int, float) and 0 <= value <= high
