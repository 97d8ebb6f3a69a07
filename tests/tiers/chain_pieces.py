"""Host memory over a disk, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiers.disk_pieces import disk

from kvcache.connectors.base import Connector
from kvcache.connectors.chain import ChainConnector
from kvcache.connectors.chain_scheduler import ChainScheduler
from kvcache.connectors.cpu import CpuConnector, native_copy
from kvcache.connectors.testing import Rig, Setup


def host_over_disk(
    setup: Setup,
    folder: Path,
    *,
    host_pages: tuple[int, ...] | None = None,
    behind: bool = True,
    gate_disk: bool = False,
    **options: Any,
) -> Connector:
    """`before_copy` holds up the host tier, or only the disk."""

    def copy(*args: Any) -> None:
        if not gate_disk:
            setup.before_copy()
        native_copy(*args)

    upper = CpuConnector(
        setup.geometry,
        pages=host_pages or setup.pages,
        queue_depth=setup.queue_depth,
        deadline_seconds=setup.deadline_seconds,
        events=setup.events,
        copy=copy,
    )
    below = setup if gate_disk else Setup(**{**_fields(setup), "before_copy": _pass})
    return ChainConnector(upper, disk(below, folder, **options), behind=behind)


def tiers_of(connector: Connector) -> tuple[Connector, Connector]:
    """The upper one and the lower one."""
    assert isinstance(connector.scheduler, ChainScheduler)
    return connector.scheduler.tiers


def tiers(r: Rig) -> tuple[Connector, Connector]:
    """Those of a rig's chain."""
    return tiers_of(r.connector)


def _pass() -> None:
    """Hold nothing up."""


def _fields(setup: Setup) -> dict[str, Any]:
    return {name: getattr(setup, name) for name in Setup.__dataclass_fields__}
