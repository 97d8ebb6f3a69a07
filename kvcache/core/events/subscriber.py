"""Subscribes to event batches: sees gaps, asks the replay endpoint, says what is lost for good.

    SUB:   0 1 2 . . 5 6          3 and 4 never came
    asked: from 3  ->  4 5 6 end
    given: 0 1 2 Lost(3..3) 4 5 6

PUB sockets deliver in order and drop what a slow reader does not take, so a number that is too
high is a gap. A number that is not above the last live one means that the publisher has started
anew: nothing that it said before is worth anything.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Generator
from typing import NamedTuple, Self, TypeAlias

from kvcache.core.errors import ConfigError, MisuseError
from kvcache.core.events import settings
from kvcache.core.events.decode import MAX_PAYLOAD_BYTES, Decoder, WireError
from kvcache.core.events.endpoints import require_connectable
from kvcache.core.events.live_socket import LiveSocket
from kvcache.core.events.pyzmq import zmq
from kvcache.core.events.records import EventBatch
from kvcache.core.events.replay_client import ask_replay, sequence_number
from kvcache.core.values import flag, text, wait_seconds

GONE = "the replay endpoint has it no more"


class Received(NamedTuple):
    """A batch, in order."""

    seq: int
    batch: EventBatch
    replayed: bool
    """Whether it came from the replay endpoint."""


class Lost(NamedTuple):
    """Batches `first` to `last` will never come: what is known of the pool is wrong from here."""

    first: int
    last: int
    reason: str


class Restarted(NamedTuple):
    """The publisher began again at 0: forget all that it said."""

    previous: int
    """The last number before."""


Delivery: TypeAlias = Received | Lost | Restarted


class SubscriberStats(NamedTuple):
    """Counts since the start, in batches."""

    received: int
    replayed: int
    lost: int
    malformed: int
    """Counted in `lost` too."""
    duplicates: int
    """Live copies of what a replay had brought."""
    restarts: int
    replays: int
    failed_replays: int
    unknown_events: int


class EventSubscriber:
    """One stream, read by one thread; nothing happens between calls of `receive`.

    Args:
        endpoint: of the publisher, connected to; `bind` it where publishers connect.
        replay_endpoint: None: every gap is a loss.
        topic: prefix of the publisher's topic. One subscriber, one publisher: numbers are per
            publisher. A replay under another topic is another publisher's, and fails.
        from_start: a stream that is joined late has a gap before its first batch.
        probe_seconds: after so much silence, ask the replay endpoint whether something was missed;
            None: a gap at the end shows only with the next batch. The silence after a question that
            nobody answered counts from its end, so it may be shorter than `replay_timeout_seconds`.
        replay_timeout_seconds: for each answer of a replay.
        hwm: messages that wait here; more wait at the publisher, up to a `hwm` of its own.
        max_payload_bytes: of one batch. A larger one ends the connection, which is made anew: it is
            lost, and what was sent meanwhile is a gap. So at most `hwm` times this waits here.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        from_start: bool = True,
        bind: bool = False,
        probe_seconds: float | None = None,
        replay_timeout_seconds: float = 10.0,
        hwm: int = 1_000,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        name = "EventSubscriber"
        endpoint = text(endpoint, f"{name}.endpoint")
        if replay_endpoint is not None:
            replay_endpoint = _replay_endpoint(replay_endpoint, f"{name}.replay_endpoint")
        self._topic = settings.topic_bytes(topic, f"{name}.topic")
        bind = flag(bind, f"{name}.bind")
        hwm = settings.count(hwm, f"{name}.hwm")
        timeout = settings.seconds(replay_timeout_seconds, f"{name}.replay_timeout_seconds")
        probe = math.inf
        if probe_seconds is not None:
            probe = settings.seconds(probe_seconds, f"{name}.probe_seconds")
            if replay_endpoint is None:
                raise ConfigError(
                    f"{name}.probe_seconds is {probe_seconds} without a replay_endpoint: there is"
                    " nobody to ask; give both, or neither"
                )
        self._replay_endpoint = replay_endpoint
        self._replay_timeout = timeout
        self._probe_seconds = probe
        self._max_payload_bytes = settings.count(max_payload_bytes, f"{name}.max_payload_bytes")
        self._decoder = Decoder(max_payload_bytes=self._max_payload_bytes)
        self._next: int | None = 0 if flag(from_start, f"{name}.from_start") else None
        self._context = settings.context_or_shared(context, f"{name}.context")
        self._last_live = -1
        self._heard = time.monotonic()
        self._coming: Generator[Delivery] = _nothing()
        self._counts = dict.fromkeys(SubscriberStats._fields, 0)
        self._socket = LiveSocket(
            self._context,
            endpoint,
            topic=self._topic,
            bind=bind,
            hwm=hwm,
            max_payload_bytes=self._max_payload_bytes,
        )

    def receive(self, timeout_seconds: float) -> Delivery | None:
        """The next delivery, or None if none came within the time.

        At a gap, or where a probe falls due within the time, this call may last
        `replay_timeout_seconds` longer. One call probes once at most.
        """
        if self._socket.closed:
            raise MisuseError("receive after close: the subscriber is closed")
        end = time.monotonic() + wait_seconds(timeout_seconds, "timeout_seconds")
        probed = False
        delivery = next(self._coming, None)
        while delivery is None:
            askable = self._next is not None and not probed
            probe_at = self._heard + self._probe_seconds if askable else math.inf
            frames = self._socket.receive(max(0.0, min(end, probe_at) - time.monotonic()))
            now = time.monotonic()
            if frames is not None:
                self._heard = now
                self._coming = self._take(frames)
            elif probe_at <= min(now, end):  # one that falls due later is not this call's
                probed = True
                self._coming = self._fill(None)
            elif now >= end:
                return None
            delivery = next(self._coming, None)
            if delivery is None and time.monotonic() >= end:
                return None
        return delivery

    def stats(self) -> SubscriberStats:
        """Counts, as they are now."""
        self._counts["unknown_events"] = sum(self._decoder.unknown_tags.values())
        return SubscriberStats(**self._counts)

    def unknown_tags(self) -> dict[str, int]:
        """Events of kinds that this version does not know, by tag."""
        return dict(self._decoder.unknown_tags)

    def close(self) -> None:
        """Free the socket. Again: nothing happens."""
        self._coming.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one message ---------------------------------------------------------------------------

    def _take(self, frames: list[bytes]) -> Generator[Delivery]:
        seq = sequence_number(frames[1]) if len(frames) == 3 else None
        if seq is None:
            self._counts["malformed"] += 1  # if a batch was lost, the next number shows it
            return
        if seq <= self._last_live:
            yield Restarted(self._last_live)
            self._counts["restarts"] += 1
            self._next = 0
        self._last_live = seq
        if self._next is None:
            self._next = seq
        if seq > self._next:
            yield from self._fill(seq)
        if seq < self._next:
            self._counts["duplicates"] += 1
        else:
            yield self._deliver(seq, frames[2], replayed=False)

    def _deliver(self, seq: int, payload: bytes, *, replayed: bool) -> Delivery:
        self._next = seq + 1
        try:
            batch = self._decoder.decode(payload)
        except WireError as error:
            self._counts["malformed"] += 1
            return self._lose(seq, seq, f"malformed: {error}")
        self._counts["replayed" if replayed else "received"] += 1
        return Received(seq, batch, replayed)

    def _lose(self, first: int, last: int, reason: str) -> Lost:
        self._counts["lost"] += last - first + 1
        return Lost(first, last, reason)

    # ---- a gap ---------------------------------------------------------------------------------

    def _fill(self, seq: int | None) -> Generator[Delivery]:
        """What lies between `_next` and `seq`; None: whatever there is from `_next` on."""
        if self._next is None:
            return
        reason = "there is no replay endpoint"
        if self._replay_endpoint is not None:
            self._counts["replays"] += 1
            reason = GONE
            with contextlib.closing(
                ask_replay(
                    self._context,
                    self._replay_endpoint,
                    self._next,
                    self._replay_timeout,
                    topic=self._topic,
                    max_payload_bytes=self._max_payload_bytes,
                )
            ) as answers:
                for answer in answers:
                    if answer.failure:
                        self._counts["failed_replays"] += 1
                        reason = answer.failure
                        break
                    if answer.seq > self._next:
                        yield self._lose(self._next, answer.seq - 1, GONE)
                    yield self._deliver(answer.seq, answer.payload, replayed=True)
        self._heard = time.monotonic()  # not before: a dead endpoint would be asked without a pause
        if seq is not None and seq > self._next:
            yield self._lose(self._next, seq - 1, reason)
            self._next = seq


def _replay_endpoint(value: object, what: str) -> str:
    endpoint = text(value, what)
    try:
        require_connectable(endpoint, instead="give the publisher's host")
    except ConfigError as error:
        raise ConfigError(f"{what} is {endpoint!r}: {error}") from error
    return endpoint


def _nothing() -> Generator[Delivery]:
    yield from ()
