"""What the manager answers with: small records, in tokens and pages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

UNLIMITED = -1
"""As a pool size: pages are made as they are needed. For tests, and replay of an infinite cache."""

MOST_TOKENS = 2**47
"""Of a request, and of a retention interval: `kMostTokens` of the core."""

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
    """What a lookup found. `hit_tokens` plus the sum of `lost` is what the request knows, in tokens."""

    hit_tokens: int
    """Longest prefix that every group can serve, device and tier together: what need not be computed."""
    device_tokens: int
    """The part of the hit that needs no tier (0 if the device alone has no state there)."""
    pending_tokens: int
    """What `hit_tokens` would be, at least, once all pending writes and loads are done. Above
    `hit_tokens`: another request computes or loads the same now; waiting a step saves the difference."""
    junction: int
    """Where the full groups went on and no state or span was kept; 0 if none was missed."""
    lost: dict[str, int]
    """Tokens by cause, keys from `LOSS_CAUSES`."""


class Grant(NamedTuple):
    """Tokens [start, end) may be computed now; or a load must end first (`load` above 0)."""

    hit_tokens: int
    """Prefix that this call took over from the cache; 0 for a request that was running already."""
    start: int
    """First token to compute."""
    end: int
    """One past the last, drafts included; it may be sooner than what was asked for."""
    load: int
    """0; or the load that must end before anything is computed: then `start` is `end`."""
    load_pages: int
    """Pages that the load fills: the length of `load_items(load)`."""


class StatePlan(NamedTuple):
    """Where a recurrent group's state comes from and goes in one grant."""

    source: int
    """Page with the state at the grant's start; -1: the zero state."""
    positions: NDArray[np.int64]
    """After so many tokens of the request ..."""
    pages: NDArray[np.int32]
    """... the state is written to this page (equal to the previous one: update in place)."""


class RequestInfo(NamedTuple):
    """Counts of one request, in tokens where nothing else is said."""

    tokens: int
    """Known: prompt, and what `extend` has told."""
    prompt: int
    """Of them, those that it was opened with."""
    computed: int
    """Whose step, or load, has ended."""
    committed: int
    """Computed, or written by an open step."""
    granted: int
    """Up to where it has pages: the end of its last grant."""
    units: int
    """Full hash units with a digest: rows of `digests`."""
    state: str
    """`waiting` (holds no pages), `running` or `loading`."""
    namespace: bytes
    """32 bytes: zeros for native keys, else the digest that its foreign keys live under."""
    load: int
    """The load that it waits for; 0: none."""


class PoolStats(NamedTuple):
    """Pages of one page pool."""

    capacity: int
    """Most that it may have."""
    created: int
    """That exist so far."""
    free: int
    """Without a key and without a user."""
    cached: int
    """With a key and no reference: evictable."""
    held: int
    """With a reference."""
    keyed: int
    """With a key, held or cached."""
    evictions: int
    """Since the start."""


class ClassStats(NamedTuple):
    """Slabs of one size class, and its pages in them."""

    slabs: int
    """That the class owns now."""
    free: int
    """Pages without a key and without a user."""
    cached: int
    """With a key and no reference: evictable."""
    held: int
    """Pages that requests, steps, loads or pins use."""


class ArenaStats(NamedTuple):
    """The arena: slabs, and what became of them. Counts of events are since the start."""

    slabs: int
    """Most that it may have; of `UNLIMITED` as many as can be numbered."""
    created: int
    """That exist so far: made one by one as they are needed."""
    empty: int
    """Created, and owned by no class: free for any."""
    moved_pages: int
    """Cached pages that changed their place (`take_moves`)."""
    reclaimed_slabs: int
    """Emptied of one class for another."""
    evictions: int
    """Keys that went for space, over all groups."""
    classes: tuple[ClassStats, ...]
    """By size class: `geometry.class_of_group` says which groups it has."""


class GroupStats(NamedTuple):
    """Keys of one group, pending ones included."""

    keyed: int
    """In its index now."""
    evictions: int
    """Of its keys, since the start."""


class ManagerStats(NamedTuple):
    """Counts over the whole manager, as they are now."""

    open_requests: int
    """Opened, and neither finished nor aborted."""
    open_steps: int
    """Begun and not ended."""
    open_loads: int
    """That have pages set aside: begun by a grant and not ended, late ones too."""
    pinned: int
    """References of outside readers (`pin`)."""
    keyed_dropped: int
    """Records that `take_keyed` will not give, since nobody read for long: tiers miss these pages."""
    events_dropped: int
    """Keys that `take_events` did not tell, for the same reason: it then begins with AllBlocksCleared."""
    frozen: bool
    """The oldest request waits for space: nobody else gets any."""
