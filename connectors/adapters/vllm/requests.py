"""What the connector knows of one of vLLM's requests: its keys, and how far it has come with them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcache.core.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.request import Request

DIGEST_BYTES = 32
"""Of a key here: shorter hashes of vLLM's are filled up with zeros."""


class BlockDigests:
    """A request's block hashes as an array, taken up as they come. O(new ones)."""

    def __init__(self, hash_tokens: int) -> None:
        self._hash_tokens = hash_tokens
        self._rows = np.zeros((0, DIGEST_BYTES), np.uint8)
        self._count = 0
        self.hash_bytes = DIGEST_BYTES

    def update(self, hashes: list[bytes]) -> bool:
        """Take up what is new; True where earlier ones have changed (a stream went on differently)."""
        known = self._count
        changed = known > len(hashes) or (
            known > 0 and self._rows[known - 1, : self.hash_bytes].tobytes() != hashes[known - 1]
        )
        known = 0 if changed else known
        if len(hashes) > known:
            self._append(known, hashes[known:] if known else hashes)
        self._count = len(hashes)
        return changed

    def _append(self, known: int, new: list[bytes]) -> None:
        self.hash_bytes = size = len(new[0])
        if size > DIGEST_BYTES:
            raise ConfigError(
                f"block hashes of {size} bytes: at most {DIGEST_BYTES} are kept, set"
                " --prefix-caching-hash-algo sha256_cbor"
            )
        rows = np.frombuffer(b"".join(new), np.uint8).reshape(-1, size)
        if not known and size == DIGEST_BYTES:
            self._rows = rows
            return
        end = known + len(new)
        if end > len(self._rows) or not self._rows.flags.writeable:
            room = np.zeros((end + end // 4, DIGEST_BYTES), np.uint8)
            room[:known] = self._rows[:known]
            self._rows = room
        self._rows[known:end, :size] = rows

    @property
    def tokens(self) -> int:
        """As many have hashes."""
        return self._count * self._hash_tokens

    def at(self, tokens: int, tag: int = 0) -> NDArray[np.uint8]:
        """`[32]`: the key of the prefix of so many tokens, in a group with this tag."""
        row: NDArray[np.uint8] = self._rows[tokens // self._hash_tokens - 1].copy()
        row[-1] ^= tag
        return row

    def rows(self, step: int, first: int, last: int, tag: int = 0) -> NDArray[np.uint8]:
        """`[n, 32]`: the keys of the prefixes of `(first + 1) * step` tokens up to `last * step`.

        Fewer where these have no hashes yet. Not to be written to.
        """
        scale = step // self._hash_tokens
        last = min(last, self._count // scale)
        rows = self._rows[(first + 1) * scale - 1 : last * scale : scale]
        if tag:
            rows = rows.copy()
            rows[:, -1] ^= tag
        return rows


def key_of(block_hash: bytes, tag: int) -> bytes:
    """`DIGEST_BYTES` of one: what the tier knows a block of a group with this tag by."""
    key = bytearray(block_hash.ljust(DIGEST_BYTES, b"\0"))
    key[-1] ^= tag
    return bytes(key)


@dataclass(slots=True)
class Hit:
    """What the last lookup of a request found, and the tier has pinned."""

    version: Hashable
    """Of the tier."""
    begin: int
    """Tokens on the device."""
    most: int
    """Tokens that were asked for."""
    end: int
    tails: list[int]
    """Of each group, tokens of the shorter prefix under which the tier has the last block; 0: whole."""
    faults: int
    """Loads of the request that had failed."""
    repeats: int = 0
    """How often it was asked for again though the tier had changed."""


@dataclass(slots=True)
class Faults:
    """What could not be loaded for a request: it is not tried again."""

    loads: int = 0
    asked: int = 0
    """How often more was promised since the last one, and not loaded."""
    lost: set[bytes] = field(default_factory=set)
    """Its keys, tags included."""


@dataclass(slots=True, eq=False)
class Tracked:
    """One of vLLM's requests."""

    number: int
    """What the tier knows it by."""
    request: Request
    digests: BlockDigests
    offered: list[int]
    """Of each group, blocks that were offered to the tier, or need not be."""
    hit: Hit | None = None
    asked: bool = False
    """Whether the tier holds something for it, or was asked to."""
    loading: int = 0
    """Tokens up to which a load is in flight; 0: none."""
    tail_offered: bool = False
    faults: Faults = field(default_factory=Faults)

    def restart(self) -> None:
        """Its blocks are gone, or will be other ones."""
        self.offered = [0] * len(self.offered)
        self.tail_offered = False
