"""KV geometry of known models, one small file per family, each number with its source."""

from kvcache.presets.registry import names, preset

__all__ = ["names", "preset"]
