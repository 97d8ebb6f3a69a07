"""Prefix-tree csv: agent sessions, 64-token blocks, block identity as "shares k with row p".

    trace,i,t,agent,parent,keep_blocks,n_blocks,in,out,stop,kind,think,api

Row i of a session shares its first keep_blocks blocks with row `parent` of the same session; the
other n_blocks - keep_blocks are new. Sessions share nothing with each other, and have a clock each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.traces.base import (
    MAX_SECONDS,
    MAX_TOKENS,
    TraceRequest,
    bad_line,
    is_number,
    shorten,
)
from kvcache.bench.traces.lines import read_lines
from kvcache.core.errors import InputError

BLOCK_TOKENS = 64
HEADER = "trace,i,t,agent,parent,keep_blocks,n_blocks,in,out,stop,kind,think,api"
_COLUMNS = HEADER.split(",")
_DECIMAL = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?(e[+-]?[0-9]{1,3})?")


class Row(NamedTuple):
    """One request of a session, without its blocks."""

    line: int
    seconds: float
    """Start, from the start of the session."""
    agent: int
    parent: int
    """Row that owns the shared prefix, -1 for none."""
    keep_blocks: int
    n_blocks: int
    prompt_tokens: int
    output_tokens: int
    api_seconds: float
    """How long the request took."""


class Session(NamedTuple):
    """The rows of one session in time order. `rows[i].parent` is below i."""

    name: str
    rows: list[Row]

    def unique_blocks(self) -> int:
        """Blocks that the session makes."""
        return sum(row.n_blocks - row.keep_blocks for row in self.rows)


def read_prefix_tree(path: Path) -> Iterator[TraceRequest]:
    """Requests in file order: session after session, each on its own clock.

    Memory is O(one session). To see sessions side by side, replay them in lanes.
    """
    first = 0
    for session in read_sessions(path):
        for row, blocks in zip(session.rows, expand(session.rows, first), strict=True):
            yield as_request(session.name, row, blocks)
        first += session.unique_blocks()


def as_request(session: str, row: Row, blocks: NDArray[np.int64]) -> TraceRequest:
    """The uniform record of a row."""
    return TraceRequest(
        row.line, row.seconds, session, row.agent, row.prompt_tokens, row.output_tokens, blocks
    )


def expand(rows: Sequence[Row], first: int = 0) -> Iterator[NDArray[np.int64]]:
    """Block numbers of each row, counted from `first`. Rows that nobody shares are not kept."""
    last_use = {row.parent: i for i, row in enumerate(rows)}
    shared: dict[int, NDArray[np.int64]] = {}
    for i, row in enumerate(rows):
        new = np.arange(first, first + row.n_blocks - row.keep_blocks, dtype=np.int64)
        first += len(new)
        blocks = new
        if row.keep_blocks:
            blocks = np.concatenate((shared[row.parent][: row.keep_blocks], new))
            if last_use[row.parent] == i:
                del shared[row.parent]
        if i in last_use:
            shared[i] = blocks
        yield blocks


def read_sessions(path: Path) -> Iterator[Session]:
    """Sessions in file order; every row is checked against the rules of the format."""
    lines = read_lines(path)
    for line, text in lines:
        if text != HEADER:
            raise bad_line(path, line, f"the header is {shorten(text)}", HEADER)
        break
    seen: set[str] = set()
    session: Session | None = None
    for line, text in lines:
        fields = text.split(",")
        if len(fields) != len(_COLUMNS):
            raise bad_line(
                path, line, f"{len(fields)} fields in {shorten(text)}", f"{len(_COLUMNS)}: {HEADER}"
            )
        if session is None or fields[0] != session.name:
            if session is not None:
                yield session
            if fields[0] in seen:
                raise bad_line(
                    path, line, f"session {shorten(fields[0])} again", "all its rows together"
                )
            seen.add(fields[0])
            session = Session(fields[0], [])
        session.rows.append(_RowReader(path, line, fields).row(session.rows))
    if session is not None:
        yield session


class _RowReader:
    """Reads one line; every error names file, line and column."""

    def __init__(self, path: Path, line: int, fields: list[str]) -> None:
        self._path = path
        self._line = line
        self._fields = dict(zip(_COLUMNS, fields, strict=True))

    def row(self, earlier: Sequence[Row]) -> Row:
        """The row, checked against the earlier rows of its session."""
        if self._whole("i", 0) != len(earlier):
            raise self._error("i", f"{len(earlier)}, counting the session's rows")
        row = Row(
            self._line,
            self._seconds("t"),
            self._whole("agent", 0),
            self._whole("parent", -1),
            self._whole("keep_blocks", 0),
            self._whole("n_blocks", 0),
            self._whole("in", 1),
            self._whole("out", 0),
            self._seconds("api"),
        )
        self._seconds("think")
        if self._fields["stop"] not in ("t", "e", ""):
            raise self._error("stop", "t, e or nothing")
        if self._fields["kind"] not in ("t", "u"):
            raise self._error("kind", "t or u")
        if earlier and row.seconds < earlier[-1].seconds:
            raise self._error("t", f"{earlier[-1].seconds} or later, rows in the order of time")
        blocks = row.prompt_tokens // BLOCK_TOKENS
        if row.n_blocks != blocks:
            raise self._error(
                "n_blocks", f"{blocks}, the full blocks of {row.prompt_tokens} tokens"
            )
        self._check_prefix(row, earlier)
        return row

    def _check_prefix(self, row: Row, earlier: Sequence[Row]) -> None:
        if (row.parent == -1) != (row.keep_blocks == 0):
            raise self._error(
                "parent", f"-1 exactly where keep_blocks is 0 (it is {row.keep_blocks})"
            )
        if row.parent >= len(earlier):
            raise self._error("parent", f"an earlier row of the session, below {len(earlier)}")
        most = row.n_blocks
        if row.parent >= 0:
            most = min(most, earlier[row.parent].n_blocks)
        if row.keep_blocks > most:
            raise self._error(
                "keep_blocks", f"at most {most}, the blocks of this row and of its parent"
            )

    def _whole(self, column: str, low: int) -> int:
        text = self._fields[column]
        digits = text.removeprefix("-")
        if digits.isascii() and digits.isdecimal() and len(text) < 20:
            value = int(text)
            if low <= value <= MAX_TOKENS:
                return value
        raise self._error(column, f"a whole number, {low} to {MAX_TOKENS}")

    def _seconds(self, column: str) -> float:
        text = self._fields[column]
        if _DECIMAL.fullmatch(text) and is_number(float(text), MAX_SECONDS):
            return float(text)
        raise self._error(column, "seconds, a number of 0 or above")

    def _error(self, column: str, expected: str) -> InputError:
        found = f"{column} is {shorten(self._fields[column])}"
        return bad_line(self._path, self._line, found, expected)
