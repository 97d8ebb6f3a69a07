"""The binding: the only module that touches cffi.

ABI mode: the C header is parsed at first use, the library found beside this file (in an editable
install: beside its build copy). No compiler is needed at run time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import Any, NoReturn

import cffi

import kvcache.core
from kvcache.core.errors import (
    CapacityError,
    ConfigError,
    HandleError,
    InvariantError,
    KVCacheError,
    MisuseError,
    NativeError,
)
from kvcache.core.values import shown, whole

ABI_VERSION = 1
LIBRARY = "libkvcache_core.so"
HEADER = "kvcache_core.h"

COPY_PATHS = ("avx512", "avx2", "memcpy")
"""What KVCACHE_COPY_PATH may name, the widest instructions first."""

NO_SPACE = 1
_PYTHON_NAMES = {"ns": "namespace"}
"""What callers know an argument of C as, where the names differ."""
_CDATA = cffi.FFI().CData
_TAKEN = (_CDATA, bytes, Integral)
"""What is passed on to C; numpy's whole numbers are integral."""
_SURE = frozenset({int, bytes, _CDATA, *_CDATA.__subclasses__()})
"""Types of nearly all of it: a check of one set costs less than one of each argument."""
_ERRORS: dict[int, type[KVCacheError]] = {
    -1: ConfigError,
    -2: HandleError,
    -3: MisuseError,
    -4: CapacityError,
    -5: NativeError,
    -6: InvariantError,
}


def find(name: str) -> Path:
    """Path of a file that the build put beside this module. `KVCACHE_NATIVE_DIR` overrides."""
    override = os.environ.get("KVCACHE_NATIVE_DIR")
    folders = [override] if override else list(kvcache.core.__path__)
    for folder in folders:
        path = Path(folder) / name
        if path.is_file():
            return path
    raise NativeError(
        f"{name} was not found in {folders}: build the package (`pip install .`), or point"
        " KVCACHE_NATIVE_DIR at the folder that holds it"
    )


def declarations(header: str) -> str:
    """The C header as cffi takes it: without comments and preprocessor lines."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


@cache
def load() -> tuple[Any, Any]:
    """`(ffi, lib)`, opened once.

    Raises:
        NativeError: it is missing, or of another version.
        ConfigError: `KVCACHE_COPY_PATH` is none of `COPY_PATHS`.
    """
    _check_copy_path()
    ffi, header, path = cffi.FFI(), find(HEADER), find(LIBRARY)
    try:
        ffi.cdef(declarations(header.read_text()))
    except (cffi.CDefError, cffi.FFIError, UnicodeDecodeError) as error:
        raise NativeError(f"{header} is damaged: build the package again ({error})") from error
    try:
        lib = ffi.dlopen(str(path))
        version = lib.kvc_abi_version()
    except (OSError, AttributeError) as error:
        raise NativeError(f"{path} cannot be loaded: {error}") from error
    if version != ABI_VERSION:
        raise NativeError(
            f"{path} has ABI version {version}, this package needs {ABI_VERSION}: build it again"
        )
    return ffi, lib


def _check_copy_path() -> None:
    """The core reads the variable itself, and takes what it does not know for nothing."""
    asked = os.environ.get("KVCACHE_COPY_PATH", "")
    if asked and asked not in COPY_PATHS:
        raise ConfigError(
            f"KVCACHE_COPY_PATH is {asked!r}: unset it, or give one of {', '.join(COPY_PATHS)}"
        )


def fail(status: int) -> NoReturn:
    """Raise the exception of a negative status, with the library's text."""
    ffi, lib = load()
    raise _ERRORS.get(status, NativeError)(ffi.string(lib.kvc_last_error()).decode())


def check(status: int) -> None:
    """Raise if it is negative. For calls of every step, with arguments that C can take for sure."""
    if status < 0:
        fail(status)


def call(function: Any, *args: Any) -> int:
    """The status, zero or above. A negative one, or arguments that C cannot take, raise."""
    try:
        if not _SURE.issuperset(map(type, args)):
            _check_taken(args)
        status: int = function(*args)
    except (OverflowError, TypeError) as error:
        _name_misfit(function, args)
        raise _misfit(error) from error
    if status < 0:
        fail(status)
    return status


def _check_taken(args: Sequence[Any]) -> None:
    """Cffi cuts whatever has `__int__`: a fraction, an array of one number."""
    for arg in args:
        if not isinstance(arg, _TAKEN):
            raise TypeError(f"{shown(arg)} is no whole number")


def new(ctype: str, fields: dict[str, Any] | list[list[Any]]) -> Any:
    """A C struct, or an array of them. Values that do not fit raise `ConfigError`."""
    try:
        return load()[0].new(ctype, fields)
    except (OverflowError, TypeError) as error:
        raise _misfit(error) from error


def _name_misfit(function: Any, args: Sequence[Any]) -> None:
    """`ConfigError` with the name of the first argument that is no number of its C type, if any."""
    ffi, lib = load()
    functions = (n for n in dir(lib) if n.startswith("kvc_"))
    name = next(n for n in functions if getattr(lib, n) == function)
    found = re.search(rf"\b{name}\((.*?)\);", declarations(find(HEADER).read_text()), re.DOTALL)
    assert found is not None
    names = re.findall(r"(\w+)(?=,|$)", found[1])
    for what, ctype, value in zip(names, ffi.typeof(function).args, args, strict=True):
        if ctype.kind == "primitive":
            signed, bits = not ctype.cname.startswith("u"), 8 * ffi.sizeof(ctype)
            most = (1 << bits - signed) - 1
            whole(value, _PYTHON_NAMES.get(what, what), least=-most - 1 if signed else 0, most=most)


def _misfit(error: Exception) -> ConfigError:
    return ConfigError(f"an argument has the wrong type or does not fit: {error}")
