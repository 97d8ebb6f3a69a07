"""Parsing of GGUF: metadata and the table of tensors.

Layout, little-endian (github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3):

    "GGUF" | version u32 | tensors u64 | metadata u64
    metadata   key string | type u32 | value               (array: type u32 | count u64 | values)
    tensors    name string | dimensions u32 | sizes u64 ... | type u32 | offset u64
    padding to the alignment | tensor data                 (offsets count from here)

The file is not trusted: every count and length is held against the bytes that are left before
anything is allocated for it, and all that is wrong ends in `InputError`.
"""

from __future__ import annotations

import struct
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.core.errors import InputError
from kvcache.engine.gguf_types import ELEMENT_TYPES, ElementType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MIN_STRING_BYTES = 8
_MIN_METADATA_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

Value = int | float | bool | str | list[str] | NDArray[np.generic]


class TensorInfo(NamedTuple):
    """Where a tensor lies. `shape` is in row-major order: the last dimension is contiguous."""

    shape: tuple[int, ...]
    type: ElementType
    start: int
    """First byte in the file."""
    blocks: int

    @property
    def end(self) -> int:
        """One past the last byte in the file."""
        return self.start + self.blocks * self.type.block.itemsize


def parse(name: str, stream: BinaryIO, size: int) -> tuple[dict[str, Value], dict[str, TensorInfo]]:
    """Metadata by key and tensors by name of a file of `size` bytes. `name` is for messages."""
    cursor = _Cursor(name, stream, size)
    tensor_count, metadata_count = _read_header(cursor)
    metadata = _read_metadata(cursor, metadata_count)
    return metadata, _read_tensors(cursor, tensor_count, _alignment(cursor, metadata))


