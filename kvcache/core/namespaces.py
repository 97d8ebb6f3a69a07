"""Who may share a prefix: a number for each root of hash chains that is in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvcache.core.events.labels import NamespaceLabel
from kvcache.core.hashing import NATIVE_NAMESPACE, Fingerprint, root_digest
from kvcache.core.values import text

KEPT_NAMESPACES = 1024
"""Above so many, numbers that nothing uses any more are given to new roots."""

KEPT_FORMER = 1024
"""Roots without a number that explanations can still name."""

_LOOKED_AT = 32
"""Numbers that one new root looks at, to find an unused one."""

_NOT_LOOKING = 7
"""Roots after one that found none that do not look: four numbers a root on average. With more of
them the list might grow as fast as the search goes through it, and never be searched to its end."""


class Namespace(NamedTuple):
    """One root."""

    root: bytes
    """32 bytes: first parent of native chains; the namespace of foreign keys."""
    foreign: bool
    salt: str
    lora: str
    lora_version: str
    weights_epoch: int

    def fields(self) -> dict[str, str]:
        """What two roots of one manager may differ in."""
        return {
            "salt": self.salt,
            "lora": self.lora,
            "lora_version": self.lora_version,
            "weights_epoch": str(self.weights_epoch),
        }

    @property
    def outside(self) -> bytes:
        """The name in tiers: zeros for native keys, which hold the root anyway."""
        return self.root if self.foreign else NATIVE_NAMESPACE

    @property
    def label(self) -> NamespaceLabel:
        """What events say of it."""
        foreign = self.root if self.foreign else None
        return NamespaceLabel(lora_name=self.lora or None, salt=self.salt, foreign=foreign)


class Namespaces:
    """Numbers for roots. The number of a root never changes while anything uses it.

    Args:
        uses: how many keys, requests and records still carry a number.
    """

    def __init__(
        self, fingerprint: Fingerprint, hash_unit_tokens: int, uses: Callable[[int], int]
    ) -> None:
        self.fingerprint = fingerprint
        self.entries: list[Namespace] = []
        self.outside: list[bytes] = []
        """`entries[n].outside` by number."""
        self.labels: dict[int, NamespaceLabel] = {}
        """`entries[n].label` by number."""
        self._unit = hash_unit_tokens
        self._uses = uses
        self._numbers: dict[Namespace, int] = {}
        self._versions: dict[str, str] = {}
        self._next = 0
        self._unlooked = 0
        self._former: dict[bytes, Namespace] = {}
        """Roots that have lost their number to another one."""

    def number(self, *, salt: str, lora: str, foreign: bool) -> int:
        """The number of a root, new where it has none."""
        version = self.lora_version(text(lora, "lora"))
        root = root_digest(
            self.fingerprint,
            hash_unit_tokens=self._unit,
            salt=salt,
            lora=lora,
            lora_version=version,
        )
        epoch = self.fingerprint.weights_epoch
        return self._intern(Namespace(root, foreign, salt, lora, version, epoch))

    def _intern(self, entry: Namespace) -> int:
        number = self._numbers.get(entry)
        if number is not None:
            return number
        number = self._unused()
        if number < 0:
            number = len(self.entries)
            self.entries.append(entry)
            self.outside.append(entry.outside)
        else:
            former = self.entries[number]
            del self._numbers[former]
            self._former[former.root] = former
            if len(self._former) > KEPT_FORMER:
                del self._former[next(iter(self._former))]
            self.entries[number], self.outside[number] = entry, entry.outside
        self._numbers[entry] = number
        self.labels[number] = entry.label
        return number

    def take_back(self, number: int) -> None:
        """Nothing came of it: the newest root loses its number, if nothing uses it."""
        if number == len(self.entries) - 1 and not self._uses(number):
            del self._numbers[self.entries.pop()], self.labels[number]
            self.outside.pop()

    def _unused(self) -> int:
        if len(self.entries) < KEPT_NAMESPACES:
            return -1
        if self._unlooked:
            self._unlooked -= 1
            return -1
        for _ in range(_LOOKED_AT):
            self._next = (self._next + 1) % len(self.entries)
            if not self._uses(self._next):
                return self._next
        self._unlooked = _NOT_LOOKING
        return -1

    def matching(self, salt: str | None, lora: str | None) -> list[int]:
        """Numbers of all roots with this salt and this adapter; None: any."""
        return [
            number
            for entry, number in self._numbers.items()
            if salt in {None, entry.salt} and lora in {None, entry.lora}
        ]

    def of_root(self, root: bytes) -> Namespace | None:
        """What is known of a root. O(roots)."""
        return next((e for e in self.entries if e.root == root), self._former.get(root))

    def of_digest(self, outside: bytes) -> list[int]:
        """Numbers under which keys of an outside namespace may be filed."""
        return [number for number, name in enumerate(self.outside) if name == outside]

    def lora_version(self, lora: str) -> str:
        """What the adapter's roots have of its content; empty: nothing was told."""
        return self._versions.get(lora, "")

    def set_lora_version(self, lora: str, version: str) -> None:
        """From now on the adapter has other roots."""
        self._versions[lora] = version
