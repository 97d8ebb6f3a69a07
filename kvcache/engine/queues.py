"""Requests by what they wait for, and how they pass from one queue to the next.

    waiting --admit--> running --finish--> (gone)
       |  ^               |
       |  +---preempt-----+
       +--admit--> loading --load ended--> running, or waiting again if it failed

Pages are held by those that run or load.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from kvcache.connectors.driver import Offload
from kvcache.core.errors import InvariantError
from kvcache.core.manager import Manager
from kvcache.core.records import Grant, Hit
from kvcache.engine.costs import Costs, hit_bytes
from kvcache.engine.request import Request, Status


@dataclass(slots=True)
class Counters:
    """Counts since the engine was made; tokens unless the name says otherwise."""

    computed_tokens: int = 0
    device_tokens: int = 0
    """Adopted from the device, at first admission or after a preemption."""
    restored_tokens: int = 0
    """Adopted from a tier, at first admission or after a preemption."""
    recomputed_tokens: int = 0
    """Of `computed_tokens`: held before by the same request, lost to a preemption."""
    preemptions: int = 0
    kept_preemptions: int = 0
    """Of them, those whose last part was sent to the tier before its pages went."""
    failed_loads: int = 0
    computed_instead_tokens: int = 0
    """Not loaded, though a tier had them, because computing looked cheaper."""
    proposed_tokens: int = 0
    """Drafts that were checked."""
    accepted_tokens: int = 0
    """Of them, those that were right."""
    steps: int = 0
    finished_requests: int = 0
    runner_seconds: float = 0.0
    """In the runner: what it computes, and moves of pages."""
    tier_seconds: float = 0.0
    """In calls of the tier: plans, results, stores; not its copies, which run beside."""
    scheduler_seconds: float = 0.0
    """In the rest of the steps: scheduler and manager, tables, tokens. Without waits."""


def rank(request: Request) -> tuple[float, int]:
    """Who is served first: the order of every queue. See `Request.rank`."""
    return request.rank


class Queues:
    """Keeps the manager and the tier informed of what becomes of each request.

    Args:
        move_pages: does the copies that the manager asks for; called before a transfer is submitted
            in the middle of a step. A request may be aborted or preempted from inside of it.

    Attributes:
        waiting, running: by rank.
        loading: by handle.
    """

    def __init__(
        self,
        manager: Manager,
        offload: Offload | None,
        costs: Costs,
        move_pages: Callable[[], None],
    ) -> None:
        self.counters = Counters()
        self.costs = costs
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loading: dict[int, Request] = {}
        self._manager = manager
        self._offload = offload
        self._move_pages = move_pages
        self._open: dict[int, Request] = {}
        """In order of arrival."""
        self.oldest: Request | None = None
        """Of all that are open: the one that the manager keeps room for, whatever its rank."""
        self._refused: Request | None = None
        self._refused_at: list[int] = []
        self._refused_beside: set[int] = set()

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running or self.loading)

    def check(self) -> None:
        """Between steps: raise `InvariantError` if a request is in a wrong queue or still in a step."""
        queues = [*self.waiting, *self.running, *self.loading.values()]
        statuses = [Status.WAITING] * len(self.waiting) + [Status.RUNNING] * len(self.running)
        statuses += [Status.LOADING] * len(self.loading)
        for request, status in zip(queues, statuses, strict=True):
            if request.status is not status or request.in_step:
                raise InvariantError(
                    f"request {request.id} is {request.status.value} among those {status.value}, has"
                    f" pages for {request.granted} tokens and computed {request.computed}"
                )
        if sorted(request.id for request in queues) != sorted(self._open):
            raise InvariantError(f"{len(self._open)} requests are open, {len(queues)} are queued")

    # ---- entering and leaving ------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request, younger than all others."""
        self._open[request.id] = request
        self.oldest = self.oldest or request
        insort(self.waiting, request, key=rank)

    def remove(self, request: Request) -> None:
        """Take a request out, in any state. The caller closes it in the manager right after."""
        if request.status is Status.LOADING:
            del self.loading[request.id]
            self._wake(request, came=False)
        else:
            (self.waiting if request.status is Status.WAITING else self.running).remove(request)
        request.status = Status.DONE
        del self._open[request.id]
        if request is self.oldest:
            self.oldest = next(iter(self._open.values()), None)
        self._refused = None
        if self._offload is not None:
            self._offload.forget(request.id)

    def preempt(self, request: Request) -> None:
        """Take the pages of a running request; it keeps its tokens and is looked up again."""
        computed = request.computed
        self._stop(request)
        if self._offload is None or not computed:
            return
        # What it computed last got keys just now: held by their stores, before others take the pages.
        if self.costs.keeping_pays(hit_bytes(self._manager.geometry, 0, computed), computed):
            self.counters.kept_preemptions += 1
            self._move_pages()
            self._offload.end_of_step()

    def drop_loads(self) -> None:
        """Nobody waits for the loads in flight any more: their requests are looked up again."""
        for request in list(self.loading.values()):
            del self.loading[request.id]
            self._wake(request, came=False)
            self._give_back(request)
            self._wait_again(request)

    def forget_pages(self) -> None:
        """What the device's pages hold is not known: nothing there is a hit, everybody waits again."""
        self._manager.clear()  # first: nothing gets a key, or is stored, any more
        for request in list(self.running):
            self._stop(request)
        self.drop_loads()

    def _stop(self, request: Request) -> None:
        """It runs no more, and waits without pages."""
        self.running.remove(request)
        self._give_back(request)
        self._wait_again(request)
        self.counters.preemptions += 1

    def _give_back(self, request: Request) -> None:
        """Its pages, and what a tier holds for it."""
        if self._offload is not None:
            self._offload.release(request.id)
        self._manager.preempt(request.id)

    def _wait_again(self, request: Request) -> None:
        request.lose_pages()
        insort(self.waiting, request, key=rank)
        self._refused = None

    def collect_loads(self) -> int:
        """Move requests whose load ended since the last call; returns how many. Never blocks."""
        ended = 0
        results = self._offload.poll() if self._offload is not None else []
        for timing in self._offload.take_timings() if self._offload else ():
            self.costs.note_load(timing.bytes, timing.seconds, far=timing.far)
        for handle, ok in results:
            request = self.loading.pop(handle, None)
            if request is None:
                continue
            ended += 1
            self._wake(request, came=ok)
            if ok:
                self._run(request, *request.adopting)
            else:
                self.counters.failed_loads += 1
                self._wait_again(request)
        return ended

    def _wake(self, loaded: Request, *, came: bool) -> None:
        """Its load has ended, maybe without success: who waited for it is looked up again."""
        for request in self.waiting:
            if request.awaits is loaded:
                request.awaits = None
                request.awaited_tokens *= came

    def _run(self, request: Request, device_tokens: int, host_tokens: int) -> None:
        request.adopt(device_tokens, host_tokens)
        if request.instead is not None:
            self.costs.note_computed_instead(*request.instead)
            self.counters.computed_instead_tokens += request.instead[1] - request.instead[0]
        self.counters.device_tokens += device_tokens
        self.counters.restored_tokens += host_tokens
        insort(self.running, request, key=rank)

    def _park(self, request: Request, hit: Hit, grant: Grant) -> None:
        """Its load is in flight: it holds the pages of the hit and computes nothing."""
        device = min(hit.device_tokens, grant.hit_tokens)
        request.adopting = (device, grant.hit_tokens - device)
        request.granted = grant.hit_tokens
        request.status = Status.LOADING
        self.loading[request.id] = request

    # ---- who is first, who was refused -----------------------------------------------------------

    def _held(self) -> list[int]:
        """Pages with a reference, of each size class."""
        return [c.held for c in self._manager.arena_stats().classes]

    def _prefilled(self) -> set[int]:
        """Running requests whose prompts are on the device."""
        return {request.id for request in self.running if request.remaining <= 1}

    def _note_refusal(self, request: Request) -> None:
        """There was no space for it: it is not asked again before that may be otherwise."""
        self._refused, self._refused_at = request, self._held()
        self._refused_beside = self._prefilled()

    def _forget_refusal(self) -> None:
        self._refused = None

    def _is_refused(self, request: Request) -> bool:
        return request is self._refused

    def _still_full(self) -> bool:
        """Asking again would change nothing.

        Since the request was refused no page came free, and no prompt that it may begin with came.
        """
        if not (self.running or self.loading) or not self._prefilled() <= self._refused_beside:
            return False
        return all(n >= m for n, m in zip(self._held(), self._refused_at, strict=True))
