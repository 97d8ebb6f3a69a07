"""One thread that moves pages, fed by two bounded queues: loads first, then stores.

    submit --> [ loads  | | ] --+
                                +--> thread: one batch at a time --> results --> poll
    submit --> [ stores | | ] --+

A job is cut into batches. Between two batches the thread looks up again: a load that came
meanwhile overtakes a store, a passed deadline or `close` ends the job, whether or not it would
have been its turn. An exception ends its job
with the exception's text; whatever ends the thread itself ends every job the same way, so that
nobody waits for a result that cannot come.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import Direction, Transfer, TransferResult, failed
from kvcache.connectors.forks import mind_forks
from kvcache.core.errors import MisuseError
from kvcache.core.values import wait_seconds

IDLE_SECONDS = 5.0
"""How often an idle thread looks up without being woken."""


CLOSED = "Closed: the connector was closed"


class Batch(Protocol):
    """What is moved in one go: a bounded number of bytes."""

    @property
    def items(self) -> NDArray[np.intp]:
        """Indices into the transfer."""


B = TypeVar("B", bound=Batch)


class Moved(NamedTuple):
    """What became of a batch. An exception is a failure of all of it."""

    bytes: int
    ok: NDArray[np.bool_] | None = None
    """For each item whether it is right and complete; None: all are."""
    gone: NDArray[np.bool_] | None = None
    """For each item whether the tier turned out not to have it; None: no such thing."""
    error: str = ""
    """Why not all is good. The other batches of the transfer are moved all the same."""


@dataclass(slots=True, eq=False)
class _Job(Generic[B]):
    """A transfer on its way. `done` and `ok` are the thread's, the rest is set under the lock."""

    transfer: Transfer
    batches: Sequence[B]
    ok: NDArray[np.uint8]
    due: float
    error: str
    done: int = 0
    seconds: float = 0.0
    bytes: int = 0
    late: bool = False
    gone: NDArray[np.uint8] | None = None

    def take(self, batch: B, moved: Moved) -> None:
        """On the thread: what a batch came to."""
        self.ok[batch.items] = 1 if moved.ok is None else moved.ok
        self.bytes += moved.bytes
        self.error = self.error or moved.error
        if moved.gone is not None and moved.gone.any():
            if self.gone is None:
                self.gone = np.zeros(len(self.ok), np.uint8)
            self.gone[batch.items] = moved.gone

    def result(self, error: str) -> TransferResult:
        return TransferResult(
            self.transfer.id,
            self.transfer.direction,
            self.ok,
            error=error,
            seconds=self.seconds,
            bytes=self.bytes,
            gone=self.gone,
        )

    def overdue(self) -> str:
        return (
            f"Deadline: {self.transfer.deadline_seconds} s passed after {self.done} of"
            f" {len(self.batches)} batches"
        )


