"""Gemma 3: five sliding-window layers, then one of full attention."""

from __future__ import annotations

from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention, SlidingWindow
from kvcache.presets.sharding import per_rank


def gemma_3_27b(block_tokens: int, tp: int) -> Geometry:
    """Gemma 3 27B, bfloat16 KV: 81,920 bytes per token, 416 MiB for a window.

    Source: text_config of gemma-3-27b (num_hidden_layers 62, num_key_value_heads 16, head_dim 128,
    sliding_window 1024, sliding_window_pattern 6), so 10 full layers and 52 with a window.
    """
    kv_heads = per_rank(16, tp)
    return Geometry(
        (
            FullAttention(
                name="full", layers=10, kv_heads=kv_heads, head_dim=128, block_tokens=block_tokens
            ),
            SlidingWindow(
                name="window",
                layers=52,
                kv_heads=kv_heads,
                head_dim=128,
                window=1024,
                block_tokens=block_tokens,
            ),
        )
    )
