"""Stamps instead of bytes: what each page holds, and the digest under which it should be found."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from laws.oracle import Key, Oracle, Space
from laws.prompts import Token, link
from laws.records import Page, Request, Work

from kvcache.core.hashing import NATIVE_NAMESPACE, Fingerprint, root_digest

Stamp = tuple[int, Space, tuple[Token, ...]]
"""Group, space, and the tokens that an entry depends on."""
GARBAGE: Stamp = (-1, ("garbage",), ())
NOBODY: list[Stamp] = []


class Content:
    """For each token slot of a page the stamp of its entry; one slot for a state or private page.

    Pages are named by size class and number: groups of one class share the numbers.
    """

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.pages: dict[Page, list[Stamp]] = {}

    def stamp(self, group: int, space: Space, tokens: Iterable[Token], end: int) -> Stamp:
        """Of the entry of token `end - 1`: drafts depend on the tokens that follow, too."""
        last = end + self.oracle.rules[group].lookahead_tokens
        return (group, space, tuple(tokens)[:last])

    def expected(self, group: int, key: Key) -> list[Stamp]:
        """What a page holds that is found under `key`."""
        if self.oracle.rules[group].kind == "state":
            return [(group, key.space, key.tokens)]
        first = key.end - self.oracle.blocks[group] + 1
        ends = range(first, key.end + 1)
        return [self.stamp(group, key.space, key.tokens, end) for end in ends]

    def scribble(self, page: Page) -> None:
        self.pages[page] = [GARBAGE]

    def move(self, old: Page, new: Page) -> None:
        self.pages[new] = self.pages.pop(old)
        self.scribble(old)

    def write(self, work: Work) -> None:
        """The writes of one request's step land; a dropped request's are of no known content."""
        if not work.live:
            for page in work.written():
                self.scribble(page)
            return
        request = work.request
        for group, table in work.tables.items():
            for end in range(work.start + 1, work.end + 1):
                self._put(work, group, table, end)
        for group, plan in work.plans.items():
            for position, page in zip(plan.positions.tolist(), plan.pages.tolist(), strict=True):
                if position > work.end:  # after a draft that was wrong
                    self.scribble(work.page(group, page))
                    continue
                key = Key(request.space, tuple(request.tokens[:position]), position)
                self.pages[work.page(group, page)] = self.expected(group, key)
        for group, table in work.private.items():
            for page in table:
                self.pages[work.page(group, page)] = [self._private(group, request)]

    def _put(self, work: Work, group: int, table: list[int], end: int) -> None:
        block = self.oracle.blocks[group]
        number = table[(end - 1) // block]
        if number < 0:
            return  # of a transient group: nobody will read it
        page = work.page(group, number)
        slots = self.pages[page]
        if len(slots) != block:
            slots = self.pages[page] = [GARBAGE] * block
        request = work.request
        slots[(end - 1) % block] = self.stamp(group, request.space, request.tokens, end)

    def complete_drafts(self, request: Request, known: int) -> None:
        """The draft entries of the last tokens depend on tokens that have just become known."""
        for group in self.oracle.drafts:
            block, table = self.oracle.blocks[group], request.tables.get(group, [])
            first = max(0, known - self.oracle.rules[group].lookahead_tokens)
            for end in range(first + 1, min(request.computed, len(table) * block) + 1):
                number = table[(end - 1) // block]
                slots = self.pages.get(request.page(group, number), NOBODY)
                if number >= 0 and len(slots) == block and slots[(end - 1) % block] != GARBAGE:
                    stamp = self.stamp(group, request.space, request.tokens, end)
                    slots[(end - 1) % block] = stamp

    def _private(self, group: int, request: Request) -> Stamp:
        return (group, ("private", str(request.handle)), ())

    def verify_reads(self, work: Work) -> None:
        """Law 3: what is read for tokens from `start` on was written for exactly this prefix."""
        request, start = work.request, work.start
        for group, table in work.tables.items():
            if group not in self.oracle.drafts:
                self._verify_table(work, group, table)
        for group, plan in work.plans.items():
            if start:
                (stamp,) = self.pages[work.page(group, plan.source)]
                right = (group, request.space, tuple(request.tokens[:start]))
                assert stamp == right, f"state {start} of group {group}: {stamp}"
        for group, table in work.private.items():
            for page in table if request.wrote_private else ():
                (stamp,) = self.pages[work.page(group, page)]
                assert stamp == self._private(group, request), f"private {page}: {stamp}"

    def _verify_table(self, work: Work, group: int, table: list[int]) -> None:
        block, request = self.oracle.blocks[group], work.request
        for end in range(self.oracle.begin(group, work.start) + 1, work.start + 1):
            number = table[(end - 1) // block]
            assert number >= 0, f"group {group} gave token {end - 1} up, which {work.start} reads"
            slots = self.pages[work.page(group, number)]
            stamp = slots[(end - 1) % block] if len(slots) == block else GARBAGE
            right = self.stamp(group, request.space, request.tokens, end)
            assert stamp == right, f"token {end - 1} of group {group}: {stamp}"


class Digests:
    """Digests by hashlib, for native and foreign keys."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self._units: dict[tuple[Space, tuple[Token, ...]], bytes] = {}
        self._roots: dict[Space, bytes] = {}
        self._keys: dict[tuple[int, Key], bytes] = {}

    def root(self, space: Space) -> bytes:
        found = self._roots.get(space)
        if found is None:
            _, salt, lora, version, epoch = (*space, "", "0", "0")[:5] if len(space) == 2 else space
            found = root_digest(
                Fingerprint(weights_epoch=int(epoch)),
                hash_unit_tokens=self.oracle.unit,
                salt=salt,
                lora=lora,
                lora_version=version if version != "0" else "",
            )
            self._roots[space] = found
        return found

    def namespace(self, space: Space) -> bytes:
        return self.root(space) if space[0] == "foreign" else NATIVE_NAMESPACE

    def of(self, group: int, key: Key) -> bytes:
        """The digest of the last unit that a key covers; a part of a unit says which one."""
        block = self.oracle.blocks[group]
        found = self._keys.get((block, key))
        if found is None:
            found = self._keys[block, key] = self._of(block, key)
        return found

    def _of(self, block: int, key: Key) -> bytes:
        digest = self.unit(key.space, key.tokens)
        if block >= self.oracle.unit:
            return digest
        after = -key.end % self.oracle.unit // block
        return digest[:28] + (int.from_bytes(digest[28:], "little") ^ after).to_bytes(4, "little")

    def unit(self, space: Space, tokens: tuple[Token, ...]) -> bytes:
        """The link of the chain that ends with these tokens, a whole number of units."""
        found = self._units.get((space, tokens))
        if found is None:
            if space[0] == "foreign":
                found = hashlib.sha256(repr(tokens).encode()).digest()
            else:
                before = tokens[: -self.oracle.unit]
                parent = self.unit(space, before) if before else self.root(space)
                found = link(parent, tokens[-self.oracle.unit :])
            self._units[space, tokens] = found
        return found
