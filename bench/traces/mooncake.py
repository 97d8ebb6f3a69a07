"""Mooncake traces: one JSON object a line, 512-token blocks, ids global to the file.

    {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [0, 14, 15, ...]}

One id for each block of the prompt, the last block may be partial: it gets no number here. Source
of the format: GitHub kvcache-ai/Mooncake, FAST25-release.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.bench.traces.base import (
    MAX_SECONDS,
    MAX_TOKENS,
    TraceRequest,
    bad_line,
    is_number,
    is_whole,
    shorten,
)
from kvcache.bench.traces.lines import read_lines

BLOCK_TOKENS = 512
_MAX_ID = 2**63 - 1


def read_mooncake(path: Path) -> Iterator[TraceRequest]:
    """Requests in file order, which must be the order of time. Streams: memory is O(unique ids)."""
    names = _BlockNumbers(path)
    before = 0.0
    for line, text in read_lines(path):
        if not text.strip():
            continue
        fields = _parse(path, line, text)
        prompt, output, ids = _lengths(path, line, fields)
        seconds = _seconds(path, line, fields, before)
        before = seconds
        numbers = names.number(line, ids)[: prompt // BLOCK_TOKENS]
        blocks = np.array(numbers, dtype=np.int64)
        yield TraceRequest(line, seconds, "", 0, prompt, output, blocks)


def _parse(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad_line(
            path, line, f"not JSON ({error}): {shorten(text)}", "one JSON object"
        ) from error
    if not isinstance(fields, dict):
        raise bad_line(path, line, shorten(fields), "one JSON object")
    for name in ("timestamp", "input_length", "output_length", "hash_ids"):
        if name not in fields:
            raise bad_line(
                path,
                line,
                f"no field {name!r} among {shorten(sorted(fields))}",
                "timestamp, input_length, output_length and hash_ids",
            )
    return fields


def _lengths(path: Path, line: int, fields: dict[str, Any]) -> tuple[int, int, list[Any]]:
    prompt, output, ids = fields["input_length"], fields["output_length"], fields["hash_ids"]
    for name, value, low in (("input_length", prompt, 1), ("output_length", output, 0)):
        if not is_whole(value, low, MAX_TOKENS):
            raise bad_line(
                path, line, f"{name} is {shorten(value)}", f"a whole number, {low} to {MAX_TOKENS}"
            )
    blocks = -(-prompt // BLOCK_TOKENS)
    if not isinstance(ids, list) or len(ids) != blocks:
        found = f"has {len(ids)} ids" if isinstance(ids, list) else f"is {shorten(ids)}"
        raise bad_line(
            path,
            line,
            f"hash_ids {found} for input_length {prompt}",
            f"a list of {blocks}, one id for every {BLOCK_TOKENS} tokens or part of them",
        )
    return prompt, output, ids


def _seconds(path: Path, line: int, fields: dict[str, Any], before: float) -> float:
    stamp = fields["timestamp"]
    if not is_number(stamp, MAX_SECONDS * 1000):
        raise bad_line(
            path, line, f"timestamp is {shorten(stamp)}", "milliseconds, a number of 0 or above"
        )
    seconds = float(stamp) / 1000
    if seconds < before:
        raise bad_line(
            path,
            line,
            f"timestamp {stamp} is before the {before * 1000:.0f} of an earlier line",
            "lines in the order of time",
        )
    return seconds


class _BlockNumbers:
    """Numbers ids in the order of their first appearance.

    Refuses ids that are not prefix-chained: an id must follow the same id wherever it appears, or
    equal ids would not mean equal prefixes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers: dict[int, int] = {}
        self._parents: list[int] = []
        self._lines: list[int] = []

    def number(self, line: int, ids: list[Any]) -> list[int]:
        """Numbers of one request's ids. O(ids)."""
        numbers: list[int] = []
        parent = -1
        for name in ids:
            number = self._numbers.get(name, -1) if type(name) is int else -1
            if number < 0:
                number = self._add(line, name, parent)
            elif self._parents[number] != parent:
                raise bad_line(
                    self._path,
                    line,
                    f"block id {name} follows another prefix than on line {self._lines[number]}",
                    "each id after the same id everywhere",
                )
            numbers.append(number)
            parent = number
        return numbers

    def _add(self, line: int, name: Any, parent: int) -> int:
        if not is_whole(name, 0, _MAX_ID):
            raise bad_line(
                self._path, line, f"block id {shorten(name)}", "whole numbers from 0 below 2^63"
            )
        number = self._numbers[name] = len(self._parents)
        self._parents.append(parent)
        self._lines.append(line)
        return number
