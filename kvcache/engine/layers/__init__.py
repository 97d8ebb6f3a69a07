"""What mixes tokens in a layer: one file, one class for each kind."""

from kvcache.engine.layers.attention import Attention
from kvcache.engine.layers.base import GroupUse, LayerStep, Mixer
from kvcache.engine.layers.compressed import CompressedAttention
from kvcache.engine.layers.gated_delta import GatedDelta
from kvcache.engine.layers.kimi_delta import KimiDelta
from kvcache.engine.layers.latent import Latent

__all__ = [
    "Attention",
    "CompressedAttention",
    "GatedDelta",
    "GroupUse",
    "KimiDelta",
    "Latent",
    "LayerStep",
    "Mixer",
]
