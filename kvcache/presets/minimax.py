"""MiniMax M3: GQA in every layer, with index keys for block-sparse attention in most of them."""

from __future__ import annotations

from kvcache.core.layout import Geometry
from kvcache.core.specs import IndexedAttention
from kvcache.presets.sharding import per_rank


def minimax_m3(block_tokens: int, tp: int) -> Geometry:
    """MiniMax M3, bfloat16 KV: 137,472 bytes per token, 14,592 of them index keys.

    Source: vLLM's configs/minimax_m3.py, which mirrors the checkpoint (60 layers, 4 KV heads of
    128, sparse attention in 57 layers), and its indexer (one index key of 128 a token).
    """
    return Geometry(
        (
            IndexedAttention(
                name="full",
                layers=60,
                indexed_layers=57,
                kv_heads=per_rank(4, tp),
                head_dim=128,
                index_dim=128,
                block_tokens=block_tokens,
            ),
        )
    )
