"""The publisher's sockets, made and closed together: PUB, ROUTER for replays, and a pair to be woken by."""

from __future__ import annotations

import contextlib
import socket

from kvcache.core.errors import ConfigError
from kvcache.core.events.endpoints import for_rank, is_bound, require_connectable
from kvcache.core.events.pyzmq import zmq
from kvcache.core.events.replay_server import ReplayServer
from kvcache.core.events.sockets import MAX_REQUEST_BYTES, MAX_REQUESTS, bound_incoming


class PublisherSockets:
    """Open from the start. `wake` is for any thread, the rest for the one that publishes.

    ZeroMQ's sockets are made by the thread that starts the other one, then used and closed by that
    one alone. The end that wakes it is written to by any thread, so it is closed last, by
    `close_waker`: else a byte could go to whatever was opened under its number meanwhile.

    Args:
        bind: None: vLLM's rule (`endpoints.is_bound`).

    Raises:
        ConfigError: an endpoint that cannot be bound or connected to; nothing stays open.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        replay_endpoint: str | None,
        *,
        rank: int,
        bind: bool | None,
        hwm: int,
    ) -> None:
        self.pub = context.socket(zmq.PUB)
        self.router = context.socket(zmq.ROUTER) if replay_endpoint is not None else None
        self.wake_read, self._wake_write = socket.socketpair()
        self.wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self.replay_endpoint: str | None = None
        what, place = "events cannot be published at", endpoint
        try:
            place = for_rank(endpoint, rank)
            bound_incoming(self.pub, frame_bytes=MAX_REQUEST_BYTES, messages=MAX_REQUESTS)
            self.pub.setsockopt(zmq.SNDHWM, hwm)
            if is_bound(place) if bind is None else bind:
                self.pub.bind(place)
            else:
                require_connectable(place, instead="give the subscriber's host, or bind=True")
                self.pub.connect(place)
            self.endpoint = self.pub.get_string(zmq.LAST_ENDPOINT)
            """Where it really is: a port of 0 has become the port given."""
            if self.router is not None and replay_endpoint is not None:
                what, place = "replays (replay_endpoint) cannot be served at", replay_endpoint
                place = for_rank(replay_endpoint, rank)
                _require_other(endpoint, replay_endpoint)
                ReplayServer.prepare(self.router)
                self.router.bind(place)
                self.replay_endpoint = self.router.get_string(zmq.LAST_ENDPOINT)
        except (zmq.ZMQError, ConfigError) as error:
            self.close(0)
            self.close_waker()
            raise ConfigError(f"{what} {place}: {error}") from error

    def wake(self) -> None:
        """Ends the wait for `wake_read`."""
        with contextlib.suppress(OSError):  # full: the thread is awake; no reader: it has ended
            self._wake_write.send(b"\0")

    def awake(self) -> None:
        """What woke the thread has been seen."""
        with contextlib.suppress(BlockingIOError):
            self.wake_read.recv(4096)

    def close(self, linger_milliseconds: int) -> None:
        """Free what the thread uses; what was sent has so long to leave."""
        self.pub.close(linger=linger_milliseconds)
        if self.router is not None:
            self.router.close(linger=linger_milliseconds)
        self.wake_read.close()

    def close_waker(self) -> None:
        """After the thread has ended: `wake` does nothing any more."""
        self._wake_write.close()


def _require_other(endpoint: str, replay_endpoint: str) -> None:
    """`ConfigError` for one address twice: a second ipc socket takes the path away without an error."""
    if endpoint == replay_endpoint and not endpoint.endswith((":0", ":*")):
        raise ConfigError(
            "endpoint and replay_endpoint are the same: give each an address of its own"
        )
