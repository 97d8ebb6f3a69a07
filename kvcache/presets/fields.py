"""Fields of a config.json, each checked as it is read: a wrong one is named, with what should be there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from kvcache.core.errors import InputError
from kvcache.core.values import shown

MOST_LAYERS = 10_000
MOST_SIZE = 2**24
"""Of heads, dimensions, ratios: hundreds of times more than any model has."""
MOST_WINDOW = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

T = TypeVar("T")


class Fields:
    """One section of a config. A field that is null counts as absent, as in transformers.

    `where` names file and section in errors. What was filled in for an absent field is noted in
    `assumed`.
    """

    def __init__(self, where: str, values: Mapping[str, object]) -> None:
        self._where = where
        self._values = values
        self.assumed: list[str] = []

    def error(self, text: str) -> InputError:
        """An error about this section."""
        return InputError(f"{self._where}: {text}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def first(self, *names: str) -> str:
        """The first of these fields that is there, else the first of the names."""
        return next((name for name in names if self.has(name)), names[0])

    def whole(self, name: str, *, least: int = 1, most: int = MOST_SIZE) -> int:
        """A whole number in [least, most]; no bool, no float, no text."""
        value = self._needed(name)
        if type(value) is not int or not least <= value <= most:
            raise self.error(
                f"{name} is {shown(value)}: it must be a whole number from {least} to {most}"
            )
        return value

    def whole_or(self, name: str, default: int, why: str, *, most: int = MOST_SIZE) -> int:
        """A whole number above 0, or `default` where the file has none: noted, with the reason."""
        if self.has(name):
            return self.whole(name, most=most)
        self.assumed.append(f"{name} {default}: the file has none, {why}")
        return default

    def flag(self, name: str) -> bool:
        """A bool; an absent one is false."""
        value = self._values.get(name)
        if value is not None and type(value) is not bool:
            raise self.error(f"{name} is {shown(value)}: it must be true or false")
        return bool(value)

    def dtype_bytes(self, name: str, default: str, why: str) -> int:
        """Bytes of the type that the field names; `default` where the file has none, noted."""
        value = self._values.get(name)
        if value is None:
            self.assumed.append(f"{name} {default}: the file has none, {why}")
            value = default
        if not isinstance(value, str) or value not in DTYPE_BYTES:
            raise self.error(
                f"{name} is {shown(value)}: it must be one of {', '.join(DTYPE_BYTES)}"
            )
        return DTYPE_BYTES[value]

    def layers(self) -> int:
        """The number of layers."""
        return self.whole("num_hidden_layers", most=MOST_LAYERS)

    def per_layer(
        self, name: str, layers: int, known: Mapping[str, T] | Mapping[int, T]
    ) -> list[T]:
        """What each of the first `layers` entries of a list means. Further entries: draft layers."""
        value = self._needed(name)
        if not isinstance(value, Sequence) or len(value) < layers:
            shape = f"has {len(value)} entries" if isinstance(value, list | str) else "is no list"
            raise self.error(f"{name} {shape}: expected one for each of {layers} layers")
        meanings: list[T] = []
        for i, entry in enumerate(value[:layers]):
            if isinstance(entry, bool) or not isinstance(entry, int | str) or entry not in known:
                raise self.error(
                    f"{name}[{i}] is {shown(entry)}: known are {', '.join(map(str, known))}"
                )
            meanings.append(known[entry])  # type: ignore[index]  # it is one of the keys
        return meanings

    def numbers(self, name: str, most: int) -> list[int]:
        """A list of different whole numbers from 1 to `most`."""
        value = self._needed(name)
        whole = isinstance(value, list) and all(type(n) is int and 1 <= n <= most for n in value)
        if not whole or len(set(value)) != len(value):  # type: ignore[call-overload, arg-type]
            raise self.error(
                f"{name} is {shown(value)}: expected different whole numbers from 1 to {most}"
            )
        return list(value)  # type: ignore[call-overload, no-any-return]

    def section(self, name: str) -> Fields:
        """An object inside this one."""
        value = self._needed(name)
        if not isinstance(value, Mapping):
            raise self.error(f"{name} is {shown(value)}: expected an object with fields")
        inner = Fields(f"{self._where}, {name}", value)
        inner.assumed = self.assumed
        return inner

    def text(self, name: str) -> str:
        """A text."""
        value = self._needed(name)
        if not isinstance(value, str):
            raise self.error(f"{name} is {shown(value)}: it must be a text")
        return value

    def entries(self, name: str) -> list[object]:
        """A list, whatever is in it."""
        value = self._needed(name)
        if not isinstance(value, list):
            raise self.error(f"{name} is {shown(value)}: expected a list")
        return value

    def _needed(self, name: str) -> object:
        value = self._values.get(name)
        if value is None:
            raise self.error(f"there is no field {name}, which the KV of this model depends on")
        return value
