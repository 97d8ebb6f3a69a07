"""Settings of a publisher or a subscriber on their way in: `ConfigError` names whatever is wrong.

ZeroMQ takes most of them as 32-bit numbers, and its 0 often means "no limit": neither is let through.
"""

from __future__ import annotations

from kvcache.core.errors import ConfigError
from kvcache.core.events.pyzmq import zmq
from kvcache.core.events.sockets import MAX_TOPIC_BYTES
from kvcache.core.values import MOST_SECONDS, shown, text, whole

MOST = 2**31 - 1


def count(value: object, what: str, *, least: int = 1) -> int:
    """A whole number that fits 32 bits."""
    return whole(value, what, least=least, most=MOST)


def seconds(value: object, what: str) -> float:
    """A time above 0, of days at most."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{what} is {shown(value)}: it must be a number of seconds")
    if not 0 < value <= MOST_SECONDS:
        raise ConfigError(
            f"{what} is {shown(value)}: it must be above 0 and at most {MOST_SECONDS:.0f}"
        )
    return float(value)


def topic_bytes(value: object, what: str) -> bytes:
    """A topic that a subscriber's request has room for."""
    made = text(value, what).encode()
    if len(made) > MAX_TOPIC_BYTES:
        raise ConfigError(f"{what} has {len(made)} bytes: a topic has at most {MAX_TOPIC_BYTES}")
    return made


def context_or_shared(value: object, what: str) -> zmq.Context[zmq.Socket[bytes]]:
    """`value`, or the context that all of the process share."""
    if value is None:
        return zmq.Context.instance()
    if not isinstance(value, zmq.Context) or value.closed:
        raise ConfigError(f"{what} is {shown(value)}: it must be a zmq.Context that is open")
    return value
