"""gpt-oss: full attention and a sliding window of 128 tokens, layer by layer in turn."""

from __future__ import annotations

from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention, SlidingWindow
from kvcache.presets.sharding import per_rank

_KV_HEADS, _HEAD_DIM, _WINDOW = 8, 64, 128


def gpt_oss_120b(block_tokens: int, tp: int) -> Geometry:
    """gpt-oss-120b, bfloat16 KV: 36,864 bytes per token, 4.5 MiB for a window.

    Source: GptOssConfig of transformers (36 layers, 8 KV heads of 64, sliding_window 128,
    alternating layer types).
    """
    return _alternating(36, block_tokens, tp)


def gpt_oss_20b(block_tokens: int, tp: int) -> Geometry:
    """gpt-oss-20b, bfloat16 KV: 24,576 bytes per token, 3.0 MiB for a window.

    Source: as gpt-oss-120b, with 24 layers.
    """
    return _alternating(24, block_tokens, tp)


def _alternating(layers: int, block_tokens: int, tp: int) -> Geometry:
    kv_heads = per_rank(_KV_HEADS, tp)
    return Geometry(
        (
            FullAttention(
                name="full",
                layers=layers // 2,
                kv_heads=kv_heads,
                head_dim=_HEAD_DIM,
                block_tokens=block_tokens,
            ),
            SlidingWindow(
                name="window",
                layers=layers // 2,
                kv_heads=kv_heads,
                head_dim=_HEAD_DIM,
                window=_WINDOW,
                block_tokens=block_tokens,
            ),
        )
    )
