"""Numbers of a command line: tokens, bytes, counts. One parser for all verbs, and one text each."""

from __future__ import annotations

import argparse
import re
from decimal import Decimal

MAX_TOKENS = 10**15
MAX_BYTES = 2**56
_MOST_CHARACTERS = 32
_NUMBER = r"([0-9][0-9_]*(?:\.[0-9]+)?)"

_SCALES = {
    "": 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
SUFFIXES = "k (or K), M, G are powers of ten, Ki, Mi, Gi powers of two"
"""For help texts: 32k is 32,000, 32Ki is 32,768."""


def token_count(text: str) -> int:
    """A number of tokens above 0: 262144, 1_000_000, 512k, 2.56M (powers of ten), 256Ki (of two)."""
    value = _value(re.fullmatch(_NUMBER + r"([kKMG]i?|)", text, re.ASCII), text)
    if value != value.to_integral_value() or not 0 < value <= MAX_TOKENS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens: expected a whole number above 0, up to {MAX_TOKENS},"
            f" such as 262144, 2.56M or 256Ki ({SUFFIXES})"
        )
    return int(value)


def token_number(text: str) -> int:
    """As `token_count`, but plain whole numbers pass as they are: what is asked for checks them."""
    return _whole(text) if re.fullmatch(r"-?[0-9]+", text, re.ASCII) else token_count(text)


def pool_size(text: str) -> int | None:
    """A number of tokens, or None for `inf`."""
    if text == "inf":
        return None
    try:
        return token_count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or inf") from None


def retention(text: str) -> int | None:
    """None for `dense`, else an interval in tokens, 0 for none."""
    if text == "dense":
        return None
    try:
        return 0 if text == "0" else token_count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or 0, or dense") from None


def byte_count(text: str) -> int:
    """A number of bytes above 0: 80GB, 141 GB (powers of ten), 24GiB (of two), 85899345920."""
    found = re.fullmatch(_NUMBER + r"(?: ?([kKMGT]i?|)B)?", text, re.ASCII)
    value = _value(found, text)
    if not 1 <= value <= MAX_BYTES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes: expected one above 0, up to {MAX_BYTES}, such as 80GB,"
            " 24GiB or 85899345920 (kB or KB, MB, GB, TB are powers of ten, KiB, MiB, GiB, TiB powers"
            " of two)"
        )
    return int(value)


def hours(text: str) -> float:
    """A number of hours; its range is for what is asked for to check."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of hours: expected one such as 1 or 0.25"
        ) from None


def whole_number(text: str) -> int:
    """A whole number; its range is for what is asked for to check."""
    if not re.fullmatch(r"-?[0-9]+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return _whole(text)


def _whole(text: str) -> int:
    if len(text) > _MOST_CHARACTERS:
        raise argparse.ArgumentTypeError(
            f"{text[:_MOST_CHARACTERS]!r}... has {len(text)} digits: give a smaller number"
        )
    return int(text)


def _value(found: re.Match[str] | None, text: str) -> Decimal:
    """The number times its suffix; 0 if there is none, or a suffix that is no scale."""
    if found is None or len(text) > _MOST_CHARACTERS or (found[2] or "") not in _SCALES:
        return Decimal(0)
    return Decimal(found[1].replace("_", "")) * _SCALES[found[2] or ""]
