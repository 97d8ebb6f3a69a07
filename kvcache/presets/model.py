"""A model as its cache sees it: its layers, where the numbers come from, which are not verified."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.core.layout import Geometry
from kvcache.presets.layers import CompressedLatent, Layers
from kvcache.presets.serving import Serving


@dataclass(frozen=True, kw_only=True)
class Model:
    """Layers in the order of their groups.

    `sources` says where the numbers were read. `unverified` names inputs that no primary source
    confirms (the checkpoint's config.json, or code that loads it); figures that follow from them
    may be wrong.
    """

    name: str
    layers: tuple[Layers, ...]
    sources: tuple[str, ...]
    unverified: tuple[str, ...] = ()

    def kv_format(self, kv_dtype: str) -> str:
        """What the KV is stored as when this is asked for: "bf16", "fp8" or "fp8_ds_mla"."""
        if any(isinstance(layers, CompressedLatent) for layers in self.layers):
            return "bf16" if kv_dtype == "bf16" else "fp8_ds_mla"
        return "bf16" if kv_dtype == "auto" else kv_dtype

    def geometry(
        self, *, block_tokens: int = 128, tp: int = 1, dcp: int = 1, kv_dtype: str = "auto"
    ) -> Geometry:
        """The cache groups on the rank that holds most of them; arguments as `Serving`.

        Raises:
            ConfigError: sizes that do not work, or a format that these layers do not have.
        """
        serving = Serving(block_tokens=block_tokens, tp=tp, dcp=dcp, kv_dtype=kv_dtype)
        return Geometry(tuple(g for layers in self.layers for g in layers.groups(serving)))
