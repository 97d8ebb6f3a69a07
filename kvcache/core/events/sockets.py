"""Sockets that a stranger may write to: how large a frame may be, how many messages wait.

libzmq ends the connection of a peer whose frame is larger, and stops reading from one whose
messages wait. What it cannot bound is the number of frames of one message, of connections, and of
one peer's subscriptions: keep the endpoints in a network that is trusted.
"""

from __future__ import annotations

from kvcache.core.events.pyzmq import zmq

MAX_REQUEST_BYTES = 1024
"""Of a frame that a client sends to a publisher: a topic, or a number. The handshake needs some too."""
MAX_TOPIC_BYTES = 1000
"""That a subscriber may ask for: as a request it is a little longer."""
MAX_REQUESTS = 64
"""Messages of one client that wait to be read."""
MAX_ANSWERS = 64
"""Batches that wait for one client, or in it, during a replay."""

_KEPT_FRAMES = 8


def bound_incoming(socket: zmq.Socket[bytes], *, frame_bytes: int, messages: int) -> None:
    """Before bind or connect. `messages`: per connection.

    A connection that ends is given the LINGER of that moment, and ZeroMQ's default is to wait for
    ever for a peer to read. So it is 0 from the start, not only from `close` on.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max(frame_bytes, MAX_REQUEST_BYTES))
    socket.setsockopt(zmq.RCVHWM, messages)


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """A message that is there. Of one with too many frames for any use, the first few."""
    frames = [socket.recv(zmq.NOBLOCK)]
    while socket.getsockopt(zmq.RCVMORE):
        frame = socket.recv(zmq.NOBLOCK)  # a message arrives as a whole
        if len(frames) < _KEPT_FRAMES:
            frames.append(frame)
    return frames
