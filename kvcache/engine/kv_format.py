"""In what format K and V lie in pages: float32, bfloat16, or float8 where torch has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.core.alike import alike
from kvcache.core.errors import ConfigError

FP8_MOST = 448.0
"""Largest finite number of float8_e4m3fn (arXiv 2209.05433, table 1).

torch 2.13 casts larger ones to it, as here; earlier versions cast them to NaN.
"""


@dataclass(frozen=True)
class KVFormat:
    """How one element is stored. What is computed is always float32."""

    name: str
    dtype: torch.dtype
    carrier: torch.dtype
    """As what pages are moved and indexed: float8 as bytes, since torch indexes no float8."""
    most: float = 0.0
    """Above 0: larger values are stored as this one."""

    @property
    def element_bytes(self) -> int:
        """Of one element."""
        return self.dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        """float32 to `carrier`."""
        if self.most:
            values = values.clamp(-self.most, self.most)
        return values.to(self.dtype).view(self.carrier)

    def decode(self, stored: Tensor) -> Tensor:
        """`carrier` to float32; no copy where it is that already."""
        return stored.view(self.dtype).to(torch.float32)


FP32 = KVFormat("fp32", torch.float32, torch.float32)
BF16 = KVFormat("bf16", torch.bfloat16, torch.bfloat16)

KV_FORMATS: dict[str, KVFormat] = {f.name: f for f in (FP32, BF16)}
"""By name: those that this torch has."""

if hasattr(torch, "float8_e4m3fn"):
    KV_FORMATS["fp8"] = KVFormat("fp8", torch.float8_e4m3fn, torch.uint8, most=FP8_MOST)


def find_kv_format(name: str) -> KVFormat:
    """The format of a name.

    Raises:
        ConfigError: there is none, or this torch lacks it.
    """
    found = KV_FORMATS.get(name)
    if found is None:
        raise ConfigError(
            f"kv_dtype is {name!r}{alike(name, KV_FORMATS)}: choose from {', '.join(KV_FORMATS)}"
        )
    return found


@dataclass(frozen=True, eq=False)
class Rows:
    """What one layer keeps in the pages of a group: a view of the arena."""

    pages: Tensor
    """`[pages, ...]` of the format's carrier."""
    format: KVFormat

    def shaped(self, *shape: int) -> Rows:
        """The same with pages of another shape."""
        return Rows(torch.unflatten(self.pages, 1, shape), self.format)

    def write(self, index: tuple[Tensor | slice, ...], values: Tensor) -> None:
        """Store float32 values at `pages[index]`."""
        self.pages[index] = self.format.encode(values)

    def read(self, pages: Tensor) -> Tensor:
        """Whole pages in float32, `[len(pages), ...]`."""
        return self.format.decode(self.pages.index_select(0, pages))
