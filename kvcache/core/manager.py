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
from numpy.typing import NDArray

from kvcache.core import arrays, native
from kvcache.core.errors import ConfigError
from kvcache.core.event_calls import request_label
from kvcache.core.events.labels import RequestLabel
from kvcache.core.explain_calls import ExplainCalls
from kvcache.core.hashing import Fingerprint, as_tokens
from kvcache.core.layout import Geometry, require_geometry
from kvcache.core.media import Media, PromptEmbeddings, extras
from kvcache.core.namespaces import Namespaces
from kvcache.core.records import (
    BLOCKAGES,
    LOSS_CAUSES,
    Grant,
    Hit,
)
from kvcache.core.retain import PlanArrays, RetentionPolicy, TurnShape, plan_of, require_policy
from kvcache.core.values import flag, index_seed, sequence, shown, whole


class Manager(ExplainCalls):
    """Owns the pages of every group; hands out page numbers, never bytes.

    Page numbers count within a size class (`geometry.class_of_group`): page p begins at byte
    `p * geometry.stride_bytes[c]` of the arena, which has `slabs * geometry.slab_bytes` bytes.

    Args:
        geometry: the groups; the index of a group is its id.
        slabs: size of the arena, see `Geometry.slabs_in`; or `UNLIMITED`.
        retention: what the groups keep that are not kept whole (spans, states).
        fingerprint: what is hashed into every key; name the weights wherever keys leave this manager
            (a tier that outlives it, or is shared).
        max_open_steps: steps that may be in flight at once.
        movable: the engine does the copies of `take_moves`; without them a size class that takes
            memory from another one costs it more of its cache.
        journal: whether `take_keyed` will be read (64 bytes for each page that gets a key).
        events: whether `take_events` will be read.
        history_tokens: tokens of closed requests to remember, so that `explain` can compare with them
            (4 bytes a token, 32 a hash unit; at most 4,096 requests); None: an eighth of what the
            arena holds, from 262,144 to 16,777,216; 0: none.
        seed: of the index's hash function; None: a random one, so that nobody can choose foreign
            keys that collide in it. No hit depends on it.

    Not thread-safe: two threads in it at once raise `MisuseError`. All calls are O(new tokens)
    unless they say otherwise; none calls Python per block.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        slabs: int,
        retention: RetentionPolicy,
        fingerprint: Fingerprint | None = None,
        max_open_steps: int = 2,
        movable: bool = False,
        journal: bool = True,
        events: bool = False,
        history_tokens: int | None = None,
        seed: int | None = None,
    ) -> None:
        require_geometry(geometry)
        if fingerprint is not None and not isinstance(fingerprint, Fingerprint):
            raise ConfigError(f"fingerprint is {shown(fingerprint)}: give a Fingerprint")
        names = tuple(g.name for g in geometry.groups)
        require_policy(retention, geometry.grid_tokens, names)
        super().__init__(
            geometry,
            slabs,
            max_open_steps=whole(max_open_steps, "max_open_steps", least=1, most=2**31 - 1),
            movable=flag(movable, "movable"),
            journal=flag(journal, "journal"),
            events=flag(events, "events"),
            history_tokens=history_tokens,
            seed=index_seed(seed, "seed"),
        )
        self.retention = retention
        self._namespaces = Namespaces(
            fingerprint or Fingerprint(), geometry.hash_unit_tokens, self._namespace_use
        )
        self._group_names = names
        self._shapes: dict[int, TurnShape] = {}
        self._junctions: dict[int, tuple[int, ...]] = {}
        """Of preempted requests: what they kept before."""

    # ---- opening and closing -------------------------------------------------------------------

    def open(
        self,
        tokens: Sequence[int] | NDArray[np.integer],
        *,
        max_tokens: int | None = None,
        salt: str = "",
        lora: str = "",
        media: Sequence[Media] = (),
        embeddings: Sequence[PromptEmbeddings] = (),
        session: str = "",
        boundaries: Sequence[int] = (),
    ) -> int:
        """Admit a request; returns its handle. The tokens are copied and hashed, O(tokens).

        Args:
            tokens: the prompt, one int32 array.
            max_tokens: most tokens the request may reach, prompt and output together.
            salt: requests share prefixes only under an equal salt.
            lora: name of the adapter, part of every key; see `set_lora_version`.
            media, embeddings: what stands in the prompt beside tokens; part of the keys of the
                blocks that it covers. Items must not overlap.
            session: told in events and explanations.
            boundaries: positions where a prefix is known to be shared (end of the system prompt,
                of a message): what a hit there needs is kept.

        Raises:
            CapacityError: `max_tokens` needs more memory than the arena has.
        """
        array = as_tokens(tokens)
        shape = self._shape(len(array), boundaries)
        spans = sequence(media, "media", of=Media)
        items = extras(spans, embeddings, len(array), self.geometry.hash_unit_tokens)
        return self._open(
            {
                "tokens": self._buffer("int32_t", array),
                "n_tokens": len(array),
                "media": native.new("kvc_media[]", [list(item) for item in items]),
                "n_media": len(items),
            },
            shape,
            max_tokens,
            request_label(session, spans),
            salt=salt,
            lora=lora,
        )

    def open_foreign(
        self,
        digests: NDArray[np.uint8],
        *,
        prompt_tokens: int,
        max_tokens: int | None = None,
        salt: str = "",
        lora: str = "",
        session: str = "",
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
        length = whole(prompt_tokens, "prompt_tokens")
        return self._open(
            {
                "n_tokens": length,
                "digests": self._buffer("uint8_t", keys),
                "n_digests": len(keys),
            },
            self._shape(length, boundaries),
            max_tokens,
            request_label(session, ()),
            salt=salt,
            lora=lora,
        )

    def _open(
        self,
        fields: dict[str, Any],
        shape: TurnShape,
        max_tokens: int | None,
        label: RequestLabel,
        *,
        salt: str,
        lora: str,
    ) -> int:
        longest = shape.prompt_tokens if max_tokens is None else whole(max_tokens, "max_tokens")
        plan, foreign = plan_of(self.retention, shape), "digests" in fields
        number = self._namespaces.number(salt=salt, lora=lora, foreign=foreign)
        root = self._namespaces.entries[number].root
        fields |= {
            "ns": number,
            "max_tokens": longest,
            "root": self._ffi.from_buffer("uint8_t[]", root),
            "session": self._session_number(label.session_id or ""),
            "intervals": self._buffer("int64_t", plan.intervals),
            "positions": self._buffer("int64_t", plan.positions),
            "declared": self._buffer("uint8_t", plan.declared),
            "n_positions": len(plan.positions),
        }
        try:
            handle = self._admit(fields)
        except BaseException:
            self._namespaces.take_back(number)
            raise
        try:
            self._shapes[handle] = shape
            self._label(handle, label)
        except MemoryError:  # nobody knows the handle
            self.abort(handle)
            raise
        return handle

    def _admit(self, fields: dict[str, Any]) -> int:
        out = self._ffi.new("int64_t*")
        self._call(self._lib.kvc_open, native.new("kvc_open_args*", fields), out)
        return int(out[0])

    def _shape(self, prompt_tokens: int, boundaries: Sequence[int]) -> TurnShape:
        if prompt_tokens < 1:
            raise ConfigError(f"the prompt has {prompt_tokens} tokens: it must have one at least")
        marks = tuple(arrays.flat(boundaries, np.int64, "boundaries").tolist())
        if marks and not 0 <= min(marks) <= max(marks) <= prompt_tokens:
            raise ConfigError(
                f"boundaries {shown(list(marks))} are not all inside the prompt of"
                f" {prompt_tokens} tokens"
            )
        return TurnShape(prompt_tokens, self.geometry.grid_tokens, marks, (), self._group_names)

    def extend(self, handle: int, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Append generated tokens. Hashes what became full."""
        array = as_tokens(tokens)
        self._call(self._lib.kvc_extend, handle, self._buffer("int32_t", array), len(array))

    def extend_foreign(self, handle: int, count: int) -> None:
        """Append `count` tokens without keys to a foreign request."""
        self._call(self._lib.kvc_extend, handle, self._ffi.NULL, whole(count, "count"))

    def finish(self, handle: int) -> None:
        """Close the request. Its keys stay; what a hit at its last grid point needs gets some.

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
        self._junctions.pop(handle, None)
        self._chains.pop(handle, None)
        self._label_closed(handle)

    def preempt(self, handle: int) -> None:
        """Take all pages from the request; it waits, and is looked up again later."""
        self._call(self._lib.kvc_preempt, handle)
        if junctions := self._shapes[handle].junctions:
            self._junctions[handle] = tuple(junctions)

    # ---- lookup and allocation -----------------------------------------------------------------

    def lookup(self, handle: int, present: Sequence[NDArray[np.uint8]] | None = None) -> Hit:
        """Longest prefix that every group can serve, in one native call. Changes no page.

        May be repeated in every step: it goes on where the last one was. While it finds the same,
        `lost` is what the first lookup that found it has told.

        Args:
            present: what a tier holds, for each group a byte array: one per block; for a state
                one per grid point (index i: the state after `(i + 1) * grid` tokens).

        Raises:
            MisuseError: the request holds pages.
        """
        pointers, lengths, _keep = self._presence(present, "present")
        out = self._struct("kvc_hit", self._lib.kvc_lookup, handle, pointers, lengths)
        self._note_junction(handle, int(out.junction))
        lost = dict(zip(LOSS_CAUSES, list(out.lost), strict=True))
        return Hit(out.hit_tokens, out.device_tokens, out.pending_tokens, out.junction, lost)

    def _note_junction(self, handle: int, junction: int) -> None:
        """What the last lookup says, in place of what those before it said since the last start."""
        shape, junctions = self._shapes[handle], self._junctions.get(handle, ())
        if junction and junction not in junctions:
            junctions = (*junctions, junction)
        if junctions != shape.junctions:
            shape = shape._replace(junctions=junctions)
            self._retain(handle, plan_of(self.retention, shape))
            self._shapes[handle] = shape

    def _retain(self, handle: int, plan: PlanArrays) -> None:
        self._call(
            self._lib.kvc_retain,
            handle,
            self._buffer("int64_t", plan.intervals),
            self._buffer("int64_t", plan.positions),
            self._buffer("uint8_t", plan.declared),
            len(plan.positions),
        )

    def stops(self, handle: int, start: int, end: int) -> list[int]:
        """Positions in (start, end] where a state must be snapshotted, ascending."""
        found = self._read(
            np.int64, self._lib.kvc_stops, handle, whole(start, "start"), whole(end, "end")
        )
        return [int(position) for position in found]

    def need(self, handle: int, tokens: int, *, drafts: int = 0) -> list[int]:
        """New pages of each group that `allocate` would take."""
        out = self._ffi.new("int64_t[]", len(self.geometry.groups))
        self._call(
            self._lib.kvc_need, handle, whole(tokens, "tokens"), whole(drafts, "drafts"), out
        )
        return [int(count) for count in out]

    def allocate(self, handle: int, tokens: int, *, drafts: int = 0) -> Grant | None:
        """Pages for the next `tokens` tokens; None: no space now, nothing changed (`blockage`).

        The grant may end sooner (`Grant.end`), where the request could never hold all that, even
        alone. So the oldest request always gets on.

        The first call adopts the hit of the last `lookup`, or what is left of it: never more. Its
        pages gain a reference before anything is evicted. If part of it lies in a tier, the grant
        covers no tokens but names a load: fill `load_items(load)`, then `end_load`.

        Args:
            drafts: guessed tokens after those; `commit` may leave any of them out. A grant may be
                computed before it: until then the newest open step fences the request's pages.
        """
        out = self._ffi.new("kvc_grant*")
        tokens, drafts = whole(tokens, "tokens"), whole(drafts, "drafts")
        status = self._call(self._lib.kvc_allocate, handle, tokens, drafts, out)
        if status == native.NO_SPACE:
            return None
        return Grant(out.hit_tokens, out.start, out.end, out.load, out.n_loads)

    def blockage(self, handle: int) -> str:
        """Why the last `allocate` of the request gave None: one of `BLOCKAGES`.

        `frozen`: the oldest request waits for space and goes first. `preempt`: younger requests
        hold pages, preempt them, the youngest first. `wait`: older requests, open steps, loads or
        pins hold what it needs. `restart`: preempt this request itself. Empty: it was not refused.
        """
        out = self._ffi.new("int32_t*")
        self._call(self._lib.kvc_blockage, handle, out)
        return BLOCKAGES[out[0]]

    # ---- steps ---------------------------------------------------------------------------------

    def begin_step(self) -> int:
        """Open a step. At most `max_open_steps` are open; they end in order."""
        out = self._ffi.new("int64_t*")
        native.check(self._lib.kvc_begin_step(self._native, out))
        return int(out[0])

    def commit(self, handle: int, upto: int) -> None:
        """The newest open step writes the request's tokens up to `upto`, inside its grant.

        With a state group `upto` is the end of the grant, less drafts that were wrong. Tokens that
        are sampled but not yet told by `extend` may be committed: their blocks get keys when they
        are told. That both agree is the caller's promise.
        """
        self._call(self._lib.kvc_commit, handle, whole(upto, "upto"))

    def end_step(self, step: int) -> None:
        """The step's writes are done: its keys become hits, pages freed under it are free."""
        self._call(self._lib.kvc_end_step, step)

    def _namespace_use(self, number: int) -> int:
        out = self._ffi.new("int64_t*")
        self._call(self._lib.kvc_namespace_use, number, out)
        return int(out[0])
