"""DeepSeek V3 (MLA) and V4 (compressed attention, with a window and pooling states beside it)."""

from __future__ import annotations

from kvcache.core.layout import Geometry
from kvcache.core.specs import Compressed, LatentAttention, LatentWindow, PoolingState

_ROW_BYTES = 584
"""fp8_ds_mla of vLLM for V4: 448 fp8, 64 rotary in bfloat16, 8 of scales."""
_INDEX_BYTES = 132
"""128 fp8 and a scale."""
_WINDOW = 128
_LIGHT, _HEAVY = 4, 128
_LIGHT_POOL_BYTES = (2 * 2 * 512 + 2 * 2 * 128) * 4
"""Overlapping K and gates, for the entry and for its index key, in float32."""
_HEAVY_POOL_BYTES = 2 * 512 * 4
_WINDOW_BLOCK = 64


def deepseek_v3(block_tokens: int, tp: int) -> Geometry:
    """DeepSeek V3, R1 and Kimi K2, bfloat16 KV: 70,272 bytes per token on every rank.

    Source: config.json of DeepSeek-V3 (num_hidden_layers 61, kv_lora_rank 512,
    qk_rope_head_dim 64).
    """
    _ = tp
    return Geometry((LatentAttention(name="mla", layers=61, block_tokens=block_tokens),))


def deepseek_v4_pro(block_tokens: int, tp: int) -> Geometry:
    """DeepSeek V4 Pro, fp8: 5,511 bytes per token, a window of 4.35 MiB, pooling of 1.2 MiB.

    Source: compress_ratios of the checkpoint's config (61 layers: 31 of ratio 128, 30 of ratio 4)
    and vLLM's deepseek_v4 attention, compressor and sparse_swa for the bytes of a row.
    """
    _ = tp
    return _compressed(windows=61, light=30, heavy=31, block_tokens=block_tokens)


def deepseek_v4_flash(block_tokens: int, tp: int) -> Geometry:
    """DeepSeek V4 Flash, fp8: 3,850 bytes per token, a window of 3.07 MiB, pooling of 0.8 MiB.

    Source: DeepseekV4Config of transformers and the checkpoint's compress_ratios (43 layers: 2 with
    a window alone, 21 of ratio 4, 20 of ratio 128); bytes as V4 Pro.
    """
    _ = tp
    return _compressed(windows=43, light=21, heavy=20, block_tokens=block_tokens)


def _compressed(*, windows: int, light: int, heavy: int, block_tokens: int) -> Geometry:
    """Every rank holds all of it. `block_tokens`: a multiple of 128, one entry of the heavy layers.

    Every layer has a window too. At multiples of 128 tokens, where all hits end, the heavy
    layers' pooling state is empty; a request needs it only while it runs.
    """
    return Geometry(
        (
            Compressed(
                name="light",
                layers=light,
                ratio=_LIGHT,
                entry_bytes=_ROW_BYTES,
                index_bytes=_INDEX_BYTES,
                block_tokens=block_tokens,
            ),
            Compressed(
                name="heavy",
                layers=heavy,
                ratio=_HEAVY,
                entry_bytes=_ROW_BYTES,
                block_tokens=block_tokens,
            ),
            LatentWindow(
                name="window",
                layers=windows,
                entry_bytes=_ROW_BYTES,
                window=_WINDOW,
                block_tokens=_WINDOW_BLOCK,
            ),
            PoolingState(
                name="light_pool",
                layers=light,
                ratio=_LIGHT,
                token_bytes=_LIGHT_POOL_BYTES,
                block_tokens=_LIGHT,
                overlap=True,
            ),
            PoolingState(
                name="heavy_pool",
                layers=heavy,
                ratio=_HEAVY,
                token_bytes=_HEAVY_POOL_BYTES,
                block_tokens=_HEAVY,
            ),
        )
    )
