"""Two tiers as one connector: host memory over a disk, or host memory over any other tier."""

from __future__ import annotations

from kvcache.connectors.base import Connector, TierWorker
from kvcache.connectors.chain_scheduler import ChainScheduler
from kvcache.connectors.chain_worker import ChainWorker
from kvcache.core.errors import ConfigError
from kvcache.core.values import flag, shown


class ChainConnector(Connector):
    """A connector that looks in `upper`, then in `lower`.

    Stores go to the upper tier and are written to the lower one in the background, from the upper
    one's memory: a slow disk holds no device page and delays no store. What the upper tier evicts
    before its turn has come never gets there, and counts as a dropped store. Loads of what only the
    lower tier has pass through the upper one, and stay there. `Offload.drain` (or the worker's
    `flush`) waits for the background; `close` does not.

    Args:
        upper: a tier in host memory of this process (`TierWorker.slot_regions`), such as
            `CpuConnector`.
        lower: any tier of the same geometry. Both belong to the chain from now on.
        behind: False: nothing is written to the lower tier, only read.

    Raises:
        ConfigError: no connectors, one twice, or an upper tier that is not in host memory.
        MisuseError: an upper tier that is closed.
    """

    __slots__ = ()

    def __init__(self, upper: Connector, lower: Connector, *, behind: bool = True) -> None:
        for name, tier in (("upper", upper), ("lower", lower)):
            if not isinstance(tier, Connector):
                raise ConfigError(f"ChainConnector.{name} is {shown(tier)}: give a Connector")
        if upper.worker is lower.worker or upper.scheduler is lower.scheduler:
            raise ConfigError("ChainConnector.upper and lower are one connector: give two")
        slots = upper.worker.slot_regions
        if slots is None:
            raise ConfigError(
                f"ChainConnector.upper, {upper.name!r}, is not in host memory: the tier below it"
                " would have nothing to read from and write to; put a CpuConnector above it"
            )
        scheduler = ChainScheduler(
            upper,
            lower,
            page_bytes=[region.page_bytes for region in slots],
            behind=flag(behind, "ChainConnector.behind"),
            most_behind=sum(region.pages for region in slots),
        )
        worker: TierWorker = ChainWorker(upper, lower, scheduler)
        super().__init__(f"{upper.name}+{lower.name}", scheduler, worker, upper.medium)
