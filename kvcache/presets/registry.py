"""Presets by name."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.presets import llama, qwen3_5

_PRESETS: dict[str, Callable[[int], Geometry]] = {
    "llama-3-8b": llama.llama_3_8b,
    "qwen3.5-9b": qwen3_5.qwen3_5_9b,
    "smollm2-135m": llama.smollm2_135m,
}


def names() -> list[str]:
    """Names that `preset` takes."""
    return sorted(_PRESETS)


def preset(name: str, *, block_tokens: int) -> Geometry:
    """The geometry of a model, whole (no sharding), with attention blocks of `block_tokens`."""
    if name not in _PRESETS:
        raise ConfigError(f"there is no preset {name!r}: choose one of {', '.join(names())}")
    return _PRESETS[name](block_tokens)
