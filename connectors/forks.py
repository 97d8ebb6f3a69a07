"""What is to be done in a forked child: it has its parent's objects, and must not take them for its own."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Protocol


class OfParent(Protocol):
    """An object whose threads, locks or files a child has no part in."""

    def after_fork(self) -> None:
        """In the child, before anything else runs there. May raise `OSError`."""


_KNOWN: weakref.WeakSet[OfParent] = weakref.WeakSet()


def mind_forks(thing: OfParent) -> None:
    """`after_fork` is called in every child that is forked as long as the object lives."""
    _KNOWN.add(thing)


def _after_fork() -> None:
    for thing in list(_KNOWN):
        with suppress(OSError):
            thing.after_fork()


os.register_at_fork(after_in_child=_after_fork)