class _Cursor:
    """Reads forward through the file; each read is checked against what is left."""

    def __init__(self, name: str, stream: BinaryIO, size: int) -> None:
        self.name = name
        self.size = size
        self.at = 0
        self._stream = stream

    @property
    def left(self) -> int:
        return self.size - self.at

    def fail(self, problem: str) -> InputError:
        return InputError(f"{self.name}: {problem}")

    def take(self, count: int, what: str) -> bytes:
        if count > self.left:
            raise self.fail(
                f"{what} at byte {self.at} needs {count} bytes, the file has {self.left} more:"
                " it is truncated or damaged"
            )
        raw = self._stream.read(count)
        if len(raw) < count:
            raise self.fail(f"{what} at byte {self.at}: the file was cut short while it was read")
        self.at += count
        return raw

    def number(self, layout: str, what: str) -> int:
        (value,) = struct.unpack(layout, self.take(struct.calcsize(layout), what))
        assert isinstance(value, int)
        return value

    def count(self, least_bytes: int, what: str) -> int:
        """A number of items of which each takes at least so many bytes."""
        value = self.number("<Q", what)
        if value * least_bytes > self.left:
            raise self.fail(
                f"{what} is {value}, which cannot lie in the {self.left} bytes that are left:"
                " it is truncated or damaged"
            )
        return value

    def text(self, what: str) -> str:
        raw = self.take(self.number("<Q", f"length of {what}"), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} before byte {self.at} is not UTF-8: {error.reason}") from error


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Number of tensors and of metadata entries."""
    if not cursor.size:
        raise cursor.fail("the file is empty, not a GGUF model")
    magic = cursor.take(len(MAGIC), "the header")
    if magic != MAGIC:
        raise cursor.fail(f"it begins with {magic!r}, not {MAGIC!r}: it is not a GGUF model")
    version = cursor.number("<I", "the version")
    if version not in VERSIONS:
        raise cursor.fail(
            f"GGUF version {version} is not supported: expected one of {list(VERSIONS)},"
            " little-endian"
        )
    return (
        cursor.count(_MIN_TENSOR_BYTES, "the number of tensors"),
        cursor.count(_MIN_METADATA_BYTES, "the number of metadata entries"),
    )


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise cursor.fail(f"metadata {show(key)} occurs twice")
        metadata[key] = _read_value(cursor, key)
    return metadata


def _read_value(cursor: _Cursor, key: str) -> Value:
    kind = cursor.number("<I", f"the type of {show(key)}")
    if kind == _STRING:
        return cursor.text(f"the value of {show(key)}")
    if kind != _ARRAY:
        value: Value = _read_scalars(cursor, key, kind, 1)[0].item()
        return value
    kind = cursor.number("<I", f"the element type of {show(key)}")
    if kind == _STRING:
        count = cursor.count(_MIN_STRING_BYTES, f"the length of {show(key)}")
        return [cursor.text(f"an element of {show(key)}") for _ in range(count)]
    return _read_scalars(cursor, key, kind, cursor.count(1, f"the length of {show(key)}"))


def _read_scalars(cursor: _Cursor, key: str, kind: int, count: int) -> NDArray[np.generic]:
    if kind not in _SCALARS:
        raise cursor.fail(f"{show(key)} has the unknown type {kind}")
    dtype = np.dtype(_SCALARS[kind])
    raw = cursor.take(count * dtype.itemsize, f"the value of {show(key)}")
    if kind == _BOOL and raw.strip(b"\0\1"):
        raise cursor.fail(f"{show(key)} is a truth value that is neither 0 nor 1")
    return np.frombuffer(raw, dtype)


def _alignment(cursor: _Cursor, metadata: dict[str, Value]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value % 8
        or not 8 <= value <= 1 << 20
    ):
        raise cursor.fail(
            f"general.alignment is {show(value)}: expected a multiple of 8 from 8 to 1048576"
        )
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for _ in range(count):
        name = cursor.text("a tensor's name")
        if name in found:
            raise cursor.fail(f"tensor {show(name)} occurs twice")
        found[name] = _read_tensor(cursor, name, alignment)
    base = -(-cursor.at // alignment) * alignment
    placed = {name: info._replace(start=base + info.start) for name, info in found.items()}
    last_end, last_name = base, ""
    for name, info in sorted(placed.items(), key=lambda item: item[1].start):
        if info.start < last_end:
            raise cursor.fail(
                f"tensors {show(last_name)} and {show(name)} overlap at byte {info.start}"
            )
        if info.end > cursor.size:
            raise cursor.fail(
                f"tensor {show(name)} {list(info.shape)} reaches to byte {info.end}, the file has"
                f" {cursor.size}: it is truncated or damaged"
            )
        last_end, last_name = info.end, name
    return placed


def _read_tensor(cursor: _Cursor, name: str, alignment: int) -> TensorInfo:
    """One entry of the table; `start` still counts from the data section."""
    dimensions = cursor.number("<I", f"the dimensions of {show(name)}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.fail(
            f"tensor {show(name)} has {dimensions} dimensions: expected 1 to {MAX_DIMENSIONS}"
        )
    sizes = [cursor.number("<Q", f"a size of {show(name)}") for _ in range(dimensions)]
    kind = cursor.number("<I", f"the type of {show(name)}")
    start = cursor.number("<Q", f"the offset of {show(name)}")
    if kind not in ELEMENT_TYPES:
        known = ", ".join(t.name for t in ELEMENT_TYPES.values())
        raise cursor.fail(f"tensor {show(name)} has type {kind}: supported are {known}")
    element = ELEMENT_TYPES[kind]
    if 0 in sizes or sizes[0] % element.block_elements:
        raise cursor.fail(
            f"tensor {show(name)} of type {element.name} has sizes {sizes}: expected sizes above 0, the"
            f" first a multiple of {element.block_elements}"
        )
    if start % alignment:
        raise cursor.fail(f"tensor {show(name)} lies at {start}, not a multiple of {alignment}")
    elements = 1
    for size in sizes:
        elements *= size
    return TensorInfo(tuple(reversed(sizes)), element, start, elements // element.block_elements)


def show(value: Value) -> str:
    """A value for an error message, never long."""
    if isinstance(value, list | np.ndarray):
        return f"an array of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
