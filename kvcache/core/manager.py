"""The block manager: which pages hold which prefix, for every group of a model at once.

Life of a request (one thread; the engine's scheduler):

    open -> lookup -> allocate -> [load ... end_load] -> { commit } per step -> finish
                ^                                           |
                +--------------- preempt <------------------+        abort at any time

`begin_step` comes before the step's `commit` calls (before its lookups too, so that twins in one
batch see each other), `end_step` when the step's writes have finished. Keys that an open step
writes are pending: never a hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from kvcache.core import arrays, native
from kvcache.core.errors import ConfigError
from kvcache.core.hashing import NATIVE_NAMESPACE, Fingerprint, as_tokens, root_digest
from kvcache.core.layout import Geometry
from kvcache.core.records import (
    KEYED_DTYPE,
    LOSS_CAUSES,
    UNLIMITED,
    Grant,
    Hit,
    ManagerStats,
    PoolStats,
    RequestInfo,
    StatePlan,
)
from kvcache.core.retain import RetentionPolicy, TurnShape
from kvcache.core.specs import FullAttention

_POINTERS = {
    np.dtype(np.int32): "int32_t*",
    np.dtype(np.int64): "int64_t*",
    KEYED_DTYPE: "kvc_keyed*",
}


class Manager:
    """Owns the pages of every group; hands out page numbers, never bytes.

    Args:
        geometry: the groups; the index of a group is its id.
        pages: pages of each group's pool, or `UNLIMITED`.
        retention: which recurrent states to keep.
        fingerprint: what is hashed into every key; name the weights wherever keys leave this manager
            (a tier that outlives it, or is shared).
        max_open_steps: steps that may be in flight at once.
        journal: whether `take_keyed` will be read (64 bytes for each page that gets a key).
        seed: of the index's hash function.

    Not thread-safe: two threads in it at once raise `MisuseError`. All calls are O(new tokens)
    unless they say otherwise; none calls Python per block.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        pages: Sequence[int],
        retention: RetentionPolicy,
        fingerprint: Fingerprint | None = None,
        max_open_steps: int = 2,
        journal: bool = True,
        seed: int = 0,
    ) -> None:
        pages = [int(count) for count in arrays.flat(pages, np.int64, "pages")]
        if len(pages) != len(geometry.groups):
            raise ConfigError(
                f"pages has {len(pages)} numbers for {len(geometry.groups)} groups: give one each"
            )
        for group, count in zip(geometry.groups, pages, strict=True):
            if count != UNLIMITED and not 0 < count < 2**31:
                raise ConfigError(
                    f"pages of group {group.name!r} is {count}: it must be above 0 and below 2^31,"
                    " or UNLIMITED"
                )
        if max_open_steps < 1:
            raise ConfigError(f"max_open_steps is {max_open_steps}: it must be above 0")
        self.geometry = geometry
        self.retention = retention
        self.fingerprint = fingerprint or Fingerprint()
        self.namespaces: list[bytes] = [NATIVE_NAMESPACE]
        """Namespace digests by number; number 0 is native keys."""
        self._numbers = {NATIVE_NAMESPACE: 0}
        self._roots: dict[tuple[str, str], bytes] = {}
        self._shapes: dict[int, TurnShape] = {}
        self._chains: dict[int, NDArray[np.uint8]] = {}
        self._ffi, self._lib = native.load()
        self._native = self._create(pages, max_open_steps, journal=journal, seed=seed)

    def _create(
        self, pages: Sequence[int], max_open_steps: int, *, journal: bool, seed: int
    ) -> Any:
        ffi, lib = self._ffi, self._lib
        groups = ffi.new("kvc_group[]", len(pages))
        for i, spec in enumerate(self.geometry.groups):
            groups[i].kind = lib.KVC_FULL if isinstance(spec, FullAttention) else lib.KVC_RECURRENT
            groups[i].block_tokens = self.geometry.block_tokens[i]
            groups[i].pages = lib.kvc_unlimited() if pages[i] == UNLIMITED else pages[i]
        config = ffi.new(
            "kvc_config*",
            {
                "n_groups": len(pages),
                "hash_unit_tokens": self.geometry.hash_unit_tokens,
                "grid_tokens": self.geometry.grid_tokens,
                "max_open_steps": max_open_steps,
                "journal": journal,
                "seed": seed & (2**64 - 1),
            },
        )
        out = ffi.new("kvc_manager**")
        native.call(lib.kvc_manager_new, config, groups, out)
        return ffi.gc(out[0], lib.kvc_manager_free)

    # ---- opening and closing -------------------------------------------------------------------

    def open(
        self,
        tokens: Sequence[int] | NDArray[np.integer],
        *,
        max_tokens: int | None = None,
        salt: str = "",
        lora: str = "",
        boundaries: Sequence[int] = (),
    ) -> int:
        """Admit a request; returns its handle. The tokens are copied and hashed, O(tokens).

        Args:
            tokens: the prompt, one int32 array.
            max_tokens: most tokens the request may reach, prompt and output together.
            salt: requests share prefixes only under an equal salt.
            lora: name of the adapter, part of every key.
            boundaries: positions where a prefix is known to be shared (end of the system prompt,
                of a message): states are kept there.

        Raises:
            CapacityError: `max_tokens` needs more pages than a pool has.
        """
        array = as_tokens(tokens)
        ffi = self._ffi
        return self._open(
            {
                "ns": 0,
                "root": ffi.from_buffer("uint8_t[]", self._root(salt, lora)),
                "tokens": ffi.from_buffer("int32_t[]", array),
                "n_tokens": len(array),
            },
            len(array),
            max_tokens,
            boundaries,
        )

    def open_foreign(
        self,
        digests: NDArray[np.uint8],
        *,
        prompt_tokens: int,
        max_tokens: int | None = None,
        salt: str = "",
        lora: str = "",
        boundaries: Sequence[int] = (),
    ) -> int:
        """Admit a request whose keys come from outside (an engine's own hashes, a trace).

        Args:
            digests: `[n, 32]` opaque keys, one for each full hash unit of the prompt. They are
                never rehashed and never equal to a native key: the namespace is the digest of the
                root fields.
            prompt_tokens: length of the prompt; `n` must be `prompt_tokens // hash_unit_tokens`.
        """
        keys = np.ascontiguousarray(arrays.keys(digests, "digests"))
        return self._open(
            {
                "ns": self.namespace_number(self._root(salt, lora)),
                "root": self._ffi.NULL,
                "tokens": self._ffi.NULL,
                "n_tokens": prompt_tokens,
                "digests": self._ffi.from_buffer("uint8_t[]", keys),
                "n_digests": len(keys),
            },
            prompt_tokens,
            max_tokens,
            boundaries,
        )

    def _open(
        self,
        fields: dict[str, Any],
        prompt_tokens: int,
        max_tokens: int | None,
        boundaries: Sequence[int],
    ) -> int:
        marks = tuple(int(b) for b in arrays.flat(boundaries, np.int64, "boundaries"))
        shape = TurnShape(prompt_tokens, self.geometry.grid_tokens, marks)
        if any(b < 0 or b > prompt_tokens for b in shape.boundaries):
            raise ConfigError(
                f"boundaries {list(boundaries)} are not all inside the prompt of {prompt_tokens}"
                " tokens"
            )
        fields["max_tokens"] = prompt_tokens if max_tokens is None else max_tokens
        args = native.new("kvc_open_args*", fields)
        out = self._ffi.new("int64_t*")
        self._call(self._lib.kvc_open, args, out)
        handle = int(out[0])
        self._shapes[handle] = shape
        try:
            self._retain(handle, shape)
        except BaseException:
            self.abort(handle)
            raise
        return handle

    def _root(self, salt: str, lora: str) -> bytes:
        root = self._roots.get((salt, lora))
        if root is None:
            root = root_digest(
                self.fingerprint,
                hash_unit_tokens=self.geometry.hash_unit_tokens,
                salt=salt,
                lora=lora,
            )
            if len(self._roots) < 4096:
                self._roots[salt, lora] = root
        return root

    def namespace_number(self, namespace: bytes) -> int:
        """The number under which foreign keys of a namespace are indexed."""
        number = self._numbers.get(namespace)
        if number is None:
            number = self._numbers[namespace] = len(self.namespaces)
            self.namespaces.append(namespace)
        return number

    def extend(self, handle: int, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Append generated tokens. Hashes what became full."""
        array = as_tokens(tokens)
        buffer = self._ffi.from_buffer("int32_t[]", array)
        self._call(self._lib.kvc_extend, handle, buffer, len(array))

    def extend_foreign(self, handle: int, count: int) -> None:
        """Append `count` tokens without keys to a foreign request."""
        self._call(self._lib.kvc_extend, handle, self._ffi.NULL, count)

    def finish(self, handle: int) -> None:
        """Close the request. Its keys stay, its state of the last grid point gets one.

        Call it after the `end_step` of its last tokens: what a step still open writes for it gets
        no key.
        """
        self._call(self._lib.kvc_finish, handle)
        self._forget(handle)

    def abort(self, handle: int) -> None:
        """Close the request at any moment; what an open step writes for it leaves no key."""
        self._call(self._lib.kvc_abort, handle)
        self._forget(handle)

    def _forget(self, handle: int) -> None:
        self._shapes.pop(handle, None)
        self._chains.pop(handle, None)

    def preempt(self, handle: int) -> None:
        """Take all pages from the request; it waits, and is looked up again later."""
        self._call(self._lib.kvc_preempt, handle)

    # ---- lookup and allocation -----------------------------------------------------------------

    def lookup(self, handle: int, present: Sequence[NDArray[np.uint8]] | None = None) -> Hit:
        """Longest prefix that every group can serve, in one native call. Changes no page.

        Args:
            present: what a tier holds, for each group a byte array: attention one per block,
                recurrent one per grid point (index i: the state after `(i + 1) * grid` tokens).

        Raises:
            MisuseError: the request holds pages.
        """
        ffi = self._ffi
        pointers, lengths = ffi.NULL, ffi.NULL
        if present is not None:
            if len(present) != len(self.geometry.groups):
                raise ConfigError(
                    f"present has {len(present)} arrays for {len(self.geometry.groups)} groups"
                )
            maps = [arrays.flat(p, np.uint8, "present") for p in present]
            buffers = [ffi.from_buffer("uint8_t[]", m) for m in maps]
            pointers = ffi.new("uint8_t*[]", buffers)
            lengths = ffi.new("int64_t[]", [len(m) for m in maps])
        out = ffi.new("kvc_hit*")
        self._call(self._lib.kvc_lookup, handle, pointers, lengths, out)
        if out.junction:
            shape = self._shapes[handle]
            if out.junction not in shape.junctions:
                shape = shape._replace(junctions=(*shape.junctions, int(out.junction)))
                self._retain(handle, shape)
                self._shapes[handle] = shape
        lost = dict(zip(LOSS_CAUSES, list(out.lost), strict=True))
        return Hit(out.hit_tokens, out.device_tokens, out.pending_tokens, out.junction, lost)

    def _retain(self, handle: int, shape: TurnShape) -> None:
        plan = self.retention.plan(shape)
        if len(plan.positions) != len(plan.kept):
            raise ConfigError(
                f"{type(self.retention).__name__}.plan gave {len(plan.positions)} positions and"
                f" {len(plan.kept)} kept flags: one each"
            )
        positions = arrays.flat(plan.positions, np.int64, "the policy's positions")
        kept = arrays.flat(plan.kept, np.uint8, "the policy's kept flags")
        self._call(
            self._lib.kvc_retain,
            handle,
            plan.interval_tokens,
            self._ffi.from_buffer("int64_t[]", positions),
            self._ffi.from_buffer("uint8_t[]", kept),
            len(positions),
        )

    def stops(self, handle: int, start: int, end: int) -> list[int]:
        """Positions in (start, end] where a state must be snapshotted, ascending."""
        found = self._read(np.int64, self._lib.kvc_stops, handle, start, end)
        return [int(position) for position in found]

    def need(self, handle: int, tokens: int) -> list[int]:
        """New pages of each group that `allocate(handle, tokens)` would take."""
        out = self._ffi.new("int64_t[]", len(self.geometry.groups))
        self._call(self._lib.kvc_need, handle, tokens, out)
        return [int(count) for count in out]

    def allocate(self, handle: int, tokens: int) -> Grant | None:
        """Pages for the next `tokens` tokens; None: no space now, nothing changed.

        The grant may end sooner (`Grant.end`): where more states would have to be kept on the way
        than the pool has pages. So a request that is alone always gets on.

        The first call adopts the hit of the last `lookup` (its pages gain a reference before
        anything is evicted). If part of the hit lies in a tier, the grant covers no tokens but
        names a load: fill `load_items(load)`, then `end_load`.
        """
        out = self._ffi.new("kvc_grant*")
        status = self._call(self._lib.kvc_allocate, handle, tokens, out)
        if status == native.NO_SPACE:
            return None
        return Grant(out.hit_tokens, out.start, out.end, out.load, out.n_loads)

    # ---- steps ---------------------------------------------------------------------------------

    def begin_step(self) -> int:
        """Open a step. At most `max_open_steps` are open; they end in order."""
        out = self._ffi.new("int64_t*")
        self._call(self._lib.kvc_begin_step, out)
        return int(out[0])

    def commit(self, handle: int, upto: int) -> None:
        """The newest open step writes the request's tokens up to `upto`, inside its grant.

        Tokens that are sampled but not yet told by `extend` may be committed: their blocks get
        keys when they are told. That both agree is the caller's promise.
        """
        self._call(self._lib.kvc_commit, handle, upto)

    def end_step(self, step: int) -> None:
        """The step's writes are done: its keys become hits, pages freed under it are free."""
        self._call(self._lib.kvc_end_step, step)

    # ---- what the engine reads -----------------------------------------------------------------

    def info(self, handle: int) -> RequestInfo:
        """Counts of one request."""
        out = self._ffi.new("kvc_request_info*")
        self._call(self._lib.kvc_info, handle, out)
        return RequestInfo(
            out.n_tokens,
            out.n_prompt,
            out.computed,
            out.committed,
            out.granted,
            out.n_units,
            ("waiting", "running", "loading")[out.state],
            self.namespaces[out.ns],
        )

    def block_table(self, handle: int, group: int, first: int = 0) -> NDArray[np.int32]:
        """Pages of an attention group from block `first` on, a copy."""
        return self._read(np.int32, self._lib.kvc_table, handle, group, first)

    def state_plan(self, handle: int, group: int) -> StatePlan:
        """The current grant's plan for a recurrent group."""
        ffi, source, n, cap = self._ffi, self._ffi.new("int32_t*"), self._ffi.new("int64_t*"), 16
        while True:
            positions, pages = np.empty(cap, np.int64), np.empty(cap, np.int32)
            self._call(
                self._lib.kvc_state_plan,
                handle,
                group,
                source,
                ffi.from_buffer("int64_t[]", positions),
                ffi.from_buffer("int32_t[]", pages),
                cap,
                n,
            )
            if n[0] <= cap:
                return StatePlan(source[0], positions[: n[0]], pages[: n[0]])
            cap = int(n[0])

    def digests(self, handle: int) -> NDArray[np.uint8]:
        """The request's chain, `[units, 32]`, read-only. Copied once, and again when it grew."""
        pointer, n = self._ffi.new("uint8_t const**"), self._ffi.new("int64_t*")
        self._call(self._lib.kvc_digests, handle, pointer, n)
        chain = self._chains.get(handle)
        if chain is None or len(chain) < n[0]:
            raw = bytes(self._ffi.buffer(pointer[0], n[0] * 32)) if n[0] else b""
            chain = self._chains[handle] = np.frombuffer(raw, np.uint8).reshape(-1, 32)
        return chain

    def group_digests(self, handle: int) -> list[NDArray[np.uint8]]:
        """Keys of each group: views into `digests`, one row per block or grid point."""
        digests, unit = self.digests(handle), self.geometry.hash_unit_tokens
        return [digests[b // unit - 1 :: b // unit] for b in self.geometry.block_tokens]

    # ---- tiers ---------------------------------------------------------------------------------

    def load_items(self, load: int) -> NDArray[np.void]:
        """Pages that a load must fill, with their keys: `[n]` of `KEYED_DTYPE`."""
        return self._read(KEYED_DTYPE, self._lib.kvc_load_items, load)

    def end_load(self, load: int, ok: NDArray[np.uint8]) -> None:
        """The load is over; `ok[i]` tells whether item i holds the right bytes.

        All good: the request runs on from its hit. Otherwise it waits again without pages; a new
        lookup finds the good part on the device.
        """
        flags = arrays.flat(ok, np.uint8, "ok")
        buffer = self._ffi.from_buffer("uint8_t[]", flags)
        self._call(self._lib.kvc_end_load, load, buffer, len(flags))

    def abandon_load(self, load: int) -> None:
        """The load is late: its request waits again, its pages stay out of use until `end_load`."""
        self._call(self._lib.kvc_abandon_load, load)

    def take_keyed(self) -> NDArray[np.void]:
        """Pages that got their key since the last call, `[n]` of `KEYED_DTYPE`."""
        return self._read(KEYED_DTYPE, self._lib.kvc_take_keyed)

    def pin(self, items: NDArray[np.void]) -> NDArray[np.uint8]:
        """One reference on each page that still has the given key; 0 in the result: it has not."""
        rows = arrays.flat(items, KEYED_DTYPE, "items")
        out = np.zeros(len(rows), np.uint8)
        pointer = self._ffi.cast("kvc_keyed*", self._ffi.from_buffer(rows))
        self._call(self._lib.kvc_pin, pointer, len(rows), self._ffi.from_buffer("uint8_t[]", out))
        return out

    def unpin(self, group: int, pages: NDArray[np.int32]) -> None:
        """End references that `pin` gave."""
        rows = arrays.flat(pages, np.int32, "pages")
        buffer = self._ffi.from_buffer("int32_t[]", rows)
        self._call(self._lib.kvc_unpin, group, buffer, len(rows))

    # ---- counts and invariants -----------------------------------------------------------------

    def stats(self) -> ManagerStats:
        """Open requests, steps, loads, pins."""
        out = self._ffi.new("kvc_manager_stats*")
        self._call(self._lib.kvc_manager_get_stats, out)
        return ManagerStats(
            out.open_requests, out.open_steps, out.open_loads, out.pinned, out.keyed_dropped
        )

    def pool_stats(self, group: int) -> PoolStats:
        """Pages of one group."""
        out = self._ffi.new("kvc_pool_stats*")
        self._call(self._lib.kvc_group_stats, group, out)
        return PoolStats(
            out.capacity, out.created, out.free, out.cached, out.held, out.keyed, out.evictions
        )

    def find_key(self, group: int, digest: bytes, *, namespace: bytes | None = None) -> int:
        """The page that a lookup would find under a key, or -1."""
        number = 0 if namespace is None else self._numbers.get(namespace)
        if number is None:
            return -1
        if len(digest) != 32:
            raise ConfigError(f"digest has {len(digest)} bytes: expected 32")
        page = self._ffi.new("int32_t*")
        self._call(self._lib.kvc_has_key, group, number, digest, page)
        return int(page[0])

    def clear(self) -> None:
        """Forget every key. `MisuseError` while a request holds pages, a step or a load is open."""
        self._call(self._lib.kvc_clear)

    def check(self) -> None:
        """Recount everything; raise `InvariantError` on a difference. O(pages)."""
        self._call(self._lib.kvc_check)

    # ---- calling the library -------------------------------------------------------------------

    def _call(self, function: Any, *args: Any) -> int:
        return native.call(function, self._native, *args)

    def _read(self, dtype: npt.DTypeLike, function: Any, *args: Any) -> NDArray[Any]:
        """The array that a function writes to its last three arguments: out, cap, n."""
        ffi, n, cap = self._ffi, self._ffi.new("int64_t*"), 64
        while True:
            out = np.empty(cap, dtype)
            pointer = ffi.cast(_POINTERS[out.dtype], ffi.from_buffer(out))
            self._call(function, *args, pointer, cap, n)
            if n[0] <= cap:
                return out[: n[0]]
            cap = int(n[0])
