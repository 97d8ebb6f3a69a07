"""What a scheduler does for every running request of a step, in one native call for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.core import arrays, native
from kvcache.core.errors import ConfigError, KVCacheError
from kvcache.core.read_calls import ReadCalls
from kvcache.core.records import GRANT_DTYPE
from kvcache.core.values import flag

Numbers = Sequence[int] | NDArray[np.integer]

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


class BatchCalls(ReadCalls):
    """The same as single calls in the order given, up to the first that fails.

    An error names the request by its place in the batch; what the calls before it did stands.
    """

    def allocate_many(
        self,
        handles: Numbers,
        tokens: Numbers,
        *,
        drafts: Numbers | None = None,
        commit: bool = False,
    ) -> NDArray[np.void]:
        """`allocate` for each request: `[m]` of `GRANT_DTYPE`.

        With m below the number of handles, request m found no space (`blockage` says why), and
        those after it were not asked. A handle that is named twice is asked twice: its second
        grant replaces the first, where that was not committed.

        Args:
            commit: the newest step computes all of each grant: it is committed, too, before the
                next request is asked for. Not with drafts. Outside a step nothing is granted; where
                memory runs out in between, that request's grant stands (`info`).
        """
        commit = flag(commit, "commit")
        wanted = [arrays.flat(tokens, _INT64, "tokens")]
        if drafts is not None:
            if commit:
                raise ConfigError(
                    "commit=True with drafts: they are committed once it is known which of them are"
                    " right, by commit_many"
                )
            wanted.append(arrays.flat(drafts, _INT64, "drafts"))
        rows = self._rows(handles, *wanted)
        guesses = self._buffer("int64_t", wanted[1]) if drafts is not None else self._ffi.NULL
        grants = np.empty(len(rows), GRANT_DTYPE)
        done = self._many(
            self._lib.kvc_allocate_many,
            rows,
            self._buffer("int64_t", wanted[0]),
            guesses,
            commit,
            len(rows),
            self._buffer("kvc_grant", grants),
        )
        return grants if done == len(rows) else grants[:done]

    def commit_many(self, handles: Numbers, upto: Numbers) -> None:
        """`commit` for each request, up to its own position."""
        ends = arrays.flat(upto, _INT64, "upto")
        rows = self._rows(handles, ends)
        self._many(self._lib.kvc_commit_many, rows, self._buffer("int64_t", ends), len(rows))

    def extend_many(
        self, handles: Numbers, tokens: Numbers, *, counts: Numbers | None = None
    ) -> None:
        """`extend` for each request; none of them has foreign keys.

        Args:
            tokens: those of all requests, one request after the other.
            counts: how many each gets; None: one.
        """
        array = arrays.flat(tokens, _INT32, "tokens")
        if counts is None:
            rows, shares = self._rows(handles), self._ffi.NULL
            total = len(rows)
        else:
            given = arrays.flat(counts, _INT64, "counts")
            rows, shares = self._rows(handles, given), self._buffer("int64_t", given)
            total = sum(given.tolist())
            if len(given) and given.min() < 0:
                raise ConfigError(f"counts has {given.min()}: none may be below 0")
        if total != len(array):
            raise ConfigError(
                f"{len(array)} tokens are given, but the counts of {len(rows)} requests add up to"
                f" {total}"
            )
        self._many(
            self._lib.kvc_extend_many,
            rows,
            self._buffer("int32_t", array),
            len(array),
            shares,
            len(rows),
        )

    def _rows(self, handles: Numbers, *columns: NDArray[Any]) -> NDArray[np.int64]:
        rows = arrays.flat(handles, _INT64, "handles")
        for column in columns:
            if len(column) != len(rows):
                raise ConfigError(f"{len(column)} values for {len(rows)} handles: give one each")
        return rows

    def _many(self, function: Any, rows: NDArray[np.int64], *args: Any) -> int:
        """Calls it; returns how many requests were served."""
        done = self._ffi.new("int64_t*")
        status = function(self._native, self._buffer("int64_t", rows), *args, done)
        if status < 0:
            try:
                native.fail(status)
            except KVCacheError as error:
                if len(rows):
                    raise type(error)(
                        f"request {done[0]} of {len(rows)} in the batch: {error}"
                    ) from None
                raise
        return int(done[0])
