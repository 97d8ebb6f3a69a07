"""The manager says why a lookup lost tokens: what the core found, with names in place of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.core.clear_calls import ClearCalls
from kvcache.core.explanation import (
    CAUSES,
    WHYS,
    Elsewhere,
    Evicted,
    Evidence,
    Explanation,
    KeyDiffers,
    KeyField,
    LastBlock,
    Loss,
    NoState,
    NotStored,
    Other,
    Pending,
    TokensDiffer,
)
from kvcache.core.layout import Geometry
from kvcache.core.records import UNLIMITED
from kvcache.core.values import whole

LEAST_HISTORY_TOKENS = 262_144
MOST_HISTORY_TOKENS = 16_777_216
"""Bounds of what a manager remembers of closed requests if it is not told how much."""

MAX_SESSIONS = 65_536
"""Sessions whose names are known to explanations; beyond, the oldest lose theirs."""

_MOST_LOSSES = 32
_PROBE_TOKENS = 1 << 20
_NANOSECONDS = 1e-9


def history_tokens_of(geometry: Geometry, slabs: int, asked: int | None) -> int:
    """Tokens of closed requests to remember. None: an eighth of those that the arena holds."""
    if asked is not None:
        return whole(asked, "history_tokens", least=0)
    if slabs == UNLIMITED:
        return MOST_HISTORY_TOKENS
    held = slabs * _PROBE_TOKENS // max(geometry.slabs_needed(_PROBE_TOKENS), 1)
    return min(max(held // 8, LEAST_HISTORY_TOKENS), MOST_HISTORY_TOKENS)


class ExplainCalls(ClearCalls):
    """Why tokens were lost, as far as open and remembered requests tell."""

    def __init__(
        self, geometry: Geometry, slabs: int, *, history_tokens: int | None, **settings: Any
    ) -> None:
        self._asked_tokens = history_tokens
        self._history_tokens = 0
        super().__init__(geometry, slabs, **settings)
        self._sessions: dict[str, int] = {}
        self._session_names: dict[int, str] = {0: ""}
        self._last_session = 0

    def _create(self, slabs: int, settings: dict[str, int]) -> Any:
        self._history_tokens = history_tokens_of(self.geometry, slabs, self._asked_tokens)
        return super()._create(slabs, settings | {"history_tokens": self._history_tokens})

    @property
    def history_tokens(self) -> int:
        """How many tokens of closed requests are remembered for explanations."""
        return self._history_tokens

    def _session_number(self, session: str) -> int:
        """0 for no session; the same number for the same name, while it is known."""
        if not session:
            return 0
        number = self._sessions.get(session)
        if number is None:
            self._last_session = number = self._last_session + 1
            self._sessions[session], self._session_names[number] = number, session
            if len(self._sessions) > MAX_SESSIONS:
                oldest = next(iter(self._sessions))
                del self._session_names[self._sessions.pop(oldest)]
        return number

    def explain(
        self, handle: int, *, elsewhere: Sequence[NDArray[np.uint8]] | None = None
    ) -> Explanation:
        """Why the last `lookup` of the request, which may run by now, lost what it did.

        The losses add up to the prompt; by what `Loss.told` says, to the `Hit.lost` of that lookup.
        Changes nothing. Other requests are known while they are open, and as long as
        `history_tokens` goes. O(known requests), at most 4,096 closed ones.

        Args:
            elsewhere: as `present` of `lookup`: what a tier or a replica is known to hold, though
                the lookup was not told. What it would have added is lost to `elsewhere`.

        Raises:
            MisuseError: the request was not looked up yet.
        """
        pointers, lengths, _keep = self._presence(elsewhere, "elsewhere")
        head, n = self._ffi.new("kvc_explained*"), self._ffi.new("int64_t*")
        rows = self._ffi.new("kvc_loss[]", _MOST_LOSSES)
        self._call(self._lib.kvc_explain, handle, pointers, lengths, head, rows, _MOST_LOSSES, n)
        assert n[0] <= _MOST_LOSSES
        losses = tuple(self._loss(handle, rows[i], head) for i in range(n[0]))
        return Explanation(head.n_tokens, head.hit_tokens, losses)

    def _loss(self, handle: int, row: Any, head: Any) -> Loss:
        cause = CAUSES[row.cause]
        evidence: Evidence
        if cause == "last_block":
            evidence = LastBlock(self.geometry.grid_tokens)
        elif cause == "no_state":
            evidence = self._no_state(row, head)
        elif cause == "evicted":
            evidence = self._evicted(row)
        elif cause == "pending":
            evidence = Pending(self._other(row), row.step, row.load)
        elif cause == "elsewhere":
            evidence = Elsewhere("")
        elif cause == "tokens_differ":
            evidence = self._tokens_differ(row)
        elif cause == "key_differs":
            evidence = KeyDiffers(self._fields(handle, row), row.position, self._named(row))
        else:
            evidence = NotStored(WHYS[row.why], self._other(row), self._history_tokens)
        return Loss(cause, row.begin, row.end, evidence, CAUSES[row.told])

    def _no_state(self, row: Any, head: Any) -> NoState:
        nearest, other = max(row.position, 0), self._other(row)
        return NoState(self._group_name(row.group), nearest, head.full_tokens, other)

    def _tokens_differ(self, row: Any) -> TokensDiffer:
        before, own, others = (
            tuple(tokens[0:n])
            for tokens, n in (
                (row.before, row.n_before),
                (row.own, row.n_own),
                (row.others, row.n_others),
            )
        )
        return TokensDiffer(row.position, self._named(row), before, own, others)

    def _group_name(self, group: int) -> str:
        return self.geometry.groups[group].name if group >= 0 else ""

    def _other(self, row: Any) -> Other | None:
        if not row.other:
            return None
        known = row.other_tokens >= 0
        closed = row.other_closed_ns
        return Other(
            row.other,
            self._session_names.get(row.other_session, ""),
            row.other_tokens if known else None,
            row.other_computed if known else None,
            closed * _NANOSECONDS if closed >= 0 else None,
        )

    def _named(self, row: Any) -> Other:
        other = self._other(row)
        assert other is not None
        return other

    def _evicted(self, row: Any) -> Evicted:
        other = self._other(row)
        seconds = row.evicted_ns * _NANOSECONDS if row.evicted_ns >= 0 else None
        if WHYS[row.why] == "forgotten":
            return Evicted("", -1, None, None, 0, 0, remembered=False, other=other)
        return Evicted(
            self._group_name(row.group),
            row.position,
            seconds,
            other,
            row.evicted_pages,
            round(row.evicted_slabs * self.geometry.slab_bytes),
            remembered=row.group >= 0,
        )

    def _fields(self, handle: int, row: Any) -> tuple[KeyField, ...]:
        """Which parts of the key are not those of the other request."""
        if row.position >= 0:
            return (KeyField("media", "", ""),)
        own = self._namespaces.entries[
            self._struct("kvc_request_info", self._lib.kvc_info, handle).ns
        ]
        others = self._namespaces.of_root(bytes(row.other_root))
        if others is None:
            return (KeyField("root", "", ""),)
        pairs = zip(own.fields().items(), others.fields().values(), strict=True)
        return tuple(
            KeyField(name, mine, theirs) for (name, mine), theirs in pairs if mine != theirs
        )
