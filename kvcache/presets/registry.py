"""Presets by name."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.values import whole
from kvcache.presets import deepseek, gemma3, gpt_oss, kimi, llama, minimax, nemotron, qwen3_5

_PRESETS: dict[str, Callable[[int, int], Geometry]] = {
    "deepseek-v3": deepseek.deepseek_v3,
    "deepseek-v4-flash": deepseek.deepseek_v4_flash,
    "deepseek-v4-pro": deepseek.deepseek_v4_pro,
    "gemma-3-27b": gemma3.gemma_3_27b,
    "gpt-oss-120b": gpt_oss.gpt_oss_120b,
    "gpt-oss-20b": gpt_oss.gpt_oss_20b,
    "kimi-k3": kimi.kimi_k3,
    "kimi-linear-48b": kimi.kimi_linear_48b,
    "llama-3-8b": llama.llama_3_8b,
    "minimax-m3": minimax.minimax_m3,
    "nemotron-3-nano": nemotron.nemotron_3_nano,
    "qwen3.5-35b": qwen3_5.qwen3_5_35b,
    "qwen3.5-397b": qwen3_5.qwen3_5_397b,
    "qwen3.5-9b": qwen3_5.qwen3_5_9b,
    "smollm2-135m": llama.smollm2_135m,
}


def names() -> list[str]:
    """Names that `preset` takes."""
    return sorted(_PRESETS)


def preset(name: str, *, block_tokens: int = 128, tp: int = 1) -> Geometry:
    """The geometry of a model on the rank that holds most of it.

    Args:
        name: one of `names()`.
        block_tokens: tokens of an attention page. DeepSeek V4 takes multiples of 128 only.
        tp: tensor-parallel ranks. KV heads and states are dealt out, at least one head to a rank;
            latent rows and index keys are on every rank.

    Raises:
        ConfigError: no such preset, or sizes that do not work.
    """
    if name not in _PRESETS:
        raise ConfigError(f"there is no preset {name!r}: choose one of {', '.join(names())}")
    tp, block_tokens = whole(tp, "tp"), whole(block_tokens, "block_tokens")
    if tp < 1:
        raise ConfigError(f"tp is {tp}: the number of tensor-parallel ranks must be above 0")
    return _PRESETS[name](block_tokens, tp)
