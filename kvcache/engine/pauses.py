"""An engine at rest: asleep without its device memory, or between two sets of weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcache.core.errors import MisuseError
from kvcache.core.values import wait_seconds

if TYPE_CHECKING:
    from kvcache.connectors.driver import Offload
    from kvcache.core.manager import Manager
    from kvcache.engine.chunk import Runner
    from kvcache.engine.scheduler import Scheduler

WAIT_SECONDS = 0.05
"""At once, for a load in flight."""


class Pauses:
    """Sleep, wake, and new weights. Requests stay open: they wait without pages meanwhile."""

    scheduler: Scheduler
    _manager: Manager
    _offload: Offload | None
    _runner: Runner
    _move_pages: Callable[[], None]

    def __init__(self) -> None:
        self._asleep = False

    @property
    def asleep(self) -> bool:
        """Between `sleep` and `wake`."""
        return self._asleep

    def sleep(self, timeout_seconds: float = 60.0) -> bool:
        """Give the device's page memory back to the system; what is cached stays in the tier alone.

        Requests that run are preempted; after `wake` they are looked up again, and loaded. New ones
        may be added. Without a tier everything is computed again. Not from inside the runner.

        Returns:
            False: transfers did not end in time. The engine is awake and goes on.

        Raises:
            MisuseError: the runner cannot give its memory back.
        """
        limit = wait_seconds(timeout_seconds, "timeout_seconds")
        release = getattr(self._runner, "release_memory", None)
        if release is None:
            raise MisuseError(
                f"the runner {type(self._runner).__name__} has no release_memory: it cannot sleep"
            )
        if self._asleep:
            return True
        self._require_no_step()
        end = time.monotonic() + limit
        self._preempt_all()
        while self.scheduler.loading:
            remaining = end - time.monotonic()
            if remaining <= 0:
                return False
            assert self._offload is not None
            self._offload.wait(min(remaining, WAIT_SECONDS))
            self.scheduler.collect_loads()
            self._preempt_all()
        self._move_pages()
        if self._offload is not None and not self._offload.drain(max(end - time.monotonic(), 0.0)):
            return False
        self._manager.clear()
        self._move_pages()
        release()
        self._asleep = True
        return True

    def wake(self) -> None:
        """Go on after `sleep`. The memory comes back as it is used. Idempotent."""
        self._asleep = False

    def reload(self, weights_epoch: int, load: Callable[[], None]) -> None:
        """Change the weights: nothing that was computed with the old ones is a hit afterwards.

        Neither on the device nor in a tier: the epoch is part of every key. Requests that are open
        keep their tokens, are computed again from the first one, and leave no keys. Not from inside
        the runner. May be called asleep.

        Args:
            weights_epoch: another than the present one, see `Manager.set_weights_epoch`.
            load: puts the new weights into the runner. If it raises, no request has computed
                anything in between, and the epoch is the new one: reload again with another.

        Raises:
            ConfigError: an epoch that cannot be; nothing has changed but that requests wait again.
        """
        self._require_no_step()
        self._preempt_all()
        self.scheduler.drop_loads()
        self._manager.set_weights_epoch(weights_epoch)
        load()

    def _preempt_all(self) -> None:
        for request in list(self.scheduler.running):
            self.scheduler.preempt(request)

    def _require_awake(self) -> None:
        if self._asleep:
            raise MisuseError("the engine is asleep: call wake() before step()")

    def _require_no_step(self) -> None:
        if self._manager.stats().open_steps:
            raise MisuseError("a step is open: sleep and reload between two calls of step()")
