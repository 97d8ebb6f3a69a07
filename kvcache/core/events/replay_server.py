"""The replay endpoint: a ROUTER that answers `(empty, first sequence number)` with what is kept.

The answer is vLLM 0.33.0's: `(empty, topic, seq, payload)` for each batch, then seq = -1.
"""

from __future__ import annotations

import time
from collections import deque
from typing import ClassVar

import zmq

from kvcache.core.events.replay import ReplayBuffer, ReplayJob

REPLAY_SLICE = 256
"""Batches sent to one client before it is the next one's turn."""
MAX_JOBS = 16
"""Clients served at once; more wait in the socket."""


class ReplayServer:
    """Serves replays in slices, on the thread that owns `router`.

    Never waits, never raises for what a client did. The socket stays the caller's, and must have
    ROUTER_MANDATORY set.
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
        self.blocked = False
        """No client of the last round took anything: wait a little before the next."""
        self.counts = dict(self.NO_COUNTS)

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
        while len(self._jobs) < MAX_JOBS:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                self.counts["bad_requests"] += 1
                continue
            self.counts["replays"] += 1
            start = int.from_bytes(frames[2], "big")
            job = ReplayJob(
                frames[0],
                start,
                self._buffer.last,
                now=time.monotonic(),
                timeout_seconds=self._timeout,
            )
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
