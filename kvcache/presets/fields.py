"""Fields of a config.json, each checked as it is read: a wrong one is named, with what should be there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from kvcache.core.errors import InputError
from kvcache.core.values import shown
from kvcache.presets.class_defaults import VERSION, ClassDefaults

MOST_LAYERS = 10_000
MOST_SIZE = 2**24
"""Of heads, dimensions, ratios: hundreds of times more than any model has."""
MOST_WINDOW = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

T = TypeVar("T")


class Fields:
    """One section of a config, and what the class of its family takes for absent fields.

    A field that is null is neither absent nor a number: no default stands in for it. `where` names
    file and section in errors. What was filled in is noted in `assumed`.
    """

    def __init__(
        self, where: str, values: Mapping[str, object], defaults: ClassDefaults | None = None
    ) -> None:
        self._where = where
        self._values = values
        self._defaults = defaults
        self.assumed: list[str] = []

    def of_class(self, defaults: ClassDefaults | None) -> Fields:
        """The same section, with the defaults of a class; None: none is known."""
        return Fields(self._where, self._values, defaults)

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
        """A whole number in [least, most]; no bool, no float, no text.

        An absent field has the default of the class, if it is known: noted.
        """
        default = self._default(name)
        if name not in self._values and default is not None:
            self.assume(name, default, "its class takes this")
            return default
        value = self._needed(name)
        if type(value) is not int or not least <= value <= most:
            raise self.error(
                f"{name} is {shown(value)}: it must be a whole number from {least} to {most}"
            )
        return value

    def expects(self, name: str) -> bool:
        """Whether `whole` has something to read: the field, or a default for its absence.

        True for one that is null though its class has a number: `whole` then says so.
        """
        return self.has(name) or self._default(name) is not None

    def known(self, name: str) -> bool:
        """As `expects`, but False for a field that is null."""
        return self.has(name) or (name not in self._values and self.expects(name))

    def assume(self, name: str, value: int | None, why: str) -> None:
        """Note what stands in for a field; `value` None: no number, but a rule, `why` says which.

        `InputError` where no class of the family is known that would say so.
        """
        if self._defaults is None:
            raise self._missing(name)
        what = name if value is None else f"{name} {value}"
        text = f"{what}: the file has none, {why} ({self._defaults.name}, {VERSION})"
        if text not in self.assumed:
            self.assumed.append(text)

    def _default(self, name: str) -> int | None:
        return None if self._defaults is None else self._defaults.fields.get(name)

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
            raise self._missing(name)
        return value

    def _missing(self, name: str) -> InputError:
        what = f"{name} is null" if name in self._values else f"there is no field {name}"
        return self.error(f"{what}, which the KV of this model depends on")
