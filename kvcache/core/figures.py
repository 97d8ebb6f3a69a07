"""Figures given by name on one line: `flops=989T,link=53G`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kvcache.core.alike import alike
from kvcache.core.errors import ConfigError
from kvcache.core.values import shown

_DIGITS = {"": 0, "k": 3, "M": 6, "G": 9, "B": 9, "T": 12, "P": 15}
_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)(?:e(-?[0-9]{1,2}))?([kMGBTP]?)", re.ASCII)


def parse_figures(parts: Iterable[str], names: Sequence[str], what: str) -> dict[str, float]:
    """The numbers of `NAME=NUMBER` parts. k, M, G (or B), T, P are powers of a thousand.

    Raises:
        ConfigError: an unknown name, one that is given twice, or no number.
    """
    found: dict[str, float] = {}
    for part in parts:
        name, _, text = part.partition("=")
        if name not in names:
            raise ConfigError(
                f"{what}: {shown(name)} is no figure{alike(name, names)}: known are"
                f" {', '.join(names)}, each as NAME=NUMBER"
            )
        number = _NUMBER.fullmatch(text)
        if number is None:
            raise ConfigError(
                f"{what}: {name}={shown(text)} is not a number: expected one such as 989T, 3.35T, 53G"
                " or 0.7"
            )
        if name in found:
            raise ConfigError(f"{what} has {name} twice")
        found[name] = float(f"{number[1]}e{int(number[2] or 0) + _DIGITS[number[3]]}")
    return found
