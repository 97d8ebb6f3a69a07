"""Stamps instead of bytes: what each page holds, and the key under which it should be found."""

from __future__ import annotations

import hashlib

import numpy as np
from laws.oracle import Oracle, Prefix, Space
from laws.records import Page, Request, Work

from kvcache.core.hashing import NATIVE_NAMESPACE, Fingerprint, root_digest
from kvcache.core.records import StatePlan

GARBAGE: Prefix = (("garbage", ""), ())


class Content:
    """For each token slot of an attention page the prefix that ends with its token; for a state
    page the prefix that it summarises.
    """

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.pages: dict[Page, list[Prefix]] = {}

    def slots(self, group: int) -> int:
        return self.oracle.blocks[group] if self.oracle.is_attention[group] else 1

    def expected(self, group: int, prefix: Prefix) -> list[Prefix]:
        """What a page holds whose key is `prefix`."""
        space, tokens = prefix
        first = len(tokens) - self.slots(group) + 1
        return [(space, tokens[:end]) for end in range(first, len(tokens) + 1)]

    def scribble(self, page: Page) -> None:
        self.pages[page] = [GARBAGE] * self.slots(page[0])

    def fill(self, page: Page, prefix: Prefix) -> None:
        self.pages[page] = self.expected(page[0], prefix)

    def write(self, work: Work) -> None:
        """The writes of one request's step land; a dropped request's are of no known content."""
        if not work.live:
            for page in work.written(self.oracle.blocks):
                self.scribble(page)
            return
        for group, table in work.tables.items():
            block = self.oracle.blocks[group]
            for at in range(work.start, work.end):
                self.pages[group, table[at // block]][at % block] = work.request.prefix(at + 1)
        for group, plan in work.plans.items():
            for position, page in zip(plan.positions.tolist(), plan.pages.tolist(), strict=True):
                self.fill((group, page), work.request.prefix(position))

    def verify_reads(
        self,
        request: Request,
        end: int,
        tables: dict[int, list[int]],
        plans: dict[int, StatePlan],
    ) -> None:
        """Law 3: what is read for tokens from `end` on was written for exactly this prefix."""
        for group, table in tables.items():
            block = self.oracle.blocks[group]
            for at in range(end):
                stamp = self.pages[group, table[at // block]][at % block]
                assert stamp == request.prefix(at + 1), f"token {at} of group {group}: {stamp}"
        for group, plan in plans.items():
            if end:
                (stamp,) = self.pages[group, plan.source]
                assert stamp == request.prefix(end), f"state {end} of group {group}: {stamp}"


class Keys:
    """Digests by hashlib, for native and foreign prefixes."""

    def __init__(self, hash_unit_tokens: int) -> None:
        self.unit = hash_unit_tokens
        self._known: dict[Prefix, bytes] = {}

    def root(self, space: Space) -> bytes:
        return root_digest(Fingerprint(), hash_unit_tokens=self.unit, salt=space[1])

    def namespace(self, space: Space) -> bytes:
        return self.root(space) if space[0] == "foreign" else NATIVE_NAMESPACE

    def digest(self, prefix: Prefix) -> bytes:
        """Key of a prefix, a whole number of hash units long."""
        found = self._known.get(prefix)
        if found is None:
            space, tokens = prefix
            if space[0] == "foreign":
                found = hashlib.sha256(repr(tokens).encode()).digest()
            else:
                before = tokens[: -self.unit]
                parent = self.digest((space, before)) if before else self.root(space)
                block = np.array(tokens[-self.unit :], "<i4").tobytes()
                domain = b"kvcache/block/1".ljust(64, b"\0")
                found = hashlib.sha256(domain + parent + block).digest()
            self._known[prefix] = found
        return found
