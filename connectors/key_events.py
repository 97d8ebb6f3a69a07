"""What a tier reports of its keys: which became visible, which went, in order."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["KeyEvent", "KeysLost", "KeysRemoved", "KeysStored"]


class KeysStored(NamedTuple):
    """Keys that became visible to `lookup`, in the order of their stores."""

    group: int
    namespace: bytes
    """32 bytes, as in `RequestKeys`."""
    keys: NDArray[np.uint8]
    """[n, 32]"""
    medium: str | None = None
    """Where, if the tier has several media; None: the connector's."""


class KeysRemoved(NamedTuple):
    """Keys that `lookup` does not find any more."""

    group: int
    namespace: bytes
    keys: NDArray[np.uint8]
    """[n, 32]"""
    medium: str | None = None
    """Where, if the tier has several media; None: the connector's."""


class KeysLost(NamedTuple):
    """Comes first: what waited before was dropped. What was visible then is not told again."""


KeyEvent: TypeAlias = KeysStored | KeysRemoved | KeysLost
