"""Pages in files, one each: written and verified in one native call for many of them, without the GIL."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.core import arrays, native
from kvcache.core.errors import ConfigError
from kvcache.core.values import flag, whole

__all__ = ["PageFault", "PageFiles", "checksum", "page_file_bytes"]


class PageFault(IntEnum):
    """Why a file is not the page that was asked for. It was removed."""

    LENGTH = -1
    """Cut short, or no file at all."""
    HEAD = -2
    """Of another page, another layout or another version."""
    CHECKSUM = -3
    """Bytes changed since it was written."""


def checksum(data: bytes | NDArray[np.uint8]) -> bytes:
    """XXH3, 128 bits, of 241 bytes or more: finds damage, not malice.

    Raises:
        ConfigError: fewer bytes.
    """
    ffi, lib = native.load()
    out = ffi.new("uint8_t[16]")
    buffer = ffi.from_buffer("uint8_t[]", data)
    native.call(lib.kvc_checksum, buffer, len(buffer), out)
    return bytes(out)


def page_file_bytes(page_bytes: int) -> int:
    """Size of the file of one page: what is before it, and zeros up to a multiple of 4096."""
    page_bytes = whole(page_bytes, "page_bytes", least=1)
    _, lib = native.load()
    return int(lib.kvc_page_file_bytes(page_bytes))


class PageFiles:
    """How the pages of one size are written to and read from one folder. Holds nothing open.

    Args:
        folder: descriptor of the folder that names are relative to.
        page_bytes: of a page.
        head_bytes: what the caller writes before a page, and compares.
        name_bytes: of one name, filled up with zeros, at least one.
        direct: past the kernel's cache. Every write and read fails where the file system cannot.
        durable: written files outlive a loss of power.
        threads: how many files are written or read at once.
    """

    def __init__(
        self,
        folder: int,
        *,
        page_bytes: int,
        head_bytes: int,
        name_bytes: int,
        direct: bool = False,
        durable: bool = False,
        threads: int = 1,
    ) -> None:
        self._ffi, self._lib = native.load()
        self._name_bytes, self._head_bytes = name_bytes, head_bytes
        self._files: Any = native.new(
            "kvc_page_files*",
            {
                "folder": folder,
                "direct": flag(direct, "PageFiles.direct"),
                "durable": flag(durable, "PageFiles.durable"),
                "threads": threads,
                "page_bytes": page_bytes,
                "head_bytes": head_bytes,
                "name_bytes": name_bytes,
            },
        )

    def write(
        self,
        temporary: str,
        names: NDArray[np.uint8],
        heads: NDArray[np.uint8],
        addresses: NDArray[np.uint64],
        times: NDArray[np.int64],
    ) -> NDArray[np.int32]:
        """Pages at the addresses become files under these names, all of each or nothing.

        Args:
            temporary: names of files on their way begin so; for one call at a time.
            names: `[n, name_bytes]`.
            heads: `[n, head_bytes]`.
            addresses: `[n]`. That they are mapped is the caller's promise.
            times: `[n]`, nanoseconds since 1970: of the files' last change.

        Returns:
            For each page 0 or an errno.
        """
        return self._call(
            self._lib.kvc_page_files_write, (temporary.encode(),), names, heads, addresses, times
        )

    def read(
        self,
        names: NDArray[np.uint8],
        heads: NDArray[np.uint8],
        addresses: NDArray[np.uint64],
        times: NDArray[np.int64],
    ) -> NDArray[np.int32]:
        """Files become pages at the addresses, where head, length and checksum are right.

        These files are as of `times` from now on.

        Returns:
            For each page 0, an errno, or a `PageFault`, and then the file is gone.
        """
        return self._call(self._lib.kvc_page_files_read, (), names, heads, addresses, times)

    def remove(self, names: NDArray[np.uint8]) -> NDArray[np.int32]:
        """The files are gone. For each 0, also where there was none, or an errno."""
        outcomes = np.zeros(len(names), np.int32)
        native.call(
            self._lib.kvc_page_files_remove,
            self._files,
            self._rows("char[]", names, "names", (len(names), self._name_bytes)),
            len(names),
            self._ffi.from_buffer("int32_t[]", outcomes),
        )
        return outcomes

    def _rows(self, ctype: str, rows: NDArray[np.uint8], what: str, shape: tuple[int, int]) -> Any:
        if rows.shape != shape:
            raise ConfigError(f"{what} are {rows.shape}: they must be {shape}")
        return self._ffi.from_buffer(ctype, np.ascontiguousarray(rows, np.uint8))

    def _call(
        self,
        function: Any,
        first: tuple[bytes, ...],
        names: NDArray[np.uint8],
        heads: NDArray[np.uint8],
        addresses: NDArray[np.uint64],
        times: NDArray[np.int64],
    ) -> NDArray[np.int32]:
        n = len(addresses)
        at, when = (
            arrays.flat(addresses, np.uint64, "addresses"),
            arrays.flat(times, np.int64, "times"),
        )
        if len(when) != n:
            raise ConfigError(f"{len(when)} times for {n} pages: one each")
        outcomes = np.zeros(n, np.int32)
        native.call(
            function,
            self._files,
            *first,
            self._rows("char[]", names, "names", (n, self._name_bytes)),
            self._rows("uint8_t[]", heads, "heads", (n, self._head_bytes)),
            self._ffi.from_buffer("uint64_t[]", at),
            self._ffi.from_buffer("int64_t[]", when),
            n,
            self._ffi.from_buffer("int32_t[]", outcomes),
        )
        return outcomes
