"""Single values on their way in: numbers, flags, texts, none rounded or converted silently; and in messages."""

from __future__ import annotations

import math
import reprlib
import secrets
from collections.abc import Iterable
from typing import TypeVar

import numpy as np

from kvcache.core.errors import ConfigError

T = TypeVar("T")

LEAST = -(2**63)
MOST = 2**63 - 1
"""Whole numbers are 64 bits wide below, in C."""

MOST_SECONDS = 1_000_000.0
"""Longer than anybody waits, and short enough for every clock."""


def whole(value: object, what: str, *, least: int = LEAST, most: int = MOST) -> int:
    """`value` as an int. `ConfigError` if it is no whole number (a bool is none), or out of range."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ConfigError(f"{what} is {shown(value)}: it must be a whole number")
    number = int(value)
    if not least <= number <= most:
        raise ConfigError(f"{what} is {shown(number)}: it must be from {least} to {most}")
    return number


def index_seed(seed: object, what: str) -> int:
    """What an index's hash function starts from, 64 bits: drawn at random for None."""
    if seed is None:
        return secrets.randbits(64)
    return whole(seed, what, most=2**64 - 1) & (2**64 - 1)


def flag(value: object, what: str) -> bool:
    """`value`, True or False. `ConfigError` for anything else, 0 and 1 too."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{what} is {shown(value)}: it must be True or False")
    return bool(value)


def wait_seconds(value: object, what: str) -> float:
    """How long a call may wait: 0, or less, is not at all."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ConfigError(f"{what} is {shown(value)}: it must be a number of seconds")
    return min(max(float(value), 0.0), MOST_SECONDS)


def text(value: object, what: str) -> str:
    """`value`, a text that has a UTF-8 form. `ConfigError` for anything else."""
    if not isinstance(value, str):
        raise ConfigError(f"{what} is {shown(value)}: it must be a text (str)")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is {shown(value)}: it must be a valid text ({error})") from error
    return value


def digest(value: object, what: str) -> bytes:
    """`value`, 32 bytes. `ConfigError` for anything else."""
    if not isinstance(value, bytes) or len(value) != 32:
        raise ConfigError(f"{what} is {shown(value)}: a digest has 32 bytes")
    return value


def finite(value: object, what: str) -> float:
    """`value` as a float. `ConfigError` if it is no number (a bool is none), infinite or NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ConfigError(f"{what} is {shown(value)}: it must be a number")
    try:
        number = float(value)
    except OverflowError:  # an int of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{what} is {shown(value)}: it must be a finite number")
    return number


def sequence(items: Iterable[T], what: str, *, of: type[T] | None = None) -> list[T]:
    """`items` as a list. `ConfigError` if it cannot be walked, or has anything but `of`."""
    kind = "values" if of is None else of.__name__
    try:
        found = list(items)
    except TypeError as error:
        raise ConfigError(f"{what} is {shown(items)}: give a list of {kind}") from error
    for item in found:
        if of is not None and not isinstance(item, of):
            raise ConfigError(f"{what} has {shown(item)}: give a list of {kind}")
    return found


def human_bytes(value: float) -> str:
    """For people: in the largest binary unit of which there is one."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:,.2f} {unit}"
    return f"{value:,.0f} B"


def shown(value: object) -> str:
    """For messages: cut where it is long, the type alone where it cannot be shown."""
    try:
        return reprlib.repr(value)
    except Exception:  # noqa: BLE001 (a __repr__ of the caller's, or an int of thousands of digits)
        return f"of type {type(value).__name__}"