def describe(error: BaseException) -> str:
    """`Kind: text`, as results carry it."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  (an exception that cannot say what it is must not end the thread)
        text = "(no text)"
    return f"{type(error).__name__}: {text}"


class CopyThread(Generic[B]):
    """Moves batches in order of arrival, those of loads before those of stores.

    Args:
        move: moves the bytes of one batch; called on the thread, without the lock.
        queue_depth: transfers of one direction that may be open (accepted, end not yet polled).
        on_exit: called once, when no copy runs any more and none will.
        on_idle: called on the thread, without the lock, after each `idle_seconds` without work.
    """

    def __init__(
        self,
        move: Callable[[B], Moved],
        *,
        queue_depth: int,
        on_exit: Callable[[], None],
        on_idle: Callable[[], None] = lambda: None,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._move = move
        self._depth = queue_depth
        self._on_exit = on_exit
        self._on_idle = on_idle
        self._idle_seconds = idle_seconds
        self._changed = threading.Condition()
        self._queues: dict[Direction, deque[_Job[B]]] = {d: deque() for d in Direction}
        self._open = dict.fromkeys(Direction, 0)
        self._running: _Job[B] | None = None
        self._results: deque[TransferResult] = deque()
        self._ended = self._stopped = ""
        self._left = False
        """`on_exit` was called, or is the parent process's to call."""
        self._told: list[Callable[[], None]] = []
        self._notify: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="kvcache-copy", daemon=True)
        mind_forks(self)

    def after_fork(self) -> None:
        """In a forked child, which has no such thread: what it held at that moment nobody lets go.

        What `on_exit` would let go of is the parent's.
        """
        self._changed = threading.Condition()
        self._notify = lambda: None
        self._told = []
        self._left = True

    def start(self) -> None:
        """Start the thread. Once.

        Raises:
            MisuseError: it was let go of, or this process is a forked child of the one that made it.
        """
        if self._left:
            raise MisuseError(
                "a closed tier, or one that a forked process has from its parent, cannot be used:"
                " make a connector in this process"
            )
        self._thread.start()

    def notify(self, call: Callable[[], None]) -> bool:
        """`call` is called, without the lock, when a result came. One caller, before `start`."""
        self._notify = call
        return True

    def at_end(self, call: Callable[[], None]) -> bool:
        """`call` is called once, after `on_exit`; at once where that is over."""
        with self._changed:
            self._told.append(call)
        if self._left:
            self._tell()
        return True

    # ---- the caller's side ---------------------------------------------------------------------

    def submit(self, transfer: Transfer, batches: Sequence[B], error: str) -> bool:
        """Queue a transfer; False if the queue is full. `error`: what is wrong with other items.

        After the thread ended, the transfer is taken and its result says why nothing was copied.
        """
        job = _Job(
            transfer,
            batches,
            np.zeros(len(transfer.pages), np.uint8),
            time.monotonic() + transfer.deadline_seconds,
            error,
        )
        with self._changed:
            if self._open[transfer.direction] >= self._depth:
                return False
            self._open[transfer.direction] += 1
            self._notice_death()
            refused = self._ended or self._stopped
            if refused or not batches:
                self._results.append(job.result(refused or error))
            else:
                self._queues[transfer.direction].append(job)
            self._changed.notify_all()
        self._notify()
        return True

    def poll(self) -> list[TransferResult]:
        """Results since the last call."""
        with self._changed:
            self._sweep(time.monotonic())
            results = list(self._results)
            self._results.clear()
            for result in results:
                if not result.late:
                    self._open[result.direction] -= 1
        return results

    def wait(self, timeout_seconds: float) -> bool:
        """Until there is a result, or the time is over."""
        end = time.monotonic() + wait_seconds(timeout_seconds, "timeout_seconds")
        with self._changed:
            while True:
                now = time.monotonic()
                self._sweep(now)
                if self._results or now >= end:
                    return bool(self._results)
                dues = [job.due for queue in self._queues.values() for job in queue if not job.late]
                self._changed.wait(min([end, *dues]) - now)

    def stop(self) -> None:
        """Fail what is queued, and what comes; the running batch, and the thread, go on."""
        with self._changed:
            self._stopped = CLOSED
            self._fail_queued()
            self._changed.notify_all()
        self._notify()

    def close(self, timeout_seconds: float) -> bool:
        """Fail what is queued, wait for the running batch. True: nothing runs any more."""
        with self._changed:
            self._ended = self._ended or CLOSED
            self._fail_queued()
            self._changed.notify_all()
        self._notify()
        if self._thread.ident is None:
            self._leave()
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    # ---- under the lock ------------------------------------------------------------------------

    def _sweep(self, now: float) -> None:
        """Ends what is overdue: for good where nothing moves, as late where a copy runs."""
        self._notice_death()
        for queue in self._queues.values():
            for job in [job for job in queue if job.due <= now]:
                if job is not self._running:
                    queue.remove(job)
                    self._results.append(job.result(job.overdue()))
                elif not job.late:
                    job.late = True
                    late = failed(job.transfer, job.overdue())
                    self._results.append(replace(late, late=True))

    def _notice_death(self) -> None:
        """If the thread is gone without a word, its jobs end here."""
        if self._thread.ident is not None and not self._thread.is_alive():
            self._ended = self._ended or "ThreadDied: the copy thread is gone"
            self._running = None
            self._fail_queued()

    def _fail_queued(self) -> None:
        for queue in self._queues.values():
            for job in [job for job in queue if job is not self._running]:
                queue.remove(job)
                self._results.append(job.result(self._ended or self._stopped))

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended:
                job = self._next()
                if job is None:
                    self._on_idle()
                else:
                    self._run_batch(job)
        except BaseException as error:  # noqa: BLE001  (reported by every job and by submit)
            with self._changed:
                self._ended = f"ThreadDied: the copy thread ended by {describe(error)}"
        finally:
            with self._changed:
                self._running = None
                self._fail_queued()
                self._changed.notify_all()
            self._notify()
            self._leave()

    def _leave(self) -> None:
        """Nothing is moved any more. Once, and never where the thread may run."""
        if self._left:
            return
        try:
            self._on_exit()
        finally:
            self._left = True
            self._tell()

    def _tell(self) -> None:
        with self._changed:
            told, self._told = self._told, []
        for call in told:
            call()

    def _next(self) -> _Job[B] | None:
        """The next load, else the next store; None: nothing came in `idle_seconds`, or the end did."""
        with self._changed:
            if not (self._ended or any(self._queues.values())):
                self._changed.wait(self._idle_seconds)
            waiting = [queue for queue in self._queues.values() if queue]
            self._running = waiting[0][0] if waiting and not self._ended else None
            return self._running

    def _run_batch(self, job: _Job[B]) -> None:
        batch, error = job.batches[job.done], ""
        begin = time.monotonic()
        if begin >= job.due:
            error = job.overdue()
        else:
            try:
                moved = self._move(batch)
            except Exception as fault:  # noqa: BLE001  (any failure is the transfer's)
                error = describe(fault)
            else:
                job.take(batch, moved)
        job.seconds += time.monotonic() - begin
        with self._changed:
            self._running = None
            job.done += 1
            if job.done < len(job.batches):
                error = error or self._stopped
            if error or job.done == len(job.batches):
                self._queues[job.transfer.direction].remove(job)
                self._results.append(job.result(error or job.error))
                self._changed.notify_all()
        self._notify()
