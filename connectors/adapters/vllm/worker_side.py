"""The side that moves bytes, in each of vLLM's worker processes.

A request that waits for a load is told of exactly once, whatever happens: with its result, with its
deadline, or, where the tier says nothing at all, some seconds after that. vLLM itself waits for ever.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace

from kvcache.connectors.adapters.vllm.records import StepPlan, StepResults
from kvcache.connectors.base import (
    QUEUE_FULL,
    Direction,
    TierWorker,
    Transfer,
    TransferResult,
    failed,
)

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""So long after its deadline a tier may still tell that a transfer is late."""

GIVE_UP_SECONDS = 60.0
"""A load that has not ended so long after that keeps vLLM's blocks from it: the tier is closed."""

CLOSE_SECONDS = 0.001
"""So long a step waits for that."""


@dataclass(slots=True)
class _Open:
    """A transfer whose final result is to come."""

    transfer: Transfer
    request: str | None
    """Who waits for it; None: nobody, or not any more."""
    due: float
    """When it is late; `inf`: it is."""
    give_up: float


class WorkerSide:
    """Hands transfers to a tier's worker and says what became of them. One thread.

    Args:
        worker: the tier's.
        wait: loads are done when `load` returns.
        by_block: a failed load is told by its blocks, so that what lies before the first is kept.
    """

    def __init__(self, worker: TierWorker, *, wait: bool = False, by_block: bool = False) -> None:
        self._worker = worker
        self._wait = wait
        self._by_block = by_block
        self._open: dict[int, _Open] = {}
        self._results: list[TransferResult] = []
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._closing = False
        self.given_up = False
        """The tier is closed: nothing is moved any more."""
        self.unknown = 0
        """Results that nobody waits for, since they were last taken."""

    def load(self, plan: StepPlan) -> None:
        """Begin the loads of a step."""
        for request, transfer in plan.loads:
            self._submit(transfer, None if self._wait else request)
        if self._wait:
            for _, transfer in plan.loads:
                self._finish(transfer.id)

    def store(self, plan: StepPlan) -> None:
        """Begin its stores: the step's own forward pass has ended."""
        for transfer in plan.stores:
            self._submit(transfer, None)

    def _submit(self, transfer: Transfer, request: str | None) -> None:
        due = time.monotonic() + transfer.deadline_seconds + GRACE_SECONDS
        self._open[transfer.id] = _Open(transfer, request, due, due + GIVE_UP_SECONDS)
        error = "Closed: the tier was given up" if self._closing else ""
        try:
            if not error and not self._worker.submit(transfer):
                error = f"{QUEUE_FULL}: too much is in flight"
        except Exception as fault:  # noqa: BLE001  (a request would wait for ever)
            error = f"{type(fault).__name__}: {fault}"
        if error:
            self._take(failed(transfer, error))

    def _finish(self, number: int) -> None:
        """Until there is a result of the transfer, or it is late."""
        while number in self._open and self._open[number].due < math.inf:
            self._worker.wait(max(0.0, min(1.0, self._open[number].due - time.monotonic())))
            self._poll()

    def collect(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended since the last call, and those of them whose load failed."""
        self._poll()
        finished, self._finished = self._finished, set()
        lost, self._failed = self._failed, set()
        return finished, lost

    def take_bad_blocks(self) -> set[int]:
        """Blocks that loads have not filled, of those that are told by block, since the last call."""
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

    def take_results(self) -> StepResults | None:
        """What has ended since the last call, for the scheduler's side."""
        results, self._results = self._results, []
        unknown, self.unknown = self.unknown, 0
        if not (results or unknown or self.given_up):
            return None
        return StepResults([(result, 1) for result in results], unknown, self.given_up)

    def _poll(self) -> None:
        for result in self._worker.poll():
            self._take(result)
        now = time.monotonic()
        for it in list(self._open.values()):
            if it.due <= now:
                text = f"Silent: no result until {GRACE_SECONDS} s after the deadline"
                self._take(replace(failed(it.transfer, text), late=True))
        if not self.given_up and any(
            it.give_up <= now and it.transfer.direction is Direction.LOAD
            for it in self._open.values()
        ):
            self._give_up()

    def _give_up(self) -> None:
        """When `close` says that nothing is moved any more, vLLM can have its blocks back."""
        if not self._closing:
            logger.error(
                "a load has not ended %s s after its deadline: the tier is closed, vLLM goes on without"
                " it; look for what hangs below it (a disk, a network), and restart",
                GRACE_SECONDS + GIVE_UP_SECONDS,
            )
        self._closing = True
        if not self._worker.close(CLOSE_SECONDS):
            return  # a copy runs still: again with the next step
        self.given_up = True
        for result in self._worker.poll():
            self._take(result)
        for it in list(self._open.values()):
            self._take(failed(it.transfer, "Closed: the tier was given up"))

    def _take(self, result: TransferResult) -> None:
        it = self._open.get(result.id)
        if it is None or it.transfer.direction is not result.direction:
            self.unknown += 1
            return
        if result.late and it.due == math.inf:
            return  # that it is late was said before
        self._results.append(result)
        if it.transfer.direction is Direction.LOAD and it.due < math.inf:
            self._tell(it, result)
        it.due = math.inf
        if not result.late:
            del self._open[result.id]

    def _tell(self, it: _Open, result: TransferResult) -> None:
        pages = it.transfer.pages
        ok = result.ok if len(result.ok) == len(pages) and not result.late else pages * 0
        lost = pages[ok == 0].tolist()
        if it.request is not None:
            self._finished.add(it.request)
        # A late load may write its blocks still: then the request must get others, all of them.
        if self._by_block and (self._wait or not result.late):
            self._bad_blocks.update(lost)
        elif lost and it.request is not None:
            self._failed.add(it.request)
        it.request = None
