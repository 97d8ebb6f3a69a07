"""Where the pages of one group lie in memory."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.core.errors import ConfigError
from kvcache.core.values import sequence, whole


@dataclass(frozen=True, slots=True)
class PageRegion:
    """Memory of one group's pages: page p lies at `address + p * step_bytes`. Not owned.

    Pages of a sharded model lie in several memories, one of each rank: then `address` is 0, and part
    i of page p lies at `a + p * step_bytes`, `page_bytes / len(parts)` bytes long, for each address a
    of `parts[i]`: ranks that hold the same. A store reads the first of them, a load writes them all.
    """

    address: int
    page_bytes: int
    pages: int
    stride_bytes: int = 0
    """From a page to the next; 0: they touch."""
    parts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("address", "page_bytes", "stride_bytes"):
            object.__setattr__(self, name, whole(getattr(self, name), f"PageRegion.{name}"))
        object.__setattr__(self, "pages", whole(self.pages, "PageRegion.pages", most=2**31 - 1))
        parts = tuple(
            tuple(
                whole(a, "an address of PageRegion.parts") for a in sequence(part, "a part of it")
            )
            for part in sequence(self.parts, "PageRegion.parts")
        )
        object.__setattr__(self, "parts", parts)
        if self.parts and (self.address or self.page_bytes % len(self.parts)):
            raise ConfigError(
                f"PageRegion has {len(self.parts)} parts, address {self.address} and pages of"
                f" {self.page_bytes} bytes: with parts the address is 0, and all parts of a page have"
                " as many bytes"
            )

    @property
    def part_bytes(self) -> int:
        """Of one part of a page; the whole page where there are no parts."""
        return self.page_bytes // max(len(self.parts), 1)

    @property
    def step_bytes(self) -> int:
        """From a page, or its part, to the next in one memory."""
        return self.stride_bytes or self.part_bytes

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Of each part of page 0 the addresses; one part at one address where there are no parts."""
        return self.parts or ((self.address,),)
