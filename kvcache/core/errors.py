"""The exception tree. User mistakes are also `ValueError`, `KeyError`, `RuntimeError`, ...

`assert` is for internal invariants only. Each message says what happened, gives the numbers,
and names the setting to change.
"""

from __future__ import annotations


class KVCacheError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(KVCacheError, ValueError):
    """A setting that cannot work: a negative size, a grid that does not divide, a missing file."""


class InputError(KVCacheError, ValueError):
    """Bad data from outside: a broken trace line, a hostile model file, a token out of range."""


class CapacityError(KVCacheError, ValueError):
    """A request that can never fit, however long it waits."""


class HandleError(KVCacheError, KeyError):
    """An unknown or already closed request, load or step."""

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0]) if self.args else ""


class MisuseError(KVCacheError, RuntimeError):
    """Calls in an order that the contract forbids: a double free, a commit outside a step."""


class NativeError(KVCacheError, RuntimeError):
    """The native library is missing, of another ABI version, or ran out of memory."""


class MissingPackageError(KVCacheError, ModuleNotFoundError):
    """A package that only an extra installs is not there."""


class InvariantError(KVCacheError, RuntimeError):
    """`check()` found a broken internal invariant: a fault of this library."""
