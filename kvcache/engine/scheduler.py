"""Who computes what in a step: one token budget for decode and prefill, oldest first.

    waiting --admit--> running --finish--> (gone)
       |  ^               |
       |  +---preempt-----+
       +--admit--> loading --load ended--> running, or waiting again if it failed

Rules, each with the reason that keeps the engine from standing still:

* Running requests come first, in order of arrival; each decode has its token reserved out of the
  budget, the oldest prefill gets at least one token.
* A running request that finds no page preempts the youngest one that is younger than itself, until
  it finds one. If it is the youngest, it keeps its pages and waits: older ones can take them. So
  the oldest is never preempted, and alone it has the whole pool.
* While a running request is blocked, nothing younger allocates and nothing is admitted.
* A waiting request is admitted in order of arrival. It is passed over only while it would compute
  what a request in this step or a load is about to give it, or while a tier does not know yet.
* A step does a bounded number of lookups. One that waits for a load is not looked up, and holds
  nothing in the tier, until that load has ended; where the others are too many, the next step goes
  on where this one stopped.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

from kvcache.connectors.driver import Offload
from kvcache.core.errors import ConfigError
from kvcache.core.manager import Manager
from kvcache.core.records import Grant, Hit
from kvcache.core.specs import FullAttention
from kvcache.engine.request import Request, Status

MAX_LOOKUPS = 64
"""In one step; more waiting requests have their turn in the next one."""


class Work(NamedTuple):
    """Tokens [start, end) of a request are computed in this step; already committed."""

    request: Request
    start: int
    end: int


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
    failed_loads: int = 0
    steps: int = 0
    finished_requests: int = 0


def _age(request: Request) -> int:
    return request.order


class Scheduler:
    """Decides, and keeps the manager and the tier informed. Computes nothing.

    Args:
        manager: pages and keys; only this scheduler allocates from it.
        offload: the tier below, or None.
        token_budget: most tokens of one step, all requests together.
        max_requests: most requests that run or load at one time.
    """

    def __init__(
        self, manager: Manager, offload: Offload | None, *, token_budget: int, max_requests: int
    ) -> None:
        if max_requests < 1:
            raise ConfigError(f"max_requests is {max_requests}: it must be above 0")
        if token_budget < max_requests:
            raise ConfigError(
                f"token_budget is {token_budget}: below max_requests ({max_requests}), one prefill"
                " could wait for ever behind the decodes; raise it or lower max_requests"
            )
        self.counters = Counters()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loading: dict[int, Request] = {}
        self._manager = manager
        self._offload = offload
        self._budget = token_budget
        self._max_requests = max_requests
        self._grid = manager.geometry.grid_tokens
        self._groups = range(len(manager.geometry.groups))
        self._refused: Request | None = None
        self._refused_at: list[int] = []
        self._resume_at = 0
        """Rank of arrival with which the next admission begins."""

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running or self.loading)

    # ---- entering and leaving ------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request."""
        insort(self.waiting, request, key=_age)

    def remove(self, request: Request) -> None:
        """Take a request out, in any state. The caller closes it in the manager right after."""
        if request.status is Status.LOADING:
            del self.loading[request.id]
            self._wake(request)
        else:
            (self.waiting if request.status is Status.WAITING else self.running).remove(request)
        request.status = Status.DONE
        self._refused = None
        if self._offload is not None:
            self._offload.forget(request.id)

    def preempt(self, request: Request) -> None:
        """Take the pages of a running request; it keeps its tokens and is looked up again."""
        self.running.remove(request)
        if self._offload is not None:
            self._offload.release(request.id)
        self._manager.preempt(request.id)
        self._wait_again(request)
        self.counters.preemptions += 1

    def _wait_again(self, request: Request) -> None:
        request.lose_pages()
        insort(self.waiting, request, key=_age)
        self._refused = None

    def collect_loads(self) -> int:
        """Move requests whose load ended since the last call; returns how many. Never blocks."""
        ended = 0
        for handle, ok in self._offload.poll() if self._offload is not None else ():
            request = self.loading.pop(handle, None)
            if request is None:
                continue
            ended += 1
            self._wake(request)
            if ok:
                self._run(request, *request.adopting)
            else:
                self.counters.failed_loads += 1
                self._wait_again(request)
        return ended

    def _wake(self, loaded: Request) -> None:
        """Its load has ended: who waited for it is looked up again."""
        for request in self.waiting:
            if request.awaits is loaded:
                request.awaits = None

    def _run(self, request: Request, device_tokens: int, host_tokens: int) -> None:
        request.adopt(device_tokens, host_tokens)
        self.counters.device_tokens += device_tokens
        self.counters.restored_tokens += host_tokens
        insort(self.running, request, key=_age)

    # ---- one step ------------------------------------------------------------------------------

    def schedule(self) -> list[Work]:
        """Work for the step that is open in the manager: allocated and committed."""
        batch: list[Work] = []
        budget = self._budget
        decodes = sum(r.remaining == 1 for r in self.running)
        prefilling = False
        for request in list(self.running):
            if request.status is not Status.RUNNING:
                continue
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
        """Pages for [start, end), or for a shorter chunk where the pool has no more.

        A chunk needs a page for each state that it passes and is to be kept, so that a short one
        may fit where a long one never can.
        """
        while True:
            grant = self._manager.allocate(request.id, end - start)
            if grant is not None:
                return grant
            shorter = (start + (end - start) // 2) // self._grid * self._grid
            if shorter <= start:
                shorter = (start // self._grid + 1) * self._grid
            if shorter >= end:
                return None
            end = shorter

    def _make_room(self, request: Request, end: int) -> Grant | None:
        """Preempt younger requests, youngest first, until the chunk fits."""
        while self.running[-1] is not request:
            before = self._reclaimable()
            self.preempt(self.running[-1])
            grant = self._grant(request, request.computed, end)
            if grant is not None:
                return grant
            if self._reclaimable() == before:
                break  # the victim's pages come free with the end of this step
        return None

    def _reclaimable(self) -> list[int]:
        stats = [self._manager.pool_stats(g) for g in self._groups]
        return [s.capacity - s.held for s in stats]

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
            hit = self._lookup(request)
            if hit is None:
                continue
            request.needs_budget = hit.hit_tokens == hit.device_tokens
            if budget < 1 and request.needs_budget:
                return
            if self._comes_by_itself(request, hit, batch):
                continue
            end = self._chunk_end(request, hit.hit_tokens, budget, share=prefilling)
            if end == hit.hit_tokens and request.needs_budget:
                return
            grant = self._first_grant(request, hit, end)
            if grant is None:
                return
            self.waiting.remove(request)
            if self._offload is not None and not self._offload.start_load(request.id, grant):
                self._wait_again(request)  # the tier's queue is full
                continue
            if grant.load:
                self._park(request, hit, grant)
                continue
            self._run(request, grant.hit_tokens, 0)
            budget -= self._commit(batch, request, grant)
            prefilling = True

    def _candidates(self) -> list[Request]:
        """Who waits, oldest first; after a step with too many, beginning where it stopped."""
        first = bisect_left(self.waiting, self._resume_at, key=_age)
        self._resume_at = 0
        return self.waiting[first:] + self.waiting[:first]

    def _is_blocked(self, request: Request, budget: int) -> bool:
        """Whether neither this request nor a younger one can start, as far as is known already."""
        if len(self.running) + len(self.loading) >= self._max_requests:
            return True
        if request is self._refused and self._still_full():
            return True
        return budget < 1 and (self._offload is None or request.needs_budget)

    def _still_full(self) -> bool:
        """No page came free since a request was refused: asking again would change nothing."""
        if not (self.running or self.loading):
            return False
        now = self._reclaimable()
        return all(n <= m for n, m in zip(now, self._refused_at, strict=True))

    def _first_grant(self, request: Request, hit: Hit, end: int) -> Grant | None:
        """None: there are no pages for it; it is not asked again before some come free."""
        if self._has_room(request, hit):
            grant = self._grant(request, hit.hit_tokens, max(end, hit.hit_tokens + 1))
            if grant is not None:
                return grant
        self._refused, self._refused_at = request, self._reclaimable()
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
            if self._common(request, other, min(most, other.granted)) > hit.device_tokens:
                request.awaits = other
                if self._offload is not None:
                    self._offload.release(request.id)
                return True
        return hit.pending_tokens > hit.hit_tokens and bool(batch or self.loading)

    def _common(self, one: Request, other: Request, limit: int) -> int:
        """Tokens of the common prefix, at most `limit`, in whole hash units.

        O(log limit): each link of a chain stands for all before it.
        """
        unit = self._manager.geometry.hash_unit_tokens
        a, b = self._manager.digests(one.id), self._manager.digests(other.id)
        links = range(min(limit // unit, len(a), len(b)))
        return unit * bisect_left(links, True, key=lambda i: bool((a[i] != b[i]).any()))

    def _park(self, request: Request, hit: Hit, grant: Grant) -> None:
        """Its load is in flight: it holds the pages of the hit and computes nothing."""
        device = min(hit.device_tokens, grant.hit_tokens)
        request.adopting = (device, grant.hit_tokens - device)
        request.granted = grant.hit_tokens
        request.status = Status.LOADING
        self.loading[request.id] = request

    def _has_room(self, request: Request, hit: Hit) -> bool:
        """Whether there are pages for all known tokens, beside what admitted prompts still need.

        Half-computed prompts would push each other out. A forecast, no reservation: `allocate` and
        preemption have the last word.
        """
        admitted = [*self.running, *self.loading.values()]
        if not admitted:
            return True
        # Pages of the hit cost nothing where an admitted request holds them already; cached ones
        # count as free, and are not any more once they are adopted.
        shared = max(self._common(request, r, min(hit.device_tokens, r.granted)) for r in admitted)
        for g, spec in enumerate(self._manager.geometry.groups):
            if not isinstance(spec, FullAttention):
                continue
            block = spec.block_tokens
            need = -(-request.known // block) - shared // block
            need += sum(-(-r.known // block) - -(-r.granted // block) for r in admitted)
            stats = self._manager.pool_stats(g)
            if need > stats.capacity - stats.held:
                return False
        return True
