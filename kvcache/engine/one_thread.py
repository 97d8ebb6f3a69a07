"""Methods of an object that is for one thread at a time: a second one is refused, and changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kvcache.core.errors import MisuseError

P = ParamSpec("P")
R = TypeVar("R")


class _HasDoor(Protocol):
    @property
    def _door(self) -> threading.RLock: ...


S = TypeVar("S", bound=_HasDoor)


def one_thread(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """The method raises `MisuseError` while another thread is in one of the object's.

    The thread that is in one may call others. The object has an `RLock` in `_door`.
    """

    @wraps(method)
    def alone(self: S, /, *args: P.args, **options: P.kwargs) -> R:
        if not self._door.acquire(blocking=False):
            raise MisuseError(
                f"two threads are in one {type(self).__name__} at once: give it to one thread, or lock"
                " around it"
            )
        try:
            return method(self, *args, **options)
        finally:
            self._door.release()

    return alone
