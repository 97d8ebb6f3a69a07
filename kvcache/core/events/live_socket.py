"""A SUB socket that outlives a frame beyond its limit.

libzmq ends the connection over which such a frame comes, and makes no new one (as it does when a
publisher goes away): whoever connected would hear nothing any more. So it is made anew here, once
all that came over it has been read.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time

import zmq

from kvcache.core.errors import ConfigError
from kvcache.core.events.sockets import MAX_TOPIC_BYTES, bound_incoming, receive

RECONNECT_SECONDS = 0.1
"""After the end of a connection, before the next one."""


class LiveSocket:
    """Messages of one endpoint, by one thread. `ConfigError` if it cannot be bound or connected to."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        topic: str,
        bind: bool,
        hwm: int,
        max_payload_bytes: int,
    ) -> None:
        prefix = topic.encode()
        if len(prefix) > MAX_TOPIC_BYTES:
            raise ConfigError(
                f"the topic has {len(prefix)} bytes: publishers take at most {MAX_TOPIC_BYTES}"
            )
        self._endpoint = endpoint
        self._ended_at = math.inf
        """When a connection ended for which libzmq makes no new one."""
        self._monitor: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        self._socket = context.socket(zmq.SUB)
        try:
            bound_incoming(self._socket, frame_bytes=max_payload_bytes, messages=hwm)
            self._socket.setsockopt(zmq.SUBSCRIBE, prefix)
            self._poller.register(self._socket, zmq.POLLIN)
            if bind:
                self._socket.bind(endpoint)
            else:
                self._monitor = self._socket.get_monitor_socket(
                    zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
                )
                self._poller.register(self._monitor, zmq.POLLIN)
                self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot subscribe to events at {endpoint}: {error}") from error

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
            if time.monotonic() >= self._ended_at + RECONNECT_SECONDS:
                self._read_monitor()
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
        if math.isinf(self._ended_at):
            return
        self._ended_at = math.inf
        with contextlib.suppress(zmq.ZMQError):  # given up by libzmq, so there is none such
            self._socket.disconnect(self._endpoint)
        self._socket.connect(self._endpoint)

    def close(self) -> None:
        """Free the sockets. Again: nothing happens."""
        if self._monitor is not None:
            if not self._socket.closed:
                self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=0)
