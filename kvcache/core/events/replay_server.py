"""The replay endpoint: a ROUTER that answers `(empty, first sequence number)` with what is kept.

The answer is vLLM 0.33.0's: `(empty, topic, seq, payload)` for each batch, then seq = -1.
"""

from __future__ import annotations

import time
from collections import deque
from typing import ClassVar

from kvcache.core.events.pyzmq import zmq
from kvcache.core.events.replay import ReplayBuffer, ReplayJob
from kvcache.core.events.sockets import (
    MAX_ANSWERS,
    MAX_REQUEST_BYTES,
    MAX_REQUESTS,
    bound_incoming,
)

REPLAY_SLICE = 256
"""Batches sent to one client before it is the next one's turn."""
MAX_JOBS = 16
"""Clients served at once; more wait in the socket."""
FRAMES_A_TURN = 256
"""Frames read before live batches get their turn, whatever they are."""
REQUEST_FRAMES = 3


class ReplayServer:
    """Serves replays in slices, on the thread that owns `router`.

    Never waits, never raises for what a client did, and reads so many frames a turn, not more. The
    socket stays the caller's; `prepare` it before it is bound.
    """

    NO_COUNTS: ClassVar = dict.fromkeys(
        ("replays", "replayed_batches", "bad_requests", "failed_replays"), 0
    )

    def __init__(
        self,
        router: zmq.Socket[bytes],
        buffer: ReplayBuffer,
        topic: bytes,
        timeout_seconds: float,
    ) -> None:
        self._router = router
        self._buffer = buffer
        self._topic = topic
        self._timeout = timeout_seconds
        self._jobs: deque[ReplayJob] = deque()
        self._frames: list[bytes] = []
        """Of a request that is being read: no more than tell that it is bad."""
        self.blocked = False
        """No client of the last round took anything: wait a little before the next."""
        self.counts = dict(self.NO_COUNTS)

    @staticmethod
    def prepare(router: zmq.Socket[bytes]) -> None:
        """Sets the bounds of what clients can send, and of what waits for one that does not read."""
        bound_incoming(router, frame_bytes=MAX_REQUEST_BYTES, messages=MAX_REQUESTS)
        router.setsockopt(zmq.SNDHWM, MAX_ANSWERS)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)

    @property
    def full(self) -> bool:
        """As many clients as may be are served: no request is read."""
        return len(self._jobs) >= MAX_JOBS

    @property
    def busy(self) -> bool:
        """Whether a replay is on its way."""
        return bool(self._jobs)

    def serve(self) -> None:
        """Take new requests, and give each client a slice."""
        self._accept()
        self.blocked = True
        for _ in range(len(self._jobs)):
            job = self._jobs.popleft()
            if self._send_slice(job):
                self._jobs.append(job)

    def _accept(self) -> None:
        for _ in range(FRAMES_A_TURN):
            if self.full:
                return
            try:
                frame = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(self._frames) <= REQUEST_FRAMES:
                self._frames.append(frame)
            if not self._router.getsockopt(zmq.RCVMORE):
                frames, self._frames = self._frames, []
                self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != REQUEST_FRAMES or frames[1] or len(frames[2]) != 8:
            self.counts["bad_requests"] += 1
            return
        self.counts["replays"] += 1
        start = int.from_bytes(frames[2], "big")
        now, last = time.monotonic(), self._buffer.last
        job = ReplayJob(frames[0], start, last, now=now, timeout_seconds=self._timeout)
        self._jobs.append(job)

    def _send_slice(self, job: ReplayJob) -> bool:
        """Whether there is more to send."""
        for _ in range(REPLAY_SLICE):
            frames = job.peek(self._buffer)
            topic = b"" if frames.end else self._topic
            try:
                self._router.send_multipart(
                    (job.client, b"", topic, frames.seq, frames.payload), zmq.NOBLOCK
                )
            except zmq.Again:  # the client reads slowly
                if not job.overdue(time.monotonic()):
                    return True
                self.counts["failed_replays"] += 1
                return False
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self.counts["failed_replays"] += 1  # the client has gone
                return False
            self.blocked = False
            if frames.end:
                return False
            job.advance(time.monotonic())
            self.counts["replayed_batches"] += 1
        return True
