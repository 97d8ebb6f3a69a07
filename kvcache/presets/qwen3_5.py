"""Qwen3.5: three of four layers are gated delta networks (GDN), every fourth is full attention."""

from __future__ import annotations

from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention, RecurrentState
from kvcache.presets.sharding import per_rank

_KEY_HEADS, _STATE_WIDTH, _KERNEL, _HEAD_DIM = 16, 128, 4, 256


def qwen3_5_9b(block_tokens: int, tp: int) -> Geometry:
    """Qwen3.5-9B: 32,768 bytes of KV per token, 49.1 MiB for each kept state.

    Source: Qwen3_5TextConfig of transformers: 32 layers, full_attention_interval 4, 4 KV heads of
    256; GDN with 32 value and 16 key heads of 128, convolution kernel 4.
    """
    return _hybrid(layers=32, kv_heads=4, value_heads=32, block_tokens=block_tokens, tp=tp)


def qwen3_5_35b(block_tokens: int, tp: int) -> Geometry:
    """Qwen3.5-35B-A3B: 20,480 bytes of KV per token, 61.4 MiB for each kept state.

    Source: Qwen3_5MoeTextConfig of transformers: 40 layers, full_attention_interval 4, 2 KV heads
    of 256; GDN with 32 value and 16 key heads of 128, convolution kernel 4.
    """
    return _hybrid(layers=40, kv_heads=2, value_heads=32, block_tokens=block_tokens, tp=tp)


def qwen3_5_397b(block_tokens: int, tp: int) -> Geometry:
    """Qwen3.5-397B-A17B: 30,720 bytes of KV per token, 183.2 MiB for each kept state.

    Source: ai-dynamo/aiconfigurator issue 410 (shapes of the checkpoint): 60 layers, 45 of them
    GDN, 2 KV heads of 256; GDN with 64 value and 16 key heads of 128.
    """
    return _hybrid(layers=60, kv_heads=2, value_heads=64, block_tokens=block_tokens, tp=tp)


def _hybrid(
    *, layers: int, kv_heads: int, value_heads: int, block_tokens: int, tp: int
) -> Geometry:
    """KV and convolution state in bfloat16, the recurrent state in float32."""
    values, keys = per_rank(value_heads, tp), per_rank(_KEY_HEADS, tp)
    recurrent_bytes = values * _STATE_WIDTH * _STATE_WIDTH * 4
    convolution_bytes = (_KERNEL - 1) * (2 * keys + values) * _STATE_WIDTH * 2
    return Geometry(
        (
            FullAttention(
                name="full",
                layers=layers // 4,
                kv_heads=per_rank(kv_heads, tp),
                head_dim=_HEAD_DIM,
                block_tokens=block_tokens,
            ),
            RecurrentState(
                name="gdn",
                layers=layers - layers // 4,
                state_bytes_per_layer=recurrent_bytes + convolution_bytes,
            ),
        )
    )
