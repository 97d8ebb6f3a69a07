"""What every kind of attention group has in common."""

from __future__ import annotations

from typing import Protocol

from kvcache.core.errors import ConfigError


class GroupSpec(Protocol):
    """One group of layers that share a page size and a block table. Immutable."""

    @property
    def name(self) -> str:
        """Name of the group, unique in a geometry."""

    @property
    def kind(self) -> str:
        """Which rule a hit follows: `full` or `recurrent`."""

    @property
    def layers(self) -> int:
        """Number of model layers in the group."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: all layers of the group, contiguous."""


def require_positive(spec: object, *fields: str) -> None:
    """Raise `ConfigError` unless each named field is an int above zero."""
    for field in fields:
        value = getattr(spec, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{type(spec).__name__}.{field} is {value!r}: it must be a whole number above 0"
            )
