"""Replays a trace through the block manager: its public API alone, no model, no bytes.

Each request in turn, in the order of the trace:

    open -> lookup -> { step: allocate, commit } prompt -> { step } reply -> finish

Serial service: a request is done before the next one starts, so the figures are those of the
eviction policy alone (nothing is preempted, running requests do not compete for pages). Pages of
the reply are taken and given back like the others, but a trace has no keys for them: the last
state that a request leaves is that of its prompt's last grid point. A replay copies nothing, so
the moves of cached pages are counted and dropped.

What each request lost is explained after its lookup; that takes time of its own, which is not the
manager's, and all of it must add up to the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.byte_lru import ByteLru
from kvcache.bench.ideal import IdealCache
from kvcache.bench.replay_report import Served, Totals, arena_values, setting_values
from kvcache.bench.replay_settings import (
    STEP_TOKENS,
    ReplaySettings,
    arena_bytes,
    arena_slabs,
    page_sizes,
    tokens_of_slabs,
)
from kvcache.bench.traces import TraceRequest
from kvcache.core.errors import CapacityError, ConfigError, InvariantError
from kvcache.core.explanation import Evicted, Explanation, NotStored, TokensDiffer
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.records import LOSS_CAUSES, Hit

FORGOTTEN = Evicted(
    group="",
    position=-1,
    seconds_ago=None,
    by=None,
    pages_since=0,
    bytes_since=0,
    remembered=False,
)
"""Of pages that went longer ago than the table of evicted keys tells."""

_CHECK_PAGES_PER_REQUEST = 1024
_CHECK_PAGES_PER_BLOCK = 1


def foreign_digests(keys: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Block numbers as opaque keys `[n, 32]`: eight little-endian bytes, then zeros."""
    rows = np.zeros((len(keys), 4), dtype="<i8")
    rows[:, 0] = keys
    return rows.view(np.uint8)


def with_forgotten(explanation: Explanation, stored_tokens: int) -> Explanation:
    """What was stored before, and is not remembered by the manager, was evicted: the trace tells.

    Args:
        stored_tokens: how much of the prompt was computed by earlier requests.
    """
    losses = []
    for loss in explanation.losses:
        stored = min(max(stored_tokens, loss.start), loss.end)
        if loss.cause not in ("not_stored", "tokens_differ") or stored == loss.start:
            losses.append(loss)
            continue
        losses.append(loss._replace(cause="evicted", end=stored, evidence=FORGOTTEN))
        if stored < loss.end:
            rest = loss._replace(start=stored)
            if isinstance(loss.evidence, TokensDiffer):  # from a request with less in common
                rest = rest._replace(cause="not_stored", evidence=NotStored("new", None, 1))
            losses.append(rest)
    return explanation._replace(losses=tuple(losses))


class TooLargeError(CapacityError):
    """A request that the pool can never hold."""


