"""Qwen3.5: three of four layers are gated delta networks (GDN), every fourth is full attention."""

from __future__ import annotations

from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention, RecurrentState


def qwen3_5_9b(block_tokens: int) -> Geometry:
    """Qwen3.5-9B: 32,768 bytes of KV per token, 49.1 MiB for each kept state.

    Source: Qwen3_5TextConfig of transformers: 32 layers, full_attention_interval 4, 4 KV heads of
    256; GDN with 32 value and 16 key heads of 128, convolution kernel 4. KV and convolution
    state in bfloat16, the recurrent state in float32.
    """
    key_heads, value_heads, width, kernel = 16, 32, 128, 4
    recurrent_bytes = value_heads * width * width * 4
    convolution_bytes = (kernel - 1) * (2 * key_heads + value_heads) * width * 2
    return Geometry(
        (
            FullAttention(
                name="full", layers=8, kv_heads=4, head_dim=256, block_tokens=block_tokens
            ),
            RecurrentState(
                name="gdn", layers=24, state_bytes_per_layer=recurrent_bytes + convolution_bytes
            ),
        )
    )
