"""Arrays on their way into the library: shape and every value checked, nothing wraps silently."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from kvcache.core.errors import ConfigError
from kvcache.core.values import shown


def flat(values: npt.ArrayLike, dtype: npt.DTypeLike, what: str) -> NDArray[Any]:
    """One-dimensional, contiguous, of `dtype`; no copy if it is that already.

    Raises:
        ConfigError: another number of dimensions, no whole numbers, or a value that does not fit.
    """
    wanted = np.dtype(dtype)
    if type(values) is np.ndarray and values.dtype == wanted and values.ndim == 1:
        return np.ascontiguousarray(values)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{what} cannot be made an array: {error}") from error
    if array.ndim == 0:  # None, a number, a text, a generator
        raise ConfigError(f"{what} is {shown(values)}: give a list or an array of {_items(wanted)}")
    if array.ndim != 1:
        raise ConfigError(f"{what} has shape {array.shape}: expected one dimension")
    if array.size == 0:
        return np.empty(0, wanted)
    if array.dtype == wanted:
        return np.ascontiguousarray(array)
    if wanted.names and array.dtype.names == wanted.names:
        return array.astype(wanted)  # the same record, packed differently
    if wanted.kind not in "iu" or array.dtype.kind not in "iub":
        raise ConfigError(f"{what} is {_of(array.dtype)}: expected {_items(wanted)}")
    limits, low, high = np.iinfo(wanted), int(array.min()), int(array.max())
    if low < limits.min or high > limits.max:
        values = f"values from {low} to {high}" if low < high else f"the value {low}"
        raise ConfigError(f"{what} has {values}: expected {limits.min} to {limits.max} ({wanted})")
    return array.astype(wanted)


def _items(dtype: np.dtype[Any]) -> str:
    if dtype.names:
        return f"records with the fields {', '.join(dtype.names)}"
    return f"whole numbers ({dtype})"


def _of(dtype: np.dtype[Any]) -> str:
    return f"of records with the fields {', '.join(dtype.names)}" if dtype.names else f"of {dtype}"


def keys(values: npt.ArrayLike, what: str) -> NDArray[np.uint8]:
    """Digests `[n, 32]` of bytes; `ConfigError` for any other shape or type."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{what} cannot be made an array: {error}") from error
    if array.ndim != 2 or array.shape[1] != 32 or array.dtype != np.uint8:
        raise ConfigError(f"{what} is {array.dtype} of shape {array.shape}: expected uint8 [n, 32]")
    return array
