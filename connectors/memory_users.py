"""Who still uses the memory of a tier: it is let go when the last of them has left."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from kvcache.core.errors import MisuseError


class Users:
    """Counts users of memory. For any threads.

    Where one of them never leaves the memory stays, beyond the interpreter's exit too: a thread
    that nobody could wait for may be in the middle of it.

    Args:
        let_go: called once, by the last that leaves.
    """

    def __init__(self, let_go: Callable[[], None]) -> None:
        self._let_go = let_go
        self._lock = threading.Lock()
        self._inside: set[int] = set()
        self._came = 0

    def add(self) -> Callable[[], None]:
        """One more; it calls what it gets here when it touches the memory no more. Idempotent.

        Raises:
            MisuseError: the last has left already.
        """
        with self._lock:
            if self._came and not self._inside:
                raise MisuseError("the memory was let go: the worker that has it is closed")
            self._came += 1
            number = self._came
            self._inside.add(number)
        # Nobody else may keep what the user can reach.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

        def leave() -> None:
            with self._lock:
                if number not in self._inside:
                    return
                self._inside.remove(number)
                last = not self._inside
            if last:
                self._let_go()
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self))

        return leave
