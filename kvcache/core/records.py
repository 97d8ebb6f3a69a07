"""What the manager answers with: small records, in tokens and pages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

UNLIMITED = -1
"""As a pool size: pages are made as they are needed. For tests, and replay of an infinite cache."""

LOSS_CAUSES = ("last_block", "no_state", "evicted", "pending", "not_stored")
"""Why a prompt token was not a hit, in the order of `kvc_cause`."""

KEYED_DTYPE = np.dtype(
    {
        "names": ["end", "handle", "ns", "group", "page", "digest"],
        "formats": ["<i8", "<i8", "<u4", "<i4", "<i4", ("u1", 32)],
        "offsets": [0, 8, 16, 20, 24, 28],
        "itemsize": 64,
    }
)
"""A page with its key, as `kvc_keyed` of the C header has it."""


MOVE_DTYPE = np.dtype([("size_class", "<i4"), ("from", "<i4"), ("to", "<i4")])
"""A cached page that changed its place, as `kvc_move` of the C header has it."""

GRANT_DTYPE = np.dtype(
    [(name, "<i8") for name in ("hit_tokens", "start", "end", "load", "load_pages")]
)
"""A `Grant`, as `kvc_grant` of the C header has it."""

BLOCKAGES = ("", "frozen", "preempt", "wait", "restart")
"""Why there was no space, in the order of `kvc_blockage_reason`."""


class Hit(NamedTuple):
    """What a lookup found. `hit_tokens` plus the sum of `lost` is the prompt's length."""

    hit_tokens: int
    device_tokens: int
    """The part of the hit that needs no tier (0 if the device alone has no state there)."""
    pending_tokens: int
    """What `hit_tokens` would be, at least, once all pending writes and loads are done."""
    junction: int
    """Where the full groups went on and no state or span was kept; 0 if none was missed."""
    lost: dict[str, int]
    """Tokens by cause, keys from `LOSS_CAUSES`."""


class Grant(NamedTuple):
    """Tokens [start, end) may be computed now; or a load must end first (`load` above 0)."""

    hit_tokens: int
    start: int
    end: int
    load: int
    load_pages: int


class StatePlan(NamedTuple):
    """Where a recurrent group's state comes from and goes in one grant."""

    source: int
    """Page with the state at the grant's start; -1: the zero state."""
    positions: NDArray[np.int64]
    """After so many tokens of the request ..."""
    pages: NDArray[np.int32]
    """... the state is written to this page (equal to the previous one: update in place)."""


class RequestInfo(NamedTuple):
    """Counts of one request, in tokens."""

    tokens: int
    prompt: int
    computed: int
    committed: int
    granted: int
    units: int
    state: str
    """`waiting` (holds no pages), `running` or `loading`."""
    namespace: bytes
    """32 bytes: zeros for native keys, else the digest that its foreign keys live under."""
    load: int
    """The load that it waits for; 0: none."""


class PoolStats(NamedTuple):
    """Pages of one page pool."""

    capacity: int
    created: int
    free: int
    cached: int
    held: int
    keyed: int
    evictions: int


class ClassStats(NamedTuple):
    """Slabs of one size class, and its pages in them."""

    slabs: int
    free: int
    cached: int
    """With a key and no reference: evictable."""
    held: int


class ArenaStats(NamedTuple):
    """The arena: slabs, and what became of them."""

    slabs: int
    created: int
    empty: int
    moved_pages: int
    reclaimed_slabs: int
    evictions: int
    classes: tuple[ClassStats, ...]


class GroupStats(NamedTuple):
    """Keys of one group, pending ones included."""

    keyed: int
    evictions: int


class ManagerStats(NamedTuple):
    """Counts over the whole manager."""

    open_requests: int
    open_steps: int
    open_loads: int
    pinned: int
    keyed_dropped: int
    events_dropped: int
    frozen: bool
    """The oldest request waits for space: nobody else gets any."""
