"""pyzmq, for the modules that have sockets; where it is not installed, an error that names the extra."""

from __future__ import annotations

from kvcache.core.errors import MissingPackageError

try:
    import zmq
except ModuleNotFoundError as error:
    if error.name != "zmq":
        raise
    raise MissingPackageError(
        "pyzmq is not installed, which publishes and subscribes to KV events: pip install"
        " 'kvcache[events]', or in a checkout pip install '.[events]'",
        name="zmq",
    ) from error

__all__ = ["zmq"]
