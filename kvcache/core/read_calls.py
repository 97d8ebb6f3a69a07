"""The manager as an engine and its tools read it: tables, plans, keys, counts. Changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.core import values
from kvcache.core.hashing import NATIVE_NAMESPACE, block_keys
from kvcache.core.layout import Geometry
from kvcache.core.namespaces import Namespaces
from kvcache.core.native_manager import NativeManager
from kvcache.core.records import (
    ArenaStats,
    ClassStats,
    GroupStats,
    ManagerStats,
    RequestInfo,
    StatePlan,
)

_NO_DIGESTS = np.empty((0, 32), np.uint8)
_NO_DIGESTS.flags.writeable = False


class ReadCalls(NativeManager):
    """Everything that may be asked at any time."""

    _namespaces: Namespaces

    def __init__(self, geometry: Geometry, slabs: int, **settings: Any) -> None:
        super().__init__(geometry, slabs, **settings)
        self._chains: dict[int, tuple[NDArray[np.uint8], int]] = {}
        """Links that were read, with room for more, and how many there are, by request."""

    @property
    def namespaces(self) -> list[bytes]:
        """Namespace digests by number: zeros for native keys."""
        return self._namespaces.outside

    # ---- what the engine reads -----------------------------------------------------------------

    def info(self, handle: int) -> RequestInfo:
        """Counts of one request."""
        out = self._struct("kvc_request_info", self._lib.kvc_info, handle)
        return RequestInfo(
            out.n_tokens,
            out.n_prompt,
            out.computed,
            out.committed,
            out.granted,
            out.n_units,
            ("waiting", "running", "loading")[out.state],
            self.namespaces[out.ns],
            out.load,
        )

    def block_table(self, handle: int, group: int, first: int = 0) -> NDArray[np.int32]:
        """Pages of a group from block `first` on, a copy.

        -1: a span's block that was given up, or one of a transient group that never had a page.
        """
        return self._read(np.int32, self._lib.kvc_table, handle, group, first)

    def draft_holes(self, handle: int, group: int) -> list[int]:
        """Blocks of a draft group's hit that hold no content: zero or mask them."""
        return [int(b) for b in self._read(np.int64, self._lib.kvc_holes, handle, group)]

    def state_plan(self, handle: int, group: int) -> StatePlan:
        """The current grant's plan for a state group."""
        source, n, cap = self._ffi.new("int32_t*"), self._ffi.new("int64_t*"), 16
        while True:
            positions, pages = np.empty(cap, np.int64), np.empty(cap, np.int32)
            self._call(
                self._lib.kvc_state_plan,
                handle,
                group,
                source,
                self._buffer("int64_t", positions),
                self._buffer("int32_t", pages),
                cap,
                n,
            )
            if n[0] <= cap:
                return StatePlan(source[0], positions[: n[0]], pages[: n[0]])
            cap = int(n[0])

    def digests(self, handle: int) -> NDArray[np.uint8]:
        """The request's chain, `[units, 32]`, read-only.

        What is new since the last call is copied, to where there is room for as much again: a chain
        that is read as it grows costs its length, and memory for twice of it.
        """
        number = values.whole(handle, "handle")
        rows, known = self._chains.get(number, (_NO_DIGESTS, 0))
        n = self._ffi.new("int64_t*")
        while True:
            room = rows[known:]
            self._call(
                self._lib.kvc_digests, number, known, self._buffer("uint8_t", room), len(room), n
            )
            if n[0] <= len(room):
                break
            more = np.empty((max(known + n[0], 2 * known), 32), np.uint8)
            more[:known] = rows[:known]
            rows = more
        self._chains[number] = rows, known + n[0]
        chain = rows[: known + n[0]]
        chain.flags.writeable = False
        return chain

    def group_digests(self, handle: int) -> list[NDArray[np.uint8]]:
        """Keys of each group, one row per block or grid point; views into `digests` where it can."""
        chain, geometry = self.digests(handle), self.geometry
        return [
            block_keys(chain, block, rules.lookahead_tokens, geometry.hash_unit_tokens)
            for block, rules in zip(geometry.block_tokens, geometry.rules, strict=True)
        ]

    # ---- counts and invariants -----------------------------------------------------------------

    def stats(self) -> ManagerStats:
        """Open requests, steps, loads, pins."""
        out = self._struct("kvc_manager_stats", self._lib.kvc_manager_get_stats)
        return ManagerStats(
            out.open_requests,
            out.open_steps,
            out.open_loads,
            out.pinned,
            out.keyed_dropped,
            out.events_dropped,
            bool(out.frozen),
        )

    def arena_stats(self) -> ArenaStats:
        """Slabs, and the pages of each size class."""
        out = self._struct("kvc_arena_stats", self._lib.kvc_get_arena_stats)
        classes = []
        for size_class in range(len(self.geometry.pages_per_slab)):
            c = self._struct("kvc_class_stats", self._lib.kvc_get_class_stats, size_class)
            classes.append(ClassStats(c.slabs, c.free, c.cached, c.held))
        return ArenaStats(
            out.slabs,
            out.created,
            out.empty,
            out.moved_pages,
            out.reclaimed_slabs,
            out.evictions,
            tuple(classes),
        )

    def group_stats(self, group: int) -> GroupStats:
        """Keys of one group."""
        out = self._struct("kvc_group_stats", self._lib.kvc_get_group_stats, group)
        return GroupStats(out.keyed, out.evictions)

    def find_key(self, group: int, digest: bytes, *, namespace: bytes = NATIVE_NAMESPACE) -> int:
        """Page that holds the key and may be read now, or -1. For tests and tools."""
        values.digest(digest, "digest")
        page = self._ffi.new("int32_t*")
        for number in self._namespaces.of_digest(values.digest(namespace, "namespace")):
            self._call(self._lib.kvc_has_key, group, number, digest, page)
            if page[0] >= 0:
                return int(page[0])
        return -1

    def check(self) -> None:
        """Recount everything; raise `InvariantError` on a difference. O(pages)."""
        self._call(self._lib.kvc_check)
