"""Who computes what in a step: one token budget for decode and prefill, oldest first.

Rules, each with the reason that keeps the engine from standing still:

* The oldest request, running or not, is served first: the manager keeps room for it alone, and
  while it waits for space nobody else gets any. If it waits, younger ones make room.
* Running requests come next, in order of arrival; each decode has its token reserved out of the
  budget, the oldest prefill gets at least one token.
* A running request that finds no space does what the manager says: preempts the youngest one that
  is younger than itself, waits with its pages (older ones can take them), or starts again.
* While a running request is blocked, nothing younger allocates and nothing is admitted.
* A waiting request is admitted in order of arrival. It is passed over only while it would compute
  what a request in this step or a load is about to give it, or while a tier does not know yet.
* A step does a bounded number of lookups. One that waits for a load is not looked up, and holds
  nothing in the tier, until that load has ended; where the others are too many, the next step goes
  on where this one stopped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcache.connectors.driver import Offload
from kvcache.core.errors import ConfigError
from kvcache.core.manager import Manager
from kvcache.core.records import Grant, Hit
from kvcache.engine.forecast import common_tokens, has_room
from kvcache.engine.queues import Queues, age
from kvcache.engine.request import Request, Status

MAX_LOOKUPS = 64
"""In one step; more waiting requests have their turn in the next one."""


class Work(NamedTuple):
    """Tokens [start, end) of a request are computed in this step; already committed."""

    request: Request
    start: int
    end: int


def _decodes(running: Sequence[Request]) -> int:
    return sum(request.remaining == 1 for request in running)


class Scheduler(Queues):
    """Decides who gets pages and budget. Computes nothing.

    Args:
        manager: pages and keys; only this scheduler allocates from it.
        offload: the tier below, or None.
        move_pages: does the copies that the manager asks for; called before a load is submitted.
            The caller does the same before it computes.
        token_budget: most tokens of one step, all requests together.
        max_requests: most requests that run or load at one time.
    """

    def __init__(
        self,
        manager: Manager,
        offload: Offload | None,
        *,
        move_pages: Callable[[], None],
        token_budget: int,
        max_requests: int,
    ) -> None:
        if max_requests < 1:
            raise ConfigError(f"max_requests is {max_requests}: it must be above 0")
        if token_budget < max_requests:
            raise ConfigError(
                f"token_budget is {token_budget}: below max_requests ({max_requests}), one prefill"
                " could wait for ever behind the decodes; raise it or lower max_requests"
            )
        super().__init__(manager, offload)
        self._move_pages = move_pages
        self._budget = token_budget
        self._max_requests = max_requests
        self._grid = manager.geometry.grid_tokens
        self._resume_at = 0
        """Rank of arrival with which the next admission begins."""

    # ---- one step ------------------------------------------------------------------------------

    def schedule(self) -> list[Work]:
        """Work for the step that is open in the manager: allocated and committed."""
        batch: list[Work] = []
        budget = self._budget
        running = list(self.running)
        if self.waiting and running and self._is_oldest(self.waiting[0]):
            budget -= self._serve_oldest(batch, max(1, budget - _decodes(running)))
            running = [r for r in running if r.status is Status.RUNNING]
        prefilling = bool(batch)
        decodes = _decodes(running)
        for request in running:
            if request.status is not Status.RUNNING:
                continue  # it made room for an older one
            decode = request.remaining == 1
            decodes -= decode
            end = self._chunk_end(request, request.computed, budget - decodes, share=prefilling)
            if end == request.computed:
                continue
            grant = self._grant(request, request.computed, end) or self._make_room(request, end)
            if grant is None:
                return batch
            budget -= self._commit(batch, request, grant)
            prefilling |= not decode
        self._admit(batch, budget, prefilling=prefilling)
        return batch

    def _serve_oldest(self, batch: list[Work], budget: int) -> int:
        """The oldest request waits, and younger ones run: it goes first. Returns its tokens.

        Nothing is in the batch yet, so that the pages of those who make room come free at once.
        After each it is looked up again: they may have left what it can use.
        """
        request = self.waiting[0]
        if request.awaits is not None:
            return 0
        self._forget_refusal()
        while (used := self._start(request, batch, budget, share=False)) is None:
            if not self._is_refused(request) or not self.running:
                return 0
            at_limit = len(self.running) + len(self.loading) >= self._max_requests
            if not at_limit and self._manager.blockage(request.id) != "preempt":
                return 0
            self.preempt(self.running[-1])
        return used

    def _commit(self, batch: list[Work], request: Request, grant: Grant) -> int:
        self._manager.commit(request.id, grant.end)
        request.granted = grant.end
        batch.append(Work(request, grant.start, grant.end))
        return grant.end - grant.start

    def _chunk_end(self, request: Request, start: int, budget: int, *, share: bool) -> int:
        """End of the next chunk; `start` if it has to wait.

        On the hit grid, where it costs no further state, unless it is the last one. A chunk that
        cannot reach the grid waits if another prefill uses the step already (`share`).
        """
        end = min(request.known, start + budget)
        if end == request.known:
            return end
        floored = end // self._grid * self._grid
        if floored > start:
            return floored
        return start if share else max(start, end)

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

    def _make_room(self, request: Request, end: int) -> Grant | None:
        """Preempt younger requests, youngest first, until the chunk fits; or the request itself."""
        while (why := self._manager.blockage(request.id)) == "preempt":
            if self.running[-1] is request:
                return None  # who is younger loads: that ends
            self.preempt(self.running[-1])
            grant = self._grant(request, request.computed, end)
            if grant is not None:
                return grant
        if why == "restart":
            self.preempt(request)
        return None

    # ---- admission -----------------------------------------------------------------------------

    def _admit(self, batch: list[Work], budget: int, *, prefilling: bool) -> None:
        lookups = 0
        for request in self._candidates():
            if request.awaits is not None:
                continue
            if self._is_blocked(request, budget):
                return
            if lookups == MAX_LOOKUPS:
                self._resume_at = request.order
                return
            lookups += 1
            used = self._start(request, batch, budget, share=prefilling)
            if used is None:
                return
            budget -= used
            prefilling |= used > 0

    def _start(
        self, request: Request, batch: list[Work], budget: int, *, share: bool
    ) -> int | None:
        """Look a waiting request up, and let it run or load if it can.

        Returns the tokens that it computes in this step; 0 where it loads, or waits for what others
        bring; None where there is no budget or no space, for younger ones neither.
        """
        hit = self._lookup(request)
        if hit is None:
            return 0
        request.needs_budget = hit.hit_tokens == hit.device_tokens
        if self._comes_by_itself(request, hit, batch):
            return 0
        end = self._chunk_end(request, hit.hit_tokens, budget, share=share)
        if end == hit.hit_tokens and request.needs_budget:
            return None
        grant = self._first_grant(request, hit, end)
        return None if grant is None else self._begin(request, hit, grant, batch)

    def _begin(self, request: Request, hit: Hit, grant: Grant, batch: list[Work]) -> int:
        """It has its pages: it runs, or waits for a load. Returns the tokens that it computes."""
        self.waiting.remove(request)
        if grant.load:
            self._move_pages()
        if self._offload is not None and not self._offload.start_load(request.id, grant):
            self._wait_again(request)  # the tier's queue is full
        elif grant.load:
            self._park(request, hit, grant)
        else:
            self._run(request, grant.hit_tokens, 0)
            return self._commit(batch, request, grant)
        return 0

    def _candidates(self) -> list[Request]:
        """Who waits, oldest first; after a step with too many, beginning where it stopped."""
        first = bisect_left(self.waiting, self._resume_at, key=age)
        self._resume_at = 0
        return self.waiting[first:] + self.waiting[:first]

    def _is_blocked(self, request: Request, budget: int) -> bool:
        """Whether neither this request nor a younger one can start, as far as is known already."""
        if len(self.running) + len(self.loading) >= self._max_requests:
            return True
        if self._is_refused(request) and self._still_full():
            return True
        return budget < 1 and (self._offload is None or request.needs_budget)

    def _first_grant(self, request: Request, hit: Hit, end: int) -> Grant | None:
        """None: there is no space for it; it is not asked again before some comes free."""
        oldest, admitted = self._is_oldest(request), [*self.running, *self.loading.values()]
        if len(admitted) < self._max_requests and (
            oldest or has_room(self._manager, request, hit, admitted)
        ):
            grant = self._grant(request, hit.hit_tokens, max(end, hit.hit_tokens + 1))
            if grant is not None:
                return grant
        self._note_refusal(request)
        return None

    def _lookup(self, request: Request) -> Hit | None:
        if self._offload is None:
            return self._manager.lookup(request.id)
        return self._offload.lookup(request.id)

    def _comes_by_itself(self, request: Request, hit: Hit, batch: list[Work]) -> bool:
        """Whether a load in flight or this step brings more of the prompt than is there now.

        If it is a load, the request waits for its end, and the tier lets go what it held for it:
        after the load it is on the device.
        """
        most = max(hit.hit_tokens, hit.pending_tokens)
        for other in self.loading.values() if most > hit.device_tokens else ():
            if (
                common_tokens(self._manager, request, other, min(most, other.granted))
                > hit.device_tokens
            ):
                request.awaits = other
                if self._offload is not None:
                    self._offload.release(request.id)
                return True
        return hit.pending_tokens > hit.hit_tokens and bool(batch or self.loading)
