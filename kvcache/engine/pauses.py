"""An engine at rest: asleep without its device memory, or between two sets of weights."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvcache.connectors.driver import Offload
from kvcache.core.errors import ConfigError, MisuseError
from kvcache.core.manager import Manager
from kvcache.core.values import shown, wait_seconds
from kvcache.engine.chunk import Runner
from kvcache.engine.scheduler import Scheduler

WAIT_SECONDS = 0.05
"""At once, for a load in flight."""


class Pauses:
    """Sleep, wake, and new weights. Requests stay open: they wait without pages meanwhile.

    Args:
        move_pages: does the copies that the manager asks for.

    Attributes:
        asleep: between `sleep` and `wake`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        manager: Manager,
        offload: Offload | None,
        runner: Runner,
        move_pages: Callable[[], None],
    ) -> None:
        self.asleep = False
        self._scheduler = scheduler
        self._manager = manager
        self._offload = offload
        self._runner = runner
        self._move_pages = move_pages

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
        if self.asleep:
            return True
        self._require_no_step()
        end = time.monotonic() + limit
        self._preempt_all()
        while self._scheduler.loading:
            remaining = end - time.monotonic()
            if remaining <= 0:
                return False
            assert self._offload is not None
            self._offload.wait(min(remaining, WAIT_SECONDS))
            self._scheduler.collect_loads()
            self._preempt_all()
        self._move_pages()
        if self._offload is not None and not self._offload.drain(max(end - time.monotonic(), 0.0)):
            return False
        self._manager.clear()
        self._move_pages()
        release()
        self.asleep = True
        return True

    def wake(self) -> None:
        """Go on after `sleep`. The memory comes back as it is used. Idempotent."""
        self.asleep = False

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
        if not callable(load):
            raise ConfigError(
                f"load is {shown(load)}: give a function that puts in the new weights"
            )
        self._require_no_step()
        self._preempt_all()
        self._scheduler.drop_loads()
        self._manager.set_weights_epoch(weights_epoch)
        load()

    def _preempt_all(self) -> None:
        for request in list(self._scheduler.running):
            self._scheduler.preempt(request)

    def require_awake(self) -> None:
        """Raise `MisuseError` between `sleep` and `wake`."""
        if self.asleep:
            raise MisuseError("the engine is asleep: call wake() before step()")

    def _require_no_step(self) -> None:
        if self._manager.stats().open_steps:
            raise MisuseError("a step is open: sleep and reload between two calls of step()")