class Replay:
    """One run over one trace. `serve` the requests in order, then read `report`.

    Args:
        geometry: another one than that of `settings.preset`.
    """

    def __init__(
        self,
        path: Path,
        trace_block_tokens: int,
        settings: ReplaySettings,
        *,
        geometry: Geometry | None = None,
    ) -> None:
        self._path = path
        self._settings = settings
        self._geometry = settings.geometry if geometry is None else geometry
        unit = self._geometry.hash_unit_tokens
        if settings.block_tokens % trace_block_tokens or unit % trace_block_tokens:
            raise ConfigError(
                f"--block-tokens {settings.block_tokens} (keys of {unit} tokens) is not a multiple of"
                f" the trace's block of {trace_block_tokens} tokens"
            )
        self._merge = unit // trace_block_tokens
        self._slabs = arena_slabs(settings.pool_tokens, self._geometry)
        self._state_group = next(
            (i for i, rules in enumerate(self._geometry.rules) if rules.kind == "state"), None
        )
        self._manager = Manager(
            self._geometry,
            slabs=self._slabs,
            retention=settings.policy(),
            movable=settings.movable,
            journal=self._state_group is not None,
            seed=settings.seed,
        )
        self.handle = 0
        """Of the request served last: explanations name others by their handles."""
        self._ideal = IdealCache(unit, self._geometry.grid_tokens)
        self._oracle = self._make_oracle() if settings.oracle else None
        self._totals = Totals()
        self._moved_pages = 0
        self._moved_bytes = 0
        self._peak_bytes = 0
        self._manager_seconds = 0.0
        self._explain_seconds = 0.0
        self._checks = 0
        self._check_credit_pages = 0

    def _make_oracle(self) -> ByteLru:
        settings = self._settings
        tokens = settings.pool_tokens
        return ByteLru(
            page_sizes(self._geometry, settings.preset),
            capacity_bytes=None if tokens is None else arena_bytes(tokens, self._geometry),
            policy=settings.policy(),
            step_tokens=STEP_TOKENS,
        )

    # ---- one request ---------------------------------------------------------------------------

    def serve(self, request: TraceRequest) -> Explanation:
        """Play one request from open to finish; why it lost what it did."""
        prompt, output = request.prompt_tokens, request.output_tokens
        keys = request.blocks[self._merge - 1 :: self._merge]
        digests = foreign_digests(keys)
        started = thread_time()
        handle = self.handle = self._open(request, digests)
        hit = self._manager.lookup(handle)
        looked_up = thread_time()
        explanation = self._manager.explain(handle)
        self._explain_seconds += (explained := thread_time()) - looked_up
        reused = self._compute(handle, hit.hit_tokens, prompt)
        if output > 1:  # the last token of a reply is never fed back
            self._manager.extend_foreign(handle, output)
            self._compute(handle, prompt, prompt + output - 1)
        policy_states = self._new_states()
        computed = thread_time()
        self._watch_peak()
        self._check(len(keys))
        finishing = thread_time()
        self._manager.finish(handle)
        end_states = self._new_states()
        self._drop_moves()
        self._manager_seconds += looked_up - started + computed - explained
        self._manager_seconds += thread_time() - finishing
        self._require_sum(request, reused, hit, explanation)
        ideal = self._ideal.hit_tokens(keys, prompt)
        if self._settings.pool_tokens is not None:
            explanation = with_forgotten(explanation, ideal)
        oracle = self._ask_oracle(request, keys)
        if request.counted:
            lost = explanation.lost()
            served = Served(reused, ideal, oracle, policy_states, end_states, lost)
            self._totals.add(request, served)
        return explanation

    def _require_sum(
        self, request: TraceRequest, reused: int, hit: Hit, explanation: Explanation
    ) -> None:
        """Every token was hit, or has one cause: as the lookup counts them, and as they are explained."""
        told = dict.fromkeys(LOSS_CAUSES, 0)
        for loss in explanation.losses:
            told[loss.told] += loss.tokens
        lost = sum(explanation.lost().values())
        if (
            told != hit.lost
            or not reused + lost == explanation.prompt_tokens == request.prompt_tokens
        ):
            raise InvariantError(
                f"{self._path}, line {request.line}: {reused} hit and {hit.lost} lost tokens, explained"
                f" as {explanation.lost()}, do not add up to a prompt of {request.prompt_tokens}"
            )

    def _ask_oracle(self, request: TraceRequest, keys: NDArray[np.int64]) -> int:
        if self._oracle is None:
            return 0
        step = self._geometry.grid_tokens // self._geometry.hash_unit_tokens
        blocks = keys[step - 1 :: step].tolist()
        return self._oracle.serve(blocks, request.prompt_tokens, request.output_tokens)

    def _open(self, request: TraceRequest, digests: NDArray[np.uint8]) -> int:
        tokens = request.prompt_tokens + request.output_tokens
        try:
            return self._manager.open_foreign(
                digests,
                prompt_tokens=request.prompt_tokens,
                max_tokens=tokens,
                session=f"{request.session}/{request.agent}" if request.session else "",
            )
        except CapacityError as error:
            raise TooLargeError(
                f"{self._path}, line {request.line}: {request.prompt_tokens} prompt and"
                f" {request.output_tokens} output tokens need {self._geometry.slabs_needed(tokens)} slabs"
                f" with their windows and states, and the pool of {self._settings.pool_tokens} tokens has"
                f" {self._slabs}: raise --pool-tokens to {self.least_pool_tokens(tokens)} or more"
            ) from error

    def least_pool_tokens(self, request_tokens: int) -> int:
        """The least pool in which a request of so many tokens can run."""
        return tokens_of_slabs(self._geometry.slabs_needed(request_tokens), self._geometry)

    def _compute(self, handle: int, start: int, end: int) -> int:
        """Compute tokens [start, end) in steps; returns the tokens adopted by the first one."""
        manager, adopted = self._manager, 0
        while start < end:
            step = manager.begin_step()
            grant = manager.allocate(handle, min(STEP_TOKENS, end - start))
            if grant is None:
                raise InvariantError(
                    f"the pool of {self._settings.pool_tokens} tokens has no room for the only"
                    f" request that runs, at {start} of {end} tokens"
                )
            manager.commit(handle, grant.end)
            manager.end_step(step)
            adopted += grant.hit_tokens
            start = grant.end
        return adopted

    def _new_states(self) -> int:
        """States that got a key since the last call, counted once for all recurrent groups."""
        if self._state_group is None:
            return 0
        return int((self._manager.take_keyed()["group"] == self._state_group).sum())

    def _drop_moves(self) -> None:
        moves = self._manager.take_moves()
        if len(moves):
            strides = np.array(self._geometry.stride_bytes, np.int64)
            self._moved_pages += len(moves)
            self._moved_bytes += int(strides[moves["size_class"]].sum())

    def _watch_peak(self) -> None:
        self._peak_bytes = max(self._peak_bytes, self._used_bytes())

    def _used_bytes(self) -> int:
        """Bytes of held and cached pages."""
        return sum(
            (size.held + size.cached) * stride
            for size, stride in zip(
                self._manager.arena_stats().classes, self._geometry.stride_bytes, strict=True
            )
        )

    # ---- checks --------------------------------------------------------------------------------

    def _check(self, blocks: int) -> None:
        """`check()` in the middle of a request, as often as a total cost allows.

        A check costs the pages that exist. Each request earns a fixed number of them and one for
        each block it touches: small pools are checked at every request, and all checks together
        look at a few pages for each block of the trace.
        """
        if not self._settings.check:
            return
        self._check_credit_pages += _CHECK_PAGES_PER_REQUEST + _CHECK_PAGES_PER_BLOCK * blocks
        classes = self._manager.arena_stats().classes
        if self._check_credit_pages >= sum(c.free + c.cached + c.held for c in classes):
            self._check_credit_pages = 0
            self._manager.check()
            self._checks += 1

    # ---- the end -------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """The figures so far, as JSON values. Call when no request is open."""
        if self._settings.check:
            self._manager.check()
            self._checks += 1
        arena = self._manager.arena_stats()
        return {
            **setting_values(self._path, self._settings, self._geometry),
            **self._totals.values(oracle=self._oracle is not None),
            **arena_values(self._slabs, self._geometry),
            "peak_used_bytes": self._peak_bytes,
            "moved_pages": self._moved_pages,
            "moved_bytes": self._moved_bytes,
            "reclaimed_slabs": arena.reclaimed_slabs,
            "preemptions": 0,
            "leaked_blocks": sum(size.held for size in arena.classes),
            "checks": self._checks,
            "manager_seconds": self._manager_seconds,
            "explain_seconds": self._explain_seconds,
        }


def play(
    replay: Replay, requests: Iterable[TraceRequest]
) -> Iterator[tuple[TraceRequest, Explanation]]:
    """Serves the requests in order.

    Raises:
        CapacityError: one is too large for the pool; it names the pool that is large enough for all
            that follow too.
        InputError: a broken line of the trace, named.
    """
    rest = iter(requests)
    for request in rest:
        try:
            explanation = replay.serve(request)
        except TooLargeError as error:
            most = max(r.prompt_tokens + r.output_tokens for r in chain([request], rest))
            least = replay.least_pool_tokens(most)
            raise CapacityError(f"{error}, {least} for the largest request of the trace") from error
        yield request, explanation
