"""How verbs write: JSON on stdout, whole files or none, progress where a person watches."""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from kvcache.core.errors import ConfigError

PROGRESS_SECONDS = 0.1
"""Least time between two states of a progress line."""


def _finite(value: object) -> object:
    """`value` as JSON can say it: numpy values as plain ones, infinities and NaN as null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def as_json(value: object) -> str:
    """One JSON text in ASCII, ending with a newline: no locale and no file name can spoil it."""
    return json.dumps(_finite(value), allow_nan=False, indent=2) + "\n"


def emit_json(value: object) -> None:
    """Write one object to stdout, and see that it arrives (a full disk raises `OSError`)."""
    text = as_json(value)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "stdout") from error


def require_writable(path: str) -> None:
    """Said before minutes are spent, not after. `ConfigError` names `--output`."""
    target = Path(path)
    folder = Path(os.path.realpath(path)).parent  # Path.resolve fails for a link to itself
    if not path or target.is_dir():
        raise ConfigError(f"--output {path!r} is a folder: give the path of a file")
    if not folder.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {folder}")
    replaced = target.is_file() or not target.exists()  # written beside it, then renamed over it
    places = [folder] if replaced else []
    if not all(os.access(p, os.W_OK) for p in (*places, *([target] if target.exists() else []))):
        raise ConfigError(f"--output {path} cannot be written: give another file")


def require_apart(path: str, inputs: Iterable[str | os.PathLike[str]]) -> None:
    """`ConfigError` where `--output` is one of the files that are read, by whatever name or link."""
    target = Path(path)
    for source in inputs:
        try:
            same = target.is_file() and target.samefile(source)
        except (OSError, ValueError):  # one of them is not there, or can have no such name
            continue
        if same:
            raise ConfigError(
                f"--output {path} is {os.fspath(source)}, which is read and would be replaced: give"
                " another file"
            )


def write_atomically(path: str | os.PathLike[str], text: str, *, mode: int | None = None) -> None:
    """Write a whole file or, on any failure, nothing: the old content stays.

    Written beside the target, synced, then renamed over it. A target that is not a regular file
    (a device, a pipe) is written to directly.

    Args:
        mode: of the file, also of one that is there; None: as that, or as the umask leaves a new one.

    Raises:
        OSError: no such folder, no permission, a full disk.
    """
    target = Path(path)
    try:
        # Asked by the name that was given: what /dev/fd/N is may have no path of its own.
        if target.exists() and not target.is_file():
            with target.open("wb") as stream:
                stream.write(text.encode())
        else:
            _replace(Path(os.path.realpath(path)), text.encode(), mode)
    except OSError as error:  # a failed write does not know its file's name
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextmanager
def also_in(path: str | None, report: object) -> Iterator[None]:
    """Around what prints the report: then it is written as JSON to `path`, if there is one.

    Neither place takes it from the other: a full disk leaves what is printed, a reader who has left
    the file. Raises what failed last.
    """
    try:
        yield
    finally:
        if path is not None:
            write_atomically(path, as_json(report))


def _replace(target: Path, data: bytes, mode: int | None) -> None:
    # Not the target's name and more, which may be longer than names can be.
    beside = target.with_name(f".kvcache-{secrets.token_hex(8)}.tmp")
    try:
        with beside.open("xb") as stream:
            if mode is None and target.exists():
                mode = stat.S_IMODE(target.stat().st_mode)
            if mode is not None:
                os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


class Progress:
    """One line on stderr that rewrites itself; silent where stderr is not a terminal, or none any more.

    Use as a context manager: the line is wiped at the end.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._next_seconds = 0.0

    def update(self, text: str) -> None:
        """Show `text` instead of the last one, at most ten times a second."""
        now = time.monotonic()
        if not self._live or now < self._next_seconds:
            return
        self._next_seconds = now + PROGRESS_SECONDS
        self._write(lambda: f"\r\x1b[K{text[: self._columns() - 1]}")

    def close(self) -> None:
        """Wipe the line."""
        if self._live:
            self._write(lambda: "\r\x1b[K")

    def _columns(self) -> int:
        return os.get_terminal_size(self._stream.fileno()).columns or 80

    def _write(self, text: Callable[[], str]) -> None:
        try:
            self._stream.write(text())
            self._stream.flush()
        except OSError:  # the terminal has gone: the work has not
            self._live = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
