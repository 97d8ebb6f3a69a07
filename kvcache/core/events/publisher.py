"""Publishes event batches over ZeroMQ, with a replay endpoint, as vLLM 0.33.0's publisher does.

    engine thread:  publish --> [ bounded queue ]
    own thread:                   --> number, encode --> PUB     (topic, seq, payload)
                                        +-> [ replay buffer ] --> ROUTER  on request

`publish` never waits for a subscriber. What finds the queue full is dropped, and its sequence
number with it: subscribers see a gap, and learn from the replay endpoint that it is for good.
The thread does not die silently: its error is raised by the next `publish`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Self

from kvcache.core.errors import KVCacheError, MisuseError
from kvcache.core.events import settings
from kvcache.core.events.encode import encode_batches
from kvcache.core.events.outbox import Outbox
from kvcache.core.events.publisher_sockets import PublisherSockets
from kvcache.core.events.pyzmq import zmq
from kvcache.core.events.records import (
    Event,
    EventBatch,
    require_event,
    with_int_hashes,
    without_salts,
)
from kvcache.core.events.replay import ReplayBuffer
from kvcache.core.events.replay_server import ReplayServer
from kvcache.core.values import finite, flag, sequence, text, wait_seconds, whole

LOGGER = logging.getLogger(__name__)

IDLE_MILLISECONDS = 1000
BLOCKED_MILLISECONDS = 10
LIVE_SLICE = 64
"""Live batches sent before replays get their turn."""


class EventStreamError(KVCacheError, RuntimeError):
    """The thread that publishes has ended: no event reaches anybody any more."""


class PublisherStats(NamedTuple):
    """Counts since the start."""

    batches: int
    bytes: int
    dropped: int
    """Gaps: batches that found the queue full, could not be encoded, or were lost before."""
    replays: int
    replayed_batches: int
    bad_requests: int
    failed_replays: int
    """Ended by their deadline, or because the client had gone."""
    queued: int
    buffered_batches: int
    buffered_bytes: int


class EventPublisher:
    """One stream of numbered batches. Methods may be called from any thread.

    Args:
        endpoint: of the PUB socket, which subscribers connect to: `tcp://*:5557`.
        bind: whether to bind `endpoint`. None is vLLM's rule: bound if it has `*` or `::` in it or is
            ipc or inproc, else *connected to*, for a subscriber that binds. So `tcp://127.0.0.1:5557`
            reaches nobody who connects to it, unless `bind=True`.
        replay_endpoint: of the ROUTER socket, always bound; None: no replay.
        data_parallel_rank: written into each batch, and added to the ports.
        max_queue_batches: that wait for the thread.
        buffer_batches, buffer_bytes: bounds of what a replay can give.
        hwm: batches that ZeroMQ holds for one slow subscriber before it drops; each is at most
            `max_batch_bytes`, or one event.
        max_batch_bytes: larger batches are cut between events.
        int_hashes: send the low 64 bits of each key as an integer: vLLM's default, for consumers
            that take nothing else. Bytes are the whole key, and safe from collisions.
        publish_salts: False: leave cache salts out of `extra_keys`, where vLLM publishes them.
        replay_timeout_seconds: a client that takes nothing for so long is dropped.
    """

    def __init__(
        self,
        endpoint: str = "tcp://*:5557",
        *,
        bind: bool | None = None,
        replay_endpoint: str | None = None,
        topic: str = "",
        data_parallel_rank: int = 0,
        max_queue_batches: int = 1_000,
        buffer_batches: int = 10_000,
        buffer_bytes: int = 256 * 2**20,
        hwm: int = 10_000,
        max_batch_bytes: int = 2**20,
        replay_timeout_seconds: float = 30.0,
        int_hashes: bool = False,
        publish_salts: bool = True,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        name = "EventPublisher"
        self._topic = settings.topic_bytes(topic, f"{name}.topic")
        self._rank = settings.count(data_parallel_rank, f"{name}.data_parallel_rank", least=0)
        self._max_batch_bytes = settings.count(max_batch_bytes, f"{name}.max_batch_bytes")
        self._int_hashes = flag(int_hashes, f"{name}.int_hashes")
        self._publish_salts = flag(publish_salts, f"{name}.publish_salts")
        self._outbox = Outbox(settings.count(max_queue_batches, f"{name}.max_queue_batches"))
        self._buffer = ReplayBuffer(
            max_batches=settings.count(buffer_batches, f"{name}.buffer_batches"),
            max_bytes=whole(buffer_bytes, f"{name}.buffer_bytes", least=1),
        )
        timeout = settings.seconds(replay_timeout_seconds, f"{name}.replay_timeout_seconds")
        hwm = settings.count(hwm, f"{name}.hwm")
        self._seq = 0
        self._batches = self._bytes = self._unencodable = 0
        self._closing_at: float | None = None
        self._failure: BaseException | None = None
        self._sockets = PublisherSockets(
            settings.context_or_shared(context, f"{name}.context"),
            text(endpoint, f"{name}.endpoint"),
            None if replay_endpoint is None else text(replay_endpoint, f"{name}.replay_endpoint"),
            rank=self._rank,
            bind=None if bind is None else flag(bind, f"{name}.bind"),
            hwm=hwm,
        )
        self.endpoint, self.replay_endpoint = self._sockets.endpoint, self._sockets.replay_endpoint
        self._replays: ReplayServer | None = None
        if self._sockets.router is not None:
            self._replays = ReplayServer(self._sockets.router, self._buffer, self._topic, timeout)
        self._thread = threading.Thread(target=self._run, name="kvcache-events", daemon=True)
        self._thread.start()

    # ---- any thread ----------------------------------------------------------------------------

    def publish(self, events: Sequence[Event], *, ts: float | None = None) -> bool:
        """Queue the events of one step; `ts` in seconds since the epoch, default now.

        False: the queue was full, the batch is dropped and shows as a gap. No events: nothing is
        sent. The fields of the events are looked at by the thread: a batch that cannot be encoded is
        logged, counted as dropped, and a gap too. `token_ids` may be an array.

        Raises:
            ConfigError: `ts` is no finite number, or `events` cannot be walked.
            InputError: something in `events` is no event; nothing was queued.
            EventStreamError: the thread has ended.
            MisuseError: after `close`.
        """
        self._check_open()
        found = sequence(events, "events")
        now = time.time() if ts is None else finite(ts, "ts")
        for event in found:
            require_event(event)
        if not found:
            return True
        batch = EventBatch(ts=now, events=tuple(found), data_parallel_rank=self._rank)
        taken = self._outbox.put(batch)
        self._sockets.wake()
        return taken

    def gap(self) -> None:
        """Skip a number: events were lost before they came here, and subscribers shall see it."""
        self._check_open()
        self._outbox.put_gap()
        self._sockets.wake()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all that was published is with ZeroMQ. False: not within the time."""
        return self._outbox.wait_empty(wait_seconds(timeout_seconds, "timeout_seconds"))

    def close(self, timeout_seconds: float = 2.0) -> bool:
        """Send what is queued, end replays, free the sockets. Again: nothing more happens.

        False: the thread did not end within the time, and a warning is logged: its sockets are
        still open, so that ending their context would wait for them; or batches were left unsent.
        """
        timeout_seconds = wait_seconds(timeout_seconds, "timeout_seconds")
        if self._closing_at is None:
            self._closing_at = time.monotonic() + timeout_seconds
        self._sockets.wake()
        self._thread.join(timeout_seconds + 1.0)
        if self._thread.is_alive():
            LOGGER.warning(
                "the thread that publishes KV events did not end within %g s: its sockets stay"
                " open; do not end their context before close() gives True",
                timeout_seconds + 1.0,
            )
            return False
        self._sockets.close_waker()
        return not len(self._outbox)

    def stats(self) -> PublisherStats:
        """Counts, as they are now; not all of one moment."""
        replays = self._replays.counts if self._replays is not None else ReplayServer.NO_COUNTS
        return PublisherStats(
            batches=self._batches,
            bytes=self._bytes,
            dropped=self._outbox.dropped + self._unencodable,
            queued=len(self._outbox),
            buffered_batches=len(self._buffer),
            buffered_bytes=self._buffer.bytes,
            **replays,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise EventStreamError(
                f"the publishing thread has ended: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure
        if self._closing_at is not None:
            raise MisuseError("publish after close: the publisher is closed")

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._failure = error
            LOGGER.exception("the thread that publishes KV events has ended")
        finally:
            left = (self._closing_at or 0.0) - time.monotonic()
            self._sockets.close(max(0, int(left * 1000)))
            self._outbox.shut()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._sockets.wake_read, zmq.POLLIN)
        while not self._finished():
            if self._replays is not None:  # requests that nobody reads must not wake the thread
                poller.register(self._sockets.router, 0 if self._replays.full else zmq.POLLIN)
            poller.poll(self._patience())
            self._sockets.awake()
            self._send_live()
            if self._replays is not None:
                self._replays.serve()

    def _patience(self) -> int:
        """Milliseconds that the thread may sleep if nothing wakes it."""
        if len(self._outbox):
            return 0
        if self._replays is not None and self._replays.busy:
            return BLOCKED_MILLISECONDS if self._replays.blocked else 0
        return BLOCKED_MILLISECONDS if self._closing_at is not None else IDLE_MILLISECONDS

    def _finished(self) -> bool:
        if self._closing_at is None:
            return False
        busy = len(self._outbox) or (self._replays is not None and self._replays.busy)
        return not busy or time.monotonic() >= self._closing_at

    def _send_live(self) -> None:
        for _ in range(LIVE_SLICE):
            item = self._outbox.take()
            if item is None:
                return
            if isinstance(item, EventBatch):
                self._send(item)
            else:
                self._seq += item
            self._outbox.done()

    def _encode(self, batch: EventBatch) -> list[bytes]:
        """Payloads, one or more; none: it cannot be encoded, which is logged."""
        try:
            if self._int_hashes:
                batch = replace(batch, events=tuple(map(with_int_hashes, batch.events)))
            if not self._publish_salts:
                batch = replace(batch, events=tuple(map(without_salts, batch.events)))
            return list(encode_batches(batch, self._max_batch_bytes))
        except Exception:  # whatever the caller's objects do, it costs their batch alone
            LOGGER.exception("a batch of KV events is dropped")
            return []

    def _send(self, batch: EventBatch) -> None:
        payloads = self._encode(batch)
        if not payloads:
            self._unencodable += 1
            self._seq += 1
        for payload in payloads:
            number = self._seq.to_bytes(8, "big")
            self._buffer.append(self._seq, payload)
            self._batches += 1
            self._bytes += len(payload)
            self._seq += 1
            # Last: who has received it finds it counted.
            self._sockets.pub.send_multipart((self._topic, number, payload))
