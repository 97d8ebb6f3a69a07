"""Host memory made ready: page tables filled, placed on a NUMA node, kept from being swapped.

Each call is native, without the GIL, and raises the system's `OSError` where it cannot be done.
"""

from __future__ import annotations

import os

from kvcache.core import native


def populate(address: int, size_bytes: int) -> None:
    """Memory behind every page of the range, beside others that use it. O(bytes): 0.1 to 0.5 s a GiB."""
    _call("kvc_memory_populate", address, size_bytes)


def prefer_node(address: int, size_bytes: int, node: int) -> None:
    """What the range gets from now on comes from this NUMA node, as long as it has some.

    Not bound to it: a node that is full must not end the process (docs/tiers.md).
    """
    _call("kvc_memory_prefer_node", address, size_bytes, node)


def lock(address: int, size_bytes: int) -> None:
    """The range stays in memory, also under pressure. Counts against RLIMIT_MEMLOCK."""
    _call("kvc_memory_lock", address, size_bytes)


def _call(name: str, *args: int) -> None:
    ffi, lib = native.load()
    error = ffi.new("int32_t*")
    native.call(getattr(lib, name), *args, error)
    if error[0]:
        raise OSError(error[0], os.strerror(error[0]))
