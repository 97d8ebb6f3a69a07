"""A trace by its file name: which reader, which block size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvcache.bench.traces import mooncake, prefix_tree
from kvcache.bench.traces.base import TraceRequest
from kvcache.bench.traces.lanes import LaneSettings, lane_requests
from kvcache.core.errors import ConfigError, InputError

MOONCAKE = "mooncake"
PREFIX_TREE = "prefix-tree"
_SUFFIXES = {".jsonl": MOONCAKE, ".csv": PREFIX_TREE}
_BLOCK_TOKENS = {MOONCAKE: mooncake.BLOCK_TOKENS, PREFIX_TREE: prefix_tree.BLOCK_TOKENS}


@dataclass(frozen=True)
class TraceFile:
    """A trace that was named, not yet read. The content is checked while it is read."""

    path: Path
    format: str
    block_tokens: int

    def requests(self, lanes: LaneSettings | None = None) -> Iterator[TraceRequest]:
        """Requests in the order in which they are to be served.

        Without lanes: in file order (a prefix-tree file: session after session). A file without
        any request is an `InputError`.
        """
        empty = True
        for request in self._read(lanes):
            empty = False
            yield request
        if empty:
            raise InputError(f"{self.path} has no request: expected a {self.format} trace")

    def _read(self, lanes: LaneSettings | None) -> Iterator[TraceRequest]:
        if lanes is None and self.format == MOONCAKE:
            return mooncake.read_mooncake(self.path)
        if lanes is None:
            return prefix_tree.read_prefix_tree(self.path)
        if self.format != PREFIX_TREE:
            raise ConfigError(
                f"--lanes replays live sessions: {self.path} is a {self.format} trace, which has"
                " none (a prefix-tree .csv or .csv.gz has)"
            )
        sessions = list(prefix_tree.read_sessions(self.path))
        return lane_requests(sessions, lanes) if sessions else iter(())


def open_trace(path: str | Path) -> TraceFile:
    """The trace of this name. `ConfigError` where the name tells no format; reads nothing."""
    path = Path(path)
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in _SUFFIXES:
        raise ConfigError(
            f"{path} is no trace that can be read: the name must end in .jsonl or .jsonl.gz"
            " (Mooncake), .csv or .csv.gz (prefix tree)"
        )
    name = _SUFFIXES[suffix]
    return TraceFile(path, name, _BLOCK_TOKENS[name])
