"""A SUB socket that outlives a frame beyond its limit.

libzmq ends the connection over which such a frame comes, and makes no new one (as it does when a
publisher goes away): whoever connected would hear nothing any more. So it is made anew here, once
all that came over it has been read.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time

from kvcache.core.errors import ConfigError
from kvcache.core.events.endpoints import for_rank, require_connectable
from kvcache.core.events.pyzmq import zmq
from kvcache.core.events.sockets import bound_incoming, receive

RECONNECT_SECONDS = 1.0
"""After the end of a connection, before the next one. libzmq, where it makes one, needs 0.2."""

_NUMBERS = itertools.count()


class LiveSocket:
    """Messages of one endpoint, by one thread. `ConfigError` if it cannot be bound or connected to."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        topic: bytes,
        bind: bool,
        hwm: int,
        max_payload_bytes: int,
    ) -> None:
        self._endpoint = endpoint
        self._ended_at = math.inf
        """When a connection ended for which libzmq makes no new one."""
        self._monitor: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        self._socket = context.socket(zmq.SUB)
        try:
            if bind:
                for_rank(endpoint, 0)
            else:
                require_connectable(
                    endpoint, instead="give the publisher's host, or bind=True where it connects"
                )
            bound_incoming(self._socket, frame_bytes=max_payload_bytes, messages=hwm)
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)
            self._poller.register(self._socket, zmq.POLLIN)
            if bind:
                self._socket.bind(endpoint)
            else:
                self._monitor = self._watch(context)
                self._poller.register(self._monitor, zmq.POLLIN)
                self._socket.connect(endpoint)
        except (zmq.ZMQError, ConfigError) as error:
            self.close()
            raise ConfigError(f"cannot subscribe to events at {endpoint}: {error}") from error

    def _watch(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        """A socket that tells when a connection is made or ends.

        libzmq writes to it from the thread that serves every socket of the context, and waits where
        it is full: all of them, and `close`, would stand still. So it is never full; and asked for
        is what needs a publisher at the other end, not attempts, of which there are ten a second
        while there is none.
        """
        place = f"inproc://kvcache-events-{id(context)}-{next(_NUMBERS)}"
        self._socket.monitor(place, zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        monitor = context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.connect(place)
        return monitor

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return bool(self._socket.closed)

    @property
    def place(self) -> str:
        """The endpoint with the port that a bound one was given."""
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    def receive(self, timeout_seconds: float) -> list[bytes] | None:
        """The frames of the next message; None: none came within the time, or it was cut short."""
        left = self._ended_at + RECONNECT_SECONDS - time.monotonic()
        wait = math.ceil(max(0.0, min(timeout_seconds, left)) * 1000)
        if math.isfinite(left):
            if self._socket.poll(wait):
                return receive(self._socket)
            self._read_monitor()
            if time.monotonic() >= self._ended_at + RECONNECT_SECONDS:
                self._connect_anew()
            return None
        ready = dict(self._poller.poll(wait))
        if self._socket in ready:
            return receive(self._socket)
        if self._monitor in ready:
            self._read_monitor()
        return None

    def _read_monitor(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            event = int.from_bytes(receive(self._monitor)[0][:2], sys.byteorder)
            ended = event == zmq.EVENT_DISCONNECTED
            self._ended_at = time.monotonic() if ended else math.inf

    def _connect_anew(self) -> None:
        self._ended_at = math.inf
        with contextlib.suppress(zmq.ZMQError):  # given up by libzmq, so there is none such
            self._socket.disconnect(self._endpoint)
        self._socket.connect(self._endpoint)

    def close(self) -> None:
        """Free the sockets, the one that libzmq writes to last. Again: nothing happens."""
        if not self._socket.closed:
            if self._monitor is not None:
                self._socket.disable_monitor()
            self._socket.close(linger=0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
