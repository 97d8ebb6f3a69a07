"""Who computes what in a step: one token budget for decode and prefill, in order of rank.

A request's rank is its arrival, moved by its priority: a step of priority is worth
`priority_seconds` of waiting. So a rank never changes, only requests that came before a certain
moment ever rank before it, and nobody waits for ever behind new arrivals. With equal priorities it
is the order of arrival.

Rules, each with the reason that keeps the engine from standing still:

* Running requests come first, by rank; each decode has its token reserved out of the budget, the
  first prefill gets at least one token.
* A running request that finds no space has those that rank behind it preempted, the last first,
  waits with its pages, or starts again.
* A waiting request that is the first of all and the oldest, or of a higher priority than running
  ones that rank behind it, comes before the running ones: they make room for it.
* The oldest request, running or not, is not preempted for another one, whatever its rank: the
  manager keeps room for it alone, and while it waits for space nobody else gets any. Whenever
  somebody is blocked, it alone still goes on, and everybody makes room for it. So the oldest always
  ends, or the first of all does; each of them is some time both.
* While a running request is blocked, nothing else allocates and nothing is admitted.
* A waiting request is admitted by rank. It is passed over only while it would compute
  what a request in this step or a load is about to give it, or while a tier does not know yet.
* A step does a bounded number of lookups. One that waits for a load is not looked up, and holds
  nothing in the tier, until that load has ended; where the others are too many, the next step goes
  on where this one stopped.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcache.connectors.base import LoadBytes
from kvcache.connectors.driver import Offload
from kvcache.core.errors import ConfigError
from kvcache.core.manager import Manager
from kvcache.core.records import Grant, Hit
from kvcache.engine.costs import Costs, Loads, hit_bytes
from kvcache.engine.forecast import common_tokens, has_room
from kvcache.engine.queues import rank
from kvcache.engine.request import Request, Status
from kvcache.engine.room import Room

MAX_LOOKUPS = 64
"""In one step; more waiting requests have their turn in the next one."""

GOOD_PART = 0.5
"""Of what a request lacks: a load in flight that brings less of it is not waited for."""

FIRST = (-math.inf, 0)
"""Before every rank."""


class Work(NamedTuple):
    """Tokens [start, end) of a request are computed in this step; committed, if none is a draft."""

    request: Request
    start: int
    end: int
    drafts: int = 0
    """The last so many are guessed: the caller commits those that are right."""


def _decodes(running: Sequence[Request]) -> int:
    return sum(request.remaining == 1 for request in running)


class Scheduler(Room):
    """Decides who gets pages and budget. Computes nothing.

    Args:
        manager: pages and keys; only this scheduler allocates from it.
        offload: the tier below, or None.
        costs: says what to load of it.
        move_pages: see `Queues`. The caller does the same before it computes.
        token_budget: most tokens of one step, all requests together.
        max_requests: most requests that run or load at one time.
        draft_tokens: most guesses of a decoding request in one step.
    """

    def __init__(
        self,
        manager: Manager,
        offload: Offload | None,
        *,
        costs: Costs,
        move_pages: Callable[[], None],
        token_budget: int,
        max_requests: int,
        draft_tokens: int = 0,
    ) -> None:
        if max_requests < 1:
            raise ConfigError(f"max_requests is {max_requests}: it must be above 0")
        if token_budget < max_requests:
            raise ConfigError(
                f"token_budget is {token_budget}: below max_requests ({max_requests}), one prefill"
                " could wait for ever behind the decodes; raise it or lower max_requests"
            )
        super().__init__(manager, offload, costs, move_pages, draft_tokens=draft_tokens)
        self._budget = token_budget
        self._max_requests = max_requests
        self._resume_at = FIRST
        """Rank with which the next admission begins."""

    # ---- one step ------------------------------------------------------------------------------

    def schedule(self) -> list[Work]:
        """Work for the step that is open in the manager: allocated and committed."""
        batch: list[Work] = []
        running = list(self.running)
        budget = self._budget - self._push_in_urgent(batch)
        prefilling = bool(batch)
        decodes = _decodes(running)
        for request in running:
            if request.status is not Status.RUNNING:
                continue  # it made room for another one
            decode = request.remaining == 1
            decodes -= decode
            used = self._go_on(request, batch, budget - decodes, share=prefilling)
            if used is None:
                if request is not self.oldest:
                    self._only_oldest(batch, budget)
                return batch
            budget -= used
            prefilling |= used > 0 and not decode
        self._admit(batch, budget, prefilling=prefilling)
        if not batch and self._manager.stats().frozen:
            self._only_oldest(batch, budget)
        return batch

    def _go_on(
        self, request: Request, batch: list[Work], budget: int, *, share: bool
    ) -> int | None:
        """The next chunk of a running request. Returns its tokens; None where it is blocked."""
        end = self._chunk_end(request, request.computed, budget, share=share)
        if end == request.computed:
            return 0
        if request.guess >= 0 and request.remaining == 1:
            grant = self._grant_drafts(request, budget)
            if grant is not None:
                batch.append(Work(request, grant.start, grant.end, grant.end - grant.start - 1))
                return grant.end - grant.start
        if self._offload is not None and request is self.oldest:
            self._make_room_early(request, end)
            if request.status is not Status.RUNNING:
                return None  # aborted or preempted from inside the runner
        grant = self._grant(request, request.computed, end) or self._make_room(request, end)
        return None if grant is None else self._commit(batch, request, grant)

    # ---- who goes before others ------------------------------------------------------------------

    def _push_in_urgent(self, batch: list[Work]) -> int:
        """Start waiting requests that others have to make room for; returns the tokens used.

        Nothing else is in the batch yet, so that the pages of those who make room come free at once.
        """
        used = 0
        for request in list(self.waiting):
            spent = used > 0 and self._budget - used <= _decodes(self.running)
            if spent or not self.running or request.status is not Status.WAITING:
                break
            first = request is self.oldest and request.rank < self.running[0].rank
            if self._victim(request, anybody=first) is None:
                break
            started = self._push_in(request, batch, self._budget - used, anybody=first)
            if not started:
                break
            used += started
        return used

    def _push_in(
        self, request: Request, batch: list[Work], budget: int, *, anybody: bool
    ) -> int | None:
        """Start a waiting request; where there is no space, others make room, one by one.

        After each it is looked up again: they may have left what it can use. As `_start`.
        """
        if request.awaits is not None:
            return 0
        self._forget_refusal()
        room = max(1, budget - _decodes(self.running))
        while (used := self._start(request, batch, room, share=bool(batch))) is None:
            victim = self._victim(request, anybody=anybody)
            if victim is None or not self._is_refused(request):
                return None
            if request is not self.oldest and self._manager.stats().frozen:
                return None
            self.preempt(victim)
            if request.status is not Status.WAITING:
                return 0  # aborted from inside the runner
        return used

    def _only_oldest(self, batch: list[Work], budget: int) -> None:
        """Somebody is blocked: of the others only the oldest gets on, so that the block ends."""
        request = self.oldest
        if request is None or request.in_step or budget < 1:
            return
        if request.status is Status.WAITING:
            self._push_in(request, batch, budget, anybody=True)
        elif request.status is Status.RUNNING:
            self._go_on(request, batch, budget, share=False)

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

    # ---- admission -----------------------------------------------------------------------------

    def _admit(self, batch: list[Work], budget: int, *, prefilling: bool) -> None:
        lookups = 0
        for request in self._candidates():
            if request.awaits is not None or request.status is not Status.WAITING:
                continue
            if self._is_blocked(request, budget):
                return
            if lookups == MAX_LOOKUPS:
                self._resume_at = request.rank
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
        if grant.load:
            try:
                self._move_pages()
            except BaseException:
                if request.status is not Status.DONE:
                    self._give_back(request)  # it waits on
                raise
            if request.status is Status.DONE:
                return 0  # aborted from inside the runner
        self.waiting.remove(request)
        if self._offload is not None and not self._offload.start_load(request.id, grant):
            self._wait_again(request)  # the tier's queue is full
        elif grant.load:
            self.costs.note_load_begun(request.excess_seconds)
            self._park(request, hit, grant)
        else:
            self._run(request, grant.hit_tokens, 0)
            return self._commit(batch, request, grant)
        return 0

    def _candidates(self) -> list[Request]:
        """Who waits, by rank; after a step with too many, beginning where it stopped."""
        first = bisect_left(self.waiting, self._resume_at, key=rank)
        self._resume_at = FIRST
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
        oldest, admitted = request is self.oldest, [*self.running, *self.loading.values()]
        if len(admitted) < self._max_requests and (
            oldest or has_room(self._manager, request, hit, admitted)
        ):
            grant = self._grant(request, hit.hit_tokens, max(end, hit.hit_tokens + 1))
            if grant is not None:
                return grant
        self._note_refusal(request)
        return None

    def _lookup(self, request: Request) -> Hit | None:
        request.instead = None
        if self._offload is None or self.costs.loads is Loads.NEVER:
            return self._manager.lookup(request.id)
        hit = self._offload.lookup(request.id)
        if hit is None or hit.hit_tokens == hit.device_tokens:
            return hit
        return self._worth_loading(request, hit)

    def _worth_loading(self, request: Request, hit: Hit) -> Hit | None:
        """The hit, or what the device has of it, where computing the rest is cheaper.

        Then the tier holds nothing for the request any more.
        """
        assert self._offload is not None
        begin, end = hit.device_tokens, hit.hit_tokens
        if self._affords_load(request, begin, end):
            return hit
        alone = self._manager.lookup(request.id)
        there = max(alone.hit_tokens, alone.junction)  # full groups may reach farther than states
        if there > begin and self._affords_load(request, begin, end, there):
            return self._offload.lookup(request.id)
        request.instead = (alone.hit_tokens, end)
        self._offload.release(request.id)
        return alone

    def _affords_load(self, request: Request, begin: int, end: int, there: int = 0) -> bool:
        """Whether to load tokens [begin, end), of which the full groups have those before `there`.

        After what is being loaded from the same tiers. The request notes what that takes too long.
        """
        assert self._offload is not None
        far, waiting = self._offload.far(request.id), self._offload.loading_bytes
        need = hit_bytes(self._manager.geometry, max(begin, there), end, far)
        load = LoadBytes(
            need.near and need.near + waiting.near, need.far and need.far + waiting.far
        )
        request.excess_seconds = self.costs.excess_seconds(load, begin, end)
        return self.costs.affords(request.excess_seconds)

    def _comes_by_itself(self, request: Request, hit: Hit, batch: list[Work]) -> bool:
        """Whether to wait for a load in flight, or for what is computed in this step or a later one.

        Worth a wait is a load that brings a good part of what the request lacks, which a load of
        its own would bring once more, and a prefill that gets farther than what is there now or
        soon. While it waits for a load the request holds nothing in the tier.
        """
        most = max(hit.hit_tokens, hit.pending_tokens)
        there = max(hit.device_tokens, request.awaited_tokens)
        for other in self.loading.values() if most > there else ():
            shared = common_tokens(self._manager, request, other, min(most, other.granted))
            if shared - there >= GOOD_PART * (most - there):
                request.awaits, request.awaited_tokens = other, shared
                if self._offload is not None:
                    self._offload.release(request.id)
                return True
        for other in self.running:  # those whose turn in this step is still to come
            if (
                request is not self.oldest  # it waits for nobody who may be waiting for it
                and other.remaining > 1
                and not other.in_step
                and common_tokens(self._manager, request, other, other.known) > most
            ):
                return True
        return hit.pending_tokens > hit.hit_tokens and bool(batch or self.loading)
