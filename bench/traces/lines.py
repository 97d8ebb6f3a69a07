"""Numbered lines of a text file, plain or gzip, with every way in which it can be broken named."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kvcache.bench.traces.base import bad_line
from kvcache.core.errors import ConfigError, InputError

MAX_LINE_BYTES = 16 << 20
GZIP_MAGIC = b"\x1f\x8b"


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text without its end) of each line; streams, bounded memory.

    Raises:
        ConfigError: the file cannot be opened.
        InputError: it is not what its name says, or breaks off; names the line.
    """
    try:
        raw = path.open("rb")
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be opened: {error.strerror}") from error
    with raw:
        number = 0
        try:
            stream = _decompressed(path, raw)
            while data := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                yield number, _text(path, number, data)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise bad_line(
                path, number + 1, f"the gzip data is broken ({error})", "a complete gzip file"
            ) from error
        except OSError as error:
            raise InputError(
                f"{path}, line {number + 1}: reading failed: {error.strerror or error}"
            ) from error


def _decompressed(path: Path, raw: IO[bytes]) -> IO[bytes]:
    head = raw.peek(2)[:2]  # type: ignore[attr-defined]  # open("rb") gives a BufferedReader
    if path.name.endswith(".gz"):
        if head != GZIP_MAGIC:
            raise InputError(f"{path} is named .gz but is not gzip data: rename or compress it")
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if head == GZIP_MAGIC:
        raise InputError(f"{path} is gzip data: its name must end in .gz")
    return raw


def _text(path: Path, number: int, data: bytes) -> str:
    if len(data) > MAX_LINE_BYTES:
        raise bad_line(
            path, number, f"no end of line in {MAX_LINE_BYTES} bytes", "one request a line"
        )
    try:
        return data.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise bad_line(path, number, f"byte {error.start} is not UTF-8", "text") from error
