"""A reader for GGUF model files: metadata and tensors of the types in `gguf_types`.

The file is not trusted: all that is wrong with it ends in `InputError`, before anything is
allocated that a damaged number asks for.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvcache.core.errors import ConfigError, InputError
from kvcache.engine.gguf_parse import Value, parse, show


class GGUF:
    """An open file: `metadata` by key, `tensors` by name. A context manager.

    Raises:
        ConfigError: the file cannot be opened, or is no plain file.
        InputError: it is not a whole, sound GGUF file of a supported version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if "\0" in str(path):
            raise ConfigError(f"{str(path)!r} cannot be the name of a file")
        try:
            # A pipe in its place would be waited for.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}: give a GGUF model file") from error
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            os.close(descriptor)
            kind = "Is a directory" if stat.S_ISDIR(about.st_mode) else "it is no plain file"
            raise ConfigError(f"{self.path}: {kind}: give a GGUF model file")
        self._stream = os.fdopen(descriptor, "rb")
        try:
            self.metadata, self.tensors = parse(str(self.path), self._stream, about.st_size)
        except BaseException:
            self.close()
            raise

    def digest(self) -> str:
        """SHA-256 of the whole file, in hex: what its weights are, whatever it is called."""
        self._stream.seek(0)
        return hashlib.file_digest(self._stream, "sha256").hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Arrays that were read stay valid."""
        self._stream.close()

    def read(self, name: str, shape: Sequence[int]) -> NDArray[np.float32]:
        """A tensor in fp32, a new array. It must have this shape and finite elements."""
        info = self.tensors.get(name)
        if info is None:
            raise InputError(f"{self.path}: there is no tensor {name!r}")
        if info.shape != tuple(shape):
            raise InputError(
                f"{self.path}: tensor {name!r} has shape {list(info.shape)}, the model's settings"
                f" need {list(shape)}"
            )
        self._stream.seek(info.start)
        data = self._stream.read(info.end - info.start)
        if len(data) < info.end - info.start:
            raise InputError(f"{self.path}: the file was cut short while tensor {name!r} was read")
        with np.errstate(invalid="ignore", over="ignore"):
            values = info.type.expand(np.frombuffer(data, info.type.block))
        if not np.isfinite(values).all():
            raise InputError(f"{self.path}: tensor {name!r} holds values that are not finite")
        return values.reshape(info.shape)

    def whole_number(self, key: str, low: int, high: int) -> int:
        """Metadata that must be a whole number from `low` to `high`."""
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InputError(
                f"{self.path}: {key} is {show(value)}: expected a whole number from {low} to {high}"
            )
        return value

    def number(self, key: str, low: float, high: float) -> float:
        """Metadata that must be a number from `low` to `high`."""
        value = self._value(key)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise InputError(
                f"{self.path}: {key} is {show(value)}: expected a number from {low} to {high}"
            )
        return float(value)

    def text(self, key: str) -> str:
        """Metadata that must be a string."""
        value = self._value(key)
        if not isinstance(value, str):
            raise InputError(f"{self.path}: {key} is {show(value)}: expected a string")
        return value

    def texts(self, key: str) -> list[str]:
        """Metadata that must be an array of strings."""
        value = self._value(key)
        if not isinstance(value, list):
            raise InputError(f"{self.path}: {key} is {show(value)}: expected an array of strings")
        return value

    def whole_numbers(self, key: str) -> list[int]:
        """Metadata that must be an array of whole numbers."""
        value = self._value(key)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise InputError(
                f"{self.path}: {key} is {show(value)}: expected an array of whole numbers"
            )
        numbers: list[int] = value.tolist()
        return numbers

    def _value(self, key: str) -> Value:
        if key not in self.metadata:
            raise InputError(f"{self.path}: there is no metadata {key!r}")
        return self.metadata[key]
