"""Offload and Manager together, on pages whose bytes are checked at each read.

Every page carries a stamp: a digest of the tokens (and salt) that its content stands for. What a
request reads must carry the stamp of exactly its own prefix, wherever the bytes came from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcache.connectors.base import Direction, PageRegion, Transfer
from kvcache.connectors.cpu import CpuConnector, native_copy
from kvcache.connectors.driver import Offload
from kvcache.connectors.testing import Faults, FaultyWorker, with_faults
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.records import Grant, Hit
from kvcache.core.specs import FullAttention, RecurrentState
from kvcache.retention import Dense

PATIENCE = 30.0
BLOCK = 4
ATTENTION, STATE = 0, 1
GEOMETRY = Geometry(
    (
        FullAttention(
            name="attention", layers=2, kv_heads=1, head_dim=3, block_tokens=BLOCK, element_bytes=1
        ),
        RecurrentState(name="state", layers=1, state_bytes_per_layer=77),
    )
)


def stamp(group: int, tokens: Sequence[int], salt: str) -> np.ndarray[Any, Any]:
    text = repr((group, list(tokens), salt)).encode()
    size = GEOMETRY.groups[group].page_bytes
    return np.frombuffer(hashlib.shake_256(text).digest(size), np.uint8)


@dataclass
class Request:
    tokens: list[int]
    target: int
    salt: str = ""
    session: str = ""
    state: str = "waiting"
    hits: list[Hit] = field(default_factory=list)


class Engine:
    """The smallest engine: one request after the other in a step, bytes are stamps."""

    def __init__(
        self,
        *,
        slabs: int = 7,
        tier: Sequence[int] = (64, 24),
        retention: Any = None,
        faults: Faults | None = None,
        seed: int = 0,
        copy: Callable[..., None] = native_copy,
        events: bool = False,
        connector: Any = None,
        lazy_bytes: int | None = None,
        **options: Any,
    ) -> None:
        self.manager = Manager(
            GEOMETRY, slabs=slabs, retention=retention or Dense(), movable=True, events=events
        )
        self.arena = np.zeros(slabs * GEOMETRY.slab_bytes, np.uint8)
        self.memory = [self.pages(group) for group in (ATTENTION, STATE)]
        connector = connector or CpuConnector(
            GEOMETRY, pages=tier, copy=copy, batch_bytes=1, events=events, **options
        )
        self.faulty: FaultyWorker | None = None
        if faults is not None:
            connector, self.faulty = with_faults(connector, faults, seed=seed, hold=True)
        self.offload = Offload(self.manager, connector, self.regions(), lazy_bytes=lazy_bytes)
        self.requests: dict[int, Request] = {}
        self.sessions = 0

    def pages(self, group: int) -> np.ndarray[Any, Any]:
        """`[pages, bytes]`: the arena as a group sees it."""
        stride = GEOMETRY.stride_bytes[GEOMETRY.class_of_group[group]]
        rows = self.arena.reshape(-1, stride)
        return rows[:, : GEOMETRY.groups[group].page_bytes]

    def regions(self) -> list[PageRegion]:
        return [
            PageRegion(m.ctypes.data, m.shape[1], m.shape[0], m.strides[0]) for m in self.memory
        ]

    def allocate(self, handle: int, tokens: int) -> Grant | None:
        grant = self.manager.allocate(handle, tokens)
        for size_class, source, target in self.manager.take_moves().tolist():
            rows = self.arena.reshape(-1, GEOMETRY.stride_bytes[size_class])
            rows[target] = rows[source]
        return grant

    # ---- a request's life ----
    def open(self, tokens: Sequence[int], output: int = 0, salt: str = "") -> int:
        target = len(tokens) + output
        self.sessions += 1
        request = Request(list(tokens), target, salt, f"session {self.sessions}")
        handle = self.manager.open(
            np.array(tokens, np.int32), max_tokens=target + 1, salt=salt, session=request.session
        )
        self.requests[handle] = request
        return handle

    def step(self, chunk: int = 8) -> None:
        step = self.manager.begin_step()
        for handle, request in list(self.requests.items()):
            if request.state != "loading":
                self.advance(handle, request, chunk)
        self.manager.end_step(step)
        self.offload.end_of_step()
        for handle, request in list(self.requests.items()):
            if self.manager.info(handle).computed >= request.target:
                self.close(handle, "finish")
        self.offload.end_of_step()

    def advance(self, handle: int, request: Request, chunk: int) -> None:
        manager = self.manager
        if request.state == "waiting":
            hit = self.offload.lookup(handle)
            assert hit is not None
            request.hits.append(hit)
            grant = self.allocate(handle, min(chunk, len(request.tokens) - hit.hit_tokens))
            if grant is None:
                return
            request.state = "loading" if grant.load else "running"
            if not self.offload.start_load(handle, grant):
                request.state = "waiting"
            if request.state != "running":
                return
        else:
            committed = manager.info(handle).committed
            grant = self.allocate(handle, min(chunk, len(request.tokens) - committed))
            if grant is None:
                return
        self.compute(handle, request, grant)

    def compute(self, handle: int, request: Request, grant: Grant) -> None:
        """Reads everything before the grant and checks it; writes what the grant covers."""
        tokens, start, end = request.tokens, grant.start, grant.end
        table = self.manager.block_table(handle, ATTENTION)
        plan = self.manager.state_plan(handle, STATE)
        for i, page in enumerate(table.tolist()):
            upto = min(start, (i + 1) * BLOCK)
            if upto > i * BLOCK:
                self.expect(ATTENTION, page, tokens[:upto], request.salt)
        if start:
            self.expect(STATE, plan.source, tokens[:start], request.salt)
        for i in range(start // BLOCK, -(-end // BLOCK)):
            upto = min(end, (i + 1) * BLOCK)
            self.memory[ATTENTION][table[i]] = stamp(ATTENTION, tokens[:upto], request.salt)
        for position, page in zip(plan.positions.tolist(), plan.pages.tolist(), strict=True):
            self.memory[STATE][page] = stamp(STATE, tokens[:position], request.salt)
        self.manager.commit(handle, end)
        if end == len(tokens) < request.target:
            tokens.append(sum(tokens) % 97)
            self.manager.extend(handle, tokens[-1:])

    def expect(self, group: int, page: int, tokens: Sequence[int], salt: str) -> None:
        wanted = stamp(group, tokens, salt)
        np.testing.assert_array_equal(self.memory[group][page], wanted, f"{group} {page} {tokens}")

    def close(self, handle: int, how: str, *, told: bool = True) -> None:
        if told and how == "preempt":
            self.offload.release(handle)
        elif told:
            self.offload.forget(handle)
        getattr(self.manager, how)(handle)
        if how == "preempt":
            self.requests[handle].state = "waiting"
        else:
            del self.requests[handle]

    def may_clear(self) -> bool:
        idle = all(request.state == "waiting" for request in self.requests.values())
        return idle and not self.manager.stats().open_loads

    def poll(self) -> list[tuple[int, bool]]:
        ended = self.offload.poll()
        for handle, ok in ended:
            request = self.requests[handle]
            assert request.state == "loading"
            request.state = "running" if ok else "waiting"
            assert self.manager.info(handle).state == request.state
        return ended

    def settle(self) -> None:
        """Everything in flight ends."""
        while self.faulty is not None and not self.offload.drain(0.0):
            self.faulty.deliver()
            self.faulty.recover()
            self.poll()
        assert self.offload.drain(PATIENCE)
        self.poll()
        self.check()

    def run(self, handle: int, chunk: int = 8) -> Request:
        """Until the request has finished."""
        request = self.requests[handle]
        for _ in range(200):
            if handle not in self.requests:
                return request
            self.step(chunk)
            self.settle()
        raise AssertionError(f"{request} does not end")

    def serve(self, tokens: Sequence[int], output: int = 1, salt: str = "") -> Request:
        return self.run(self.open(tokens, output, salt))

    def check(self) -> None:
        self.manager.check()
        self.offload.check()

    def assert_idle(self) -> None:
        stats = self.manager.stats()
        assert (stats.open_requests, stats.open_loads, stats.pinned) == (0, 0, 0)
        assert self.offload.stats().pinned_pages == 0
        assert [c.held for c in self.manager.arena_stats().classes] == [0, 0]


@contextmanager
def engine(**options: Any) -> Iterator[Engine]:
    made = Engine(**options)
    try:
        yield made
        made.check()
    finally:
        made.offload.close(PATIENCE)


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()  # type: ignore[no-any-return]


def refuse_loads(e: Engine) -> None:
    """From now on no load can be submitted."""
    submit = e.offload._worker.submit

    def no_loads(transfer: Transfer) -> bool:
        if transfer.direction is Direction.LOAD:
            raise ConnectionError("gone")
        return submit(transfer)

    e.offload._worker.submit = no_loads  # type: ignore[method-assign]
