"""A trace by its file name: which reader, which block size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvcache.bench.traces import mooncake, prefix_tree
from kvcache.bench.traces.base import TraceRequest
from kvcache.bench.traces.lanes import LaneSettings, lane_requests
from kvcache.bench.traces.live import Arrivals, LiveSessions, OpenLoop
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
            raise self._empty()

    def arrivals(self, lanes: LaneSettings | None = None, *, speed: float = 1.0) -> Arrivals:
        """Requests for a replay that takes time: at their times, or from live sessions.

        Args:
            speed: without lanes: how many times as fast as recorded.
        """
        if lanes is not None:
            self._require_sessions("--lanes replays live sessions")
            sessions = list(prefix_tree.read_sessions(self.path))
            if not sessions:
                raise self._empty()
            return LiveSessions(sessions, lanes)
        if self.format == PREFIX_TREE:
            raise ConfigError(
                f"{self.path}: each of its sessions has a clock of its own, so that a replay in time"
                " has to know how many live at once: give --lanes"
            )
        return OpenLoop(self.requests(), speed=speed)

    def _empty(self) -> InputError:
        return InputError(f"{self.path} has no request: expected a {self.format} trace")

    def _require_sessions(self, what: str) -> None:
        if self.format != PREFIX_TREE:
            raise ConfigError(
                f"{what}: {self.path} is a {self.format} trace, which has none (a prefix-tree .csv or"
                " .csv.gz has)"
            )

    def _read(self, lanes: LaneSettings | None) -> Iterator[TraceRequest]:
        if lanes is None and self.format == MOONCAKE:
            return mooncake.read_mooncake(self.path)
        if lanes is None:
            return prefix_tree.read_prefix_tree(self.path)
        self._require_sessions("--lanes replays live sessions")
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
