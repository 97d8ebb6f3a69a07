"""ZeroMQ endpoints as vLLM 0.33.0 reads them: who binds, and one port per data-parallel rank."""

from __future__ import annotations

from kvcache.core.errors import ConfigError

MAX_PORT = 65_535


def is_bound(endpoint: str) -> bool:
    """Whether a publisher binds this endpoint; it connects to any other."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def for_rank(endpoint: str, rank: int) -> str:
    """The endpoint of one data-parallel rank: tcp ports count up, names get a suffix.

    Ports 0 and `*` and rank 0 change nothing. `ConfigError` for what is neither tcp, ipc nor inproc.
    """
    if rank < 0:
        raise ConfigError(f"data_parallel_rank is {rank}: it must be 0 or more")
    scheme, _, address = endpoint.partition("://")
    if scheme not in {"tcp", "ipc", "inproc"} or not address:
        raise ConfigError(
            f"endpoint {endpoint!r}: give tcp://HOST:PORT, ipc://PATH or inproc://NAME"
        )
    if scheme != "tcp":
        return f"{endpoint}_dp{rank}" if rank else endpoint
    host, colon, port = address.rpartition(":")
    if colon and port == "*":
        return endpoint
    if not colon or not port.isdecimal():
        raise ConfigError(f"endpoint {endpoint!r} has no port: give tcp://HOST:PORT")
    if len(port) > len("65535") or int(port) + rank > MAX_PORT:
        raise ConfigError(
            f"endpoint {endpoint!r} of rank {rank}: the port plus the rank is above {MAX_PORT}"
        )
    return f"tcp://{host}:{int(port) + rank}" if int(port) else endpoint


def require_connectable(endpoint: str, *, instead: str) -> None:
    """`ConfigError` for what is no endpoint, and for a `*`, which only who binds can use."""
    for_rank(endpoint, 0)
    if endpoint.startswith("tcp://") and "*" in endpoint:
        raise ConfigError(
            f"endpoint {endpoint!r} cannot be connected to, a * is for who binds it: {instead}"
        )
