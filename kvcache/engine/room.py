"""Pages for requests that run: granted, or made free by others that are preempted."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.connectors.driver import Offload
from kvcache.core.manager import Manager
from kvcache.core.records import Grant
from kvcache.engine.costs import Costs
from kvcache.engine.forecast import lacks_room
from kvcache.engine.queues import Queues
from kvcache.engine.request import Request, Status


class Room(Queues):
    """Says who makes room for whom.

    Args:
        draft_tokens: most guesses of a decoding request in one step.
    """

    def __init__(
        self,
        manager: Manager,
        offload: Offload | None,
        costs: Costs,
        move_pages: Callable[[], None],
        *,
        draft_tokens: int,
    ) -> None:
        super().__init__(manager, offload, costs, move_pages)
        self._draft_tokens = draft_tokens
        self._grid = manager.geometry.grid_tokens

    def _victim(self, request: Request, *, anybody: bool) -> Request | None:
        """The running request that has to make room first; None: nobody has to.

        Of those that rank behind it; for one that waits only of a lower priority, too; or anybody.
        Never the oldest. None that this step computes: its pages stay in use.
        """
        waits = request.status is Status.WAITING
        for other in reversed(self.running):
            if other is request or other is self.oldest or other.in_step:
                continue
            behind = other.rank > request.rank
            if anybody or (behind and (not waits or other.priority > request.priority)):
                return other
        return None

    def _grant(self, request: Request, start: int, end: int) -> Grant | None:
        """Pages for [start, end), or for a shorter chunk where the arena has no more now."""
        while True:
            grant = self._manager.allocate(request.id, end - start)
            if grant is not None or self._manager.blockage(request.id) == "frozen":
                return grant
            shorter = (start + (end - start) // 2) // self._grid * self._grid
            if shorter <= start:
                shorter = (start // self._grid + 1) * self._grid
            if shorter >= end:
                return None
            end = shorter

    def _grant_drafts(self, request: Request, budget: int) -> Grant | None:
        """Pages for the next token and guesses after it, if there is budget and space for any."""
        most = min(self._draft_tokens, budget - 1, len(request.tokens) - request.known - 1)
        if most < 1:
            return None
        grant = self._manager.allocate(request.id, 1, drafts=most)
        if grant is None or grant.end - grant.start < 2:
            return None
        request.granted = grant.end
        return grant

    def _make_room_early(self, request: Request, end: int) -> None:
        """Preempt others for the oldest before it is refused: after that no store can hold pages."""
        while request.status is Status.RUNNING and lacks_room(
            self._manager, request.id, end - request.computed
        ):
            victim = self._victim(request, anybody=True)
            if victim is None:
                return
            self.preempt(victim)

    def _make_room(self, request: Request, end: int) -> Grant | None:
        """Preempt others, the last first, until the chunk fits; or the request itself."""
        while (why := self._manager.blockage(request.id)) in ("preempt", "wait"):
            victim = self._victim(request, anybody=request is self.oldest)
            if victim is None:
                return None  # those before it hold the space, or loads, pins and steps, which end
            self.preempt(victim)
            if request.status is not Status.RUNNING:
                return None  # aborted or preempted from inside the runner
            grant = self._grant(request, request.computed, end)
            if grant is not None:
                return grant
        if why == "restart":
            self.preempt(request)
        return None
