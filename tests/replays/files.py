"""Trace files that tests write."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcache.bench.traces import LaneSettings, TraceRequest, open_trace
from kvcache.bench.traces.prefix_tree import HEADER

# Session 0504 of the Claude Code sample, with its known block identities.
SESSION_0504 = (
    "0504,0,0.0,0,-1,0,173,11133,139,t,u,0.0,8.79",
    "0504,1,13.0,0,0,173,176,11300,96,t,t,4.0,3.09",
    "0504,2,3075.0,0,1,170,176,11306,102,t,t,3058.0,3.38",
)


def write(path: Path, lines: Sequence[str]) -> Path:
    """A file of these lines, compressed where its name says so."""
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    return path


def csv(tmp_path: Path, rows: Sequence[str], name: str = "t.csv.gz") -> Path:
    """A prefix-tree file of these rows."""
    return write(tmp_path / name, [HEADER, *rows])


def mooncake_line(
    stamp: Any = 0, prompt: Any = 1200, output: Any = 5, ids: Any = (0, 1, 2), **other: Any
) -> str:
    """A line of a Mooncake trace."""
    ids = list(ids) if isinstance(ids, tuple) else ids
    fields = {"timestamp": stamp, "input_length": prompt, "output_length": output, "hash_ids": ids}
    return json.dumps(fields | other)


def read(path: Path, lanes: LaneSettings | None = None) -> list[TraceRequest]:
    """All requests of a file."""
    return list(open_trace(path).requests(lanes))
