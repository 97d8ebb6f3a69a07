"""A model as its cache sees it: its layers, where the numbers come from, which are not verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcache.core.layout import Geometry
from kvcache.presets.layers import CompressedLatent, Layers
from kvcache.presets.serving import Serving


class StatedKV(NamedTuple):
    """The type of KV that a checkpoint was made for, where it is another than the weights'."""

    words: str
    """As its files say it."""
    kv_dtype: str
    """As `Serving` has it; empty: no choice there is this type."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Layers in the order of their groups.

    `sources` says where the numbers were read. `unverified` names inputs that no primary source
    confirms (the checkpoint's config.json, or code that loads it); figures that follow from them
    may be wrong. With `stated_kv` the kv_dtype "auto" is the stated type, as engines take it.
    """

    name: str
    layers: tuple[Layers, ...]
    sources: tuple[str, ...]
    unverified: tuple[str, ...] = ()
    stated_kv: StatedKV | None = None

    def kv_format(self, kv_dtype: str) -> str:
        """What the KV is stored as when this is asked for: "bf16", "fp8" or "fp8_ds_mla"."""
        kv_dtype = self._chosen(kv_dtype)
        if any(isinstance(layers, CompressedLatent) for layers in self.layers):
            return "bf16" if kv_dtype == "bf16" else "fp8_ds_mla"
        return "bf16" if kv_dtype == "auto" else kv_dtype

    def kv_notes(self, kv_dtype: str) -> list[str]:
        """What to know where the KV that is asked for is not what the checkpoint states."""
        stated, taken = self.stated_kv, self.kv_format(kv_dtype)
        if stated is None or (stated.kv_dtype and taken == self.kv_format(stated.kv_dtype)):
            return []
        reason = "which was asked for" if stated.kv_dtype else "no kv_dtype is the stated one"
        return [f"the checkpoint states KV of another type, {stated.words}: {taken} here, {reason}"]

    def geometry(
        self, *, block_tokens: int = 128, tp: int = 1, dcp: int = 1, kv_dtype: str = "auto"
    ) -> Geometry:
        """The cache groups on the rank that holds most of them; arguments as `Serving`.

        Raises:
            ConfigError: sizes that do not work, or a format that these layers do not have.
        """
        serving = Serving(
            block_tokens=block_tokens, tp=tp, dcp=dcp, kv_dtype=self._chosen(kv_dtype)
        )
        return Geometry(tuple(g for layers in self.layers for g in layers.groups(serving)))

    def _chosen(self, kv_dtype: str) -> str:
        stated = self.stated_kv.kv_dtype if self.stated_kv else ""
        return stated or kv_dtype if kv_dtype == "auto" else kv_dtype
