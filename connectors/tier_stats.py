"""What a tier counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GroupFill:
    """Slots of one group. A group of a hybrid that evicts alone has too few: see `docs/tiers.md`.

    Of a chain both tiers together: each tier's own is in the `stats()` of its own scheduler. A group
    that no tier keeps (private to a request) always has room.
    """

    slots: int
    used_slots: int
    evicted_pages: int

    def __add__(self, other: GroupFill) -> GroupFill:
        return GroupFill(
            self.slots + other.slots,
            self.used_slots + other.used_slots,
            self.evicted_pages + other.evicted_pages,
        )


@dataclass(slots=True)
class TierStats:
    """Counters since the start, and the present fill."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    pinned_pages: int = 0
    stored_pages: int = 0
    loaded_pages: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    store_seconds: float = 0.0
    load_seconds: float = 0.0
    evicted_pages: int = 0
    dropped_store_pages: int = 0
    """Not stored: the tier was full of pinned pages, or the device evicted them before."""
    failed_pages: int = 0
    gone_pages: int = 0
    """Not there, or damaged, when they were to be loaded or were counted: their keys went."""
    late_transfers: int = 0
    unknown_ids: int = 0
    ready_bytes: int = 0
    """Of host memory: so much has been made ready. In the end all of it."""
    not_ready: str = ""
    """Why no more is made ready in the background: what is stored tries for itself."""
    busy_calls: int = 0
    """Of memory that processes share: calls that were not made, as a process is stopped in one."""
    repairs: int = 0
    """How often its tables were made anew after a death in the middle of a change."""
    groups: tuple[GroupFill, ...] = ()
    """Of a tier that has slots, for each group."""
    errors: dict[str, int] = field(default_factory=dict)
    """Transfers that ended with an error, by its kind."""
