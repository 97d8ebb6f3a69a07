"""Presets by name."""

from __future__ import annotations

from kvcache.core.alike import alike
from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.values import shown
from kvcache.presets import (
    deepseek,
    gemma,
    glm,
    gpt_oss,
    kimi,
    llama,
    minimax,
    nemotron,
    qwen3_5,
)
from kvcache.presets.model import Model

_PRESETS = {
    model.name: model
    for model in (
        deepseek.DEEPSEEK_V3,
        deepseek.DEEPSEEK_V4_FLASH,
        deepseek.DEEPSEEK_V4_PRO,
        gemma.GEMMA_3_27B,
        gemma.GEMMA_4_31B,
        glm.GLM_5,
        gpt_oss.GPT_OSS_120B,
        gpt_oss.GPT_OSS_20B,
        kimi.KIMI_K3,
        kimi.KIMI_LINEAR_48B,
        llama.LLAMA_3_70B,
        llama.LLAMA_3_8B,
        llama.SMOLLM2_135M,
        minimax.MINIMAX_M3,
        nemotron.NEMOTRON_3_NANO,
        nemotron.NEMOTRON_3_SUPER,
        qwen3_5.QWEN_3_5_35B,
        qwen3_5.QWEN_3_5_397B,
        qwen3_5.QWEN_3_5_9B,
    )
}


def names() -> list[str]:
    """Names that `preset` and `model` take."""
    return sorted(_PRESETS)


def model(name: str) -> Model:
    """Layers, sources and unverified inputs of a preset. `ConfigError`: there is none such."""
    if name not in _PRESETS:
        raise ConfigError(
            f"there is no preset {shown(name)}{alike(name, names())}: choose one of"
            f" {', '.join(names())}"
        )
    return _PRESETS[name]


def preset(
    name: str, *, block_tokens: int = 128, tp: int = 1, dcp: int = 1, kv_dtype: str = "auto"
) -> Geometry:
    """The geometry of a model on the rank that holds most of it.

    Args:
        name: one of `names()`.
        block_tokens: tokens of an attention page. DeepSeek V4 takes multiples of 128 only.
        tp: tensor-parallel ranks.
        dcp: context-parallel ranks.
        kv_dtype: format of the KV, "auto", "bf16", "fp8" or "fp8_ds_mla": all as in `Serving`.

    Raises:
        ConfigError: no such preset, or sizes that do not work.
    """
    return model(name).geometry(block_tokens=block_tokens, tp=tp, dcp=dcp, kv_dtype=kv_dtype)
