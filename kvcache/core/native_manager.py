"""The native manager as an object: made from a geometry, called, read from. No policy here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from kvcache.core import arrays, native
from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.records import KEYED_DTYPE, MOVE_DTYPE, UNLIMITED
from kvcache.core.values import sequence, shown

_POINTERS = {
    np.dtype(np.int32): "int32_t*",
    np.dtype(np.int64): "int64_t*",
    KEYED_DTYPE: "kvc_keyed*",
    MOVE_DTYPE: "kvc_move*",
}
_ITEMS = ("uint8_t", "int32_t", "uint32_t", "int64_t", "kvc_grant")
"""What arrays that C reads or fills are made of."""
_KINDS = {"full": "KVC_FULL", "span": "KVC_SPAN", "state": "KVC_STATE", "private": "KVC_PRIVATE"}


def most_slabs(geometry: Geometry) -> int:
    """Slabs of the largest arena: the pages of every size class must have numbers."""
    return int(native.load()[1].kvc_unlimited()) // max(geometry.pages_per_slab)


class NativeManager:
    """Owns the C object. A second thread inside it is refused with `MisuseError`."""

    def __init__(self, geometry: Geometry, slabs: int, **settings: int) -> None:
        if isinstance(slabs, bool) or not isinstance(slabs, int | np.integer):
            raise ConfigError(f"slabs is {shown(slabs)}: give a whole number, or UNLIMITED")
        if slabs != UNLIMITED and not 0 < slabs < 2**31:
            raise ConfigError(
                f"the arena has {slabs} slabs: it must be above 0 and below 2^31, or UNLIMITED;"
                " geometry.slabs_in(bytes) tells how many fit"
            )
        self.geometry = geometry
        self.unlimited = slabs == UNLIMITED
        """Whether pages are made as they are needed, without a bound."""
        self._ffi, self._lib = native.load()
        self._arrays = {name: self._ffi.typeof(f"{name}[]") for name in _ITEMS}
        self._native = self._create(int(slabs), settings)

    def _create(self, slabs: int, settings: dict[str, int]) -> Any:
        ffi, lib, geometry = self._ffi, self._lib, self.geometry
        groups = ffi.new("kvc_group[]", len(geometry.groups))
        for g, rules in enumerate(geometry.rules):
            groups[g].kind = getattr(lib, _KINDS[rules.kind])
            groups[g].block_tokens = geometry.block_tokens[g]
            groups[g].chunk_tokens = rules.chunk_tokens
            groups[g].lead_tokens = rules.lead_tokens
            groups[g].request_pages = rules.request_pages
            groups[g].lookahead_tokens = rules.lookahead_tokens
            groups[g].transient = rules.transient
            groups[g].size_class = geometry.class_of_group[g]
        counts = ffi.new("int32_t[]", list(geometry.pages_per_slab))
        config = native.new(
            "kvc_config*",
            {
                "n_groups": len(geometry.groups),
                "n_classes": len(geometry.pages_per_slab),
                "pages_per_slab": counts,
                "slabs": most_slabs(geometry) if slabs == UNLIMITED else slabs,
                "hash_unit_tokens": geometry.hash_unit_tokens,
                "grid_tokens": geometry.grid_tokens,
                **settings,
            },
        )
        out = ffi.new("kvc_manager**")
        native.call(lib.kvc_manager_new, config, groups, out)
        return ffi.gc(out[0], lib.kvc_manager_free)

    def _call(self, function: Any, *args: Any) -> int:
        return native.call(function, self._native, *args)

    def _struct(self, ctype: str, function: Any, *args: Any) -> Any:
        """The struct that a function writes to its last argument."""
        out = self._ffi.new(f"{ctype}*")
        self._call(function, *args, out)
        return out

    def _read(
        self, dtype: npt.DTypeLike, function: Any, *args: Any, room: int = 64
    ) -> NDArray[Any]:
        """The array that a function writes to its last three arguments: out, cap, n.

        room: for how many at first.
        """
        ffi, n = self._ffi, self._ffi.new("int64_t*")
        while True:
            out = np.empty(room, dtype)
            pointer = ffi.cast(_POINTERS[out.dtype], ffi.from_buffer(out))
            self._call(function, *args, pointer, room, n)
            if n[0] <= room:
                return out[: n[0]]
            room = int(n[0])

    def _buffer(self, ctype: str, array: NDArray[Any]) -> Any:
        return self._ffi.from_buffer(self._arrays[ctype], array)

    def _presence(
        self, maps: Sequence[NDArray[np.uint8]] | None, what: str
    ) -> tuple[Any, Any, Any]:
        """What a tier holds, a byte array for each group: `(pointers, lengths, what must live as long)`."""
        if maps is None:
            return self._ffi.NULL, self._ffi.NULL, None
        held = [arrays.flat(m, np.uint8, what) for m in sequence(maps, what)]
        groups = len(self.geometry.groups)
        if len(held) != groups:
            raise ConfigError(f"{what} has {len(held)} arrays for {groups} groups")
        buffers = [self._buffer("uint8_t", m) for m in held]
        lengths = self._ffi.new("int64_t[]", [len(m) for m in held])
        return self._ffi.new("uint8_t*[]", buffers), lengths, buffers
