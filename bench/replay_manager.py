"""The manager of a replay under the engine's scheduler: it tells what became of each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import thread_time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.replay_watch import Watch
from kvcache.core.explanation import Explanation
from kvcache.core.manager import Manager
from kvcache.core.records import KEYED_DTYPE, Grant


class Story(NamedTuple):
    """What became of one request."""

    started: float
    """When it got its first pages."""
    explanation: Explanation
    """Of the lookup that gave it those."""
    policy_states: int
    """Of its states, those that the retention policy had written."""
    end_states: int
    """Those that got their key when it ended."""


class _Start(NamedTuple):
    seconds: float
    explanation: Explanation


class ReplayManager(Manager):
    """As `Manager`; explains each request when it starts, counts states by request.

    Args:
        clock: seconds.
        state_group: whose keyed pages are counted; None: there are no states.
        tiered: whether `take_keyed` will be read.
        checking: as of `Watch`.
        settings: of `Manager`.

    Attributes:
        watch: moves, peaks, checks.
        explain_request: `explain`, or that of a tier below the device.
        explain_seconds: that explanations took.
    """

    def __init__(
        self,
        *args: Any,
        clock: Callable[[], float],
        state_group: int | None,
        tiered: bool,
        checking: bool,
        **settings: Any,
    ) -> None:
        super().__init__(*args, journal=tiered or state_group is not None, **settings)
        self.watch = Watch(self, checking=checking)
        self.explain_request: Callable[[int], Explanation] = self.explain
        self.explain_seconds = 0.0
        self._clock = clock
        self._state_group = state_group
        self._tiered = tiered
        self._starts: dict[int, _Start] = {}
        self._unstarted: set[int] = set()
        self._states: Counter[int] = Counter()
        self._stories: dict[int, Story] = {}
        self._kept: list[NDArray[np.void]] = []
        """Records that were counted, and wait for `take_keyed`."""

    def open_foreign(self, digests: NDArray[np.uint8], **fields: Any) -> int:
        """As `Manager.open_foreign`."""
        handle = super().open_foreign(digests, **fields)
        self._unstarted.add(handle)
        return handle

    def allocate(self, handle: int, tokens: int, *, drafts: int = 0) -> Grant | None:
        """As `Manager.allocate`."""
        grant = super().allocate(handle, tokens, drafts=drafts)
        if grant is not None and handle in self._unstarted:
            self._note(handle, adopts=grant.hit_tokens > 0 or grant.load > 0)
            if not grant.load:
                self._unstarted.remove(handle)
        return grant

    def _note(self, handle: int, *, adopts: bool) -> None:
        """It has its first pages; or again, where what it was to load did not come."""
        start = self._starts.get(handle)
        if start is None or adopts:
            seconds = self._clock() if start is None else start.seconds
            used = thread_time()
            self._starts[handle] = _Start(seconds, self.explain_request(handle))
            self.explain_seconds += thread_time() - used

    def finish(self, handle: int) -> None:
        """As `Manager.finish`; its story can be taken then."""
        self._unstarted.discard(handle)
        self._tally()
        policy_states = self._states.pop(handle, 0)
        self.watch.peak()
        super().finish(handle)
        self._tally()
        start = self._starts.pop(handle)
        self._stories[handle] = Story(*start, policy_states, self._states.pop(handle, 0))

    def take_story(self, handle: int) -> Story:
        """Of a request that has finished; once."""
        return self._stories.pop(handle)

    def _tally(self) -> None:
        """Count the states that got a key since the last call."""
        if self._state_group is None:
            return
        rows = super().take_keyed()
        self._states.update(rows["handle"][rows["group"] == self._state_group].tolist())
        if self._tiered and len(rows):
            self._kept.append(rows)

    def take_keyed(self) -> NDArray[np.void]:
        """As `Manager.take_keyed`."""
        if self._state_group is None:
            return super().take_keyed()
        self._tally()
        kept, self._kept = self._kept, []
        return np.concatenate(kept) if kept else np.empty(0, KEYED_DTYPE)

    def take_moves(self) -> NDArray[np.void]:
        """As `Manager.take_moves`."""
        moves = super().take_moves()
        self.watch.moves(moves)
        return moves
