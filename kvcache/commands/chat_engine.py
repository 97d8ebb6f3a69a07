"""The engine of `kvcache chat` as its options say: format of K and V, guesses, the tiers below."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from kvcache.bench.demo import Kit
from kvcache.commands.chat_history import ChatHistory
from kvcache.connectors.base import Connector
from kvcache.connectors.chain import ChainConnector
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.disk import DiskConnector
from kvcache.core.errors import ConfigError
from kvcache.core.hashing import Fingerprint
from kvcache.core.layout import Geometry
from kvcache.engine.conversation import DRAFT_TOKENS, Chat
from kvcache.engine.model import Model
from kvcache.engine.speculative import first_layers, joint_geometry

DISK_BYTES = 4 << 30


def make_chat(args: argparse.Namespace, kit: Kit, history: ChatHistory | None) -> Chat:
    """An engine for the conversations of one chat.

    Raises:
        ConfigError: a size, a format or a number of layers that cannot be.
    """
    model = kit.model
    if args.kv_dtype != model.kv_dtype:
        model = Model(model.weights, kv_dtype=args.kv_dtype)
    draft = None
    if args.draft is not None:
        try:
            draft = Model(first_layers(model.weights, args.draft), kv_dtype=args.kv_dtype)
            joint_geometry(model, draft, DRAFT_TOKENS)
        except ConfigError as error:
            raise ConfigError(f"--draft {args.draft}: {error}") from error
    tier = None
    if history is not None or args.host_memory is not None:

        def tier(geometry: Geometry, fingerprint: Fingerprint) -> Connector:
            return _tier(geometry, fingerprint, args, history)

    return Chat(
        model,
        kit.tokenizer,
        device_bytes=args.device_memory,
        tier=tier,
        system=args.system,
        draft=draft,
        lazy_bytes=args.lazy,
    )


def _tier(
    geometry: Geometry,
    fingerprint: Fingerprint,
    args: argparse.Namespace,
    history: ChatHistory | None,
) -> Connector:
    """Host memory, a disk, or one over the other."""
    host = None
    if args.host_memory is not None:
        with _named("CpuConnector.capacity_bytes", "--host-memory"):
            host = CpuConnector(geometry, capacity_bytes=args.host_memory)
    if history is None:
        assert host is not None
        return host
    with _named("DiskConnector.capacity_bytes", "--disk-memory"):
        disk = DiskConnector(
            geometry,
            folder=history.pages,
            fingerprint=fingerprint,
            layout="whole",
            capacity_bytes=args.disk_memory or DISK_BYTES,
        )
    return disk if host is None else ChainConnector(host, disk)


@contextmanager
def _named(setting: str, option: str) -> Iterator[None]:
    """What is wrong with a setting is said of the option that it comes from."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace(setting, option)) from error
