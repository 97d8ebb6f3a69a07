"""Nemotron 3: Mamba2 and mixture-of-experts layers, with a few layers of full attention."""

from __future__ import annotations

from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention, RecurrentState
from kvcache.presets.sharding import per_rank

_KERNEL = 4


def nemotron_3_nano(block_tokens: int, tp: int) -> Geometry:
    """Nemotron 3 Nano 30B-A3B, bfloat16 KV: 6,144 bytes per token, 46.8 MiB for each kept state.

    Source: config.json of NVIDIA-Nemotron-3-Nano-30B-A3B (52 layers, 23 Mamba2 and 6 attention by
    hybrid_override_pattern; 2 KV heads of 128; 64 Mamba heads of 64, state 128, 8 groups,
    conv_kernel 4, mamba_ssm_cache_dtype float32).
    """
    heads, groups = per_rank(64, tp), per_rank(8, tp)
    recurrent_bytes = heads * 64 * 128 * 4
    convolution_bytes = (_KERNEL - 1) * (heads * 64 + 2 * groups * 128) * 2
    return Geometry(
        (
            FullAttention(
                name="full",
                layers=6,
                kv_heads=per_rank(2, tp),
                head_dim=128,
                block_tokens=block_tokens,
            ),
            RecurrentState(
                name="mamba2",
                layers=23,
                state_bytes_per_layer=recurrent_bytes + convolution_bytes,
            ),
        )
    )
