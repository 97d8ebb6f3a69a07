"""Kimi: delta attention (KDA) with a fixed-size state, and MLA in every fourth layer."""

from __future__ import annotations

from kvcache.core.layout import Geometry
from kvcache.core.specs import LatentAttention, RecurrentState
from kvcache.presets.sharding import per_rank

_STATE_WIDTH, _KERNEL = 128, 4


def kimi_k3(block_tokens: int, tp: int) -> Geometry:
    """Kimi K3, bfloat16 KV: 27,648 bytes per token, 428.6 MiB for each kept state.

    Source: config.json as quoted in llm-d inference-sim issue 1635 and llama.cpp pull request
    26185: 93 layers, 69 of them KDA with 96 heads of 128 x 128 and convolution kernel 4, 24 MLA
    with rank 512 and rotary 64; vLLM issue 50855 states the same bytes (0.75 MiB a layer at TP 8).
    """
    return _hybrid(kda_layers=69, heads=96, mla_layers=24, block_tokens=block_tokens, tp=tp)


def kimi_linear_48b(block_tokens: int, tp: int) -> Geometry:
    """Kimi Linear 48B-A3B, bfloat16 KV: 8,064 bytes per token, 41.4 MiB for each kept state.

    Source: KimiLinearConfig of transformers and the checkpoint's config.json: 27 layers, 20 of them
    KDA with 32 heads of 128 x 128 and convolution kernel 4, 7 MLA with rank 512 and rotary 64.
    """
    return _hybrid(kda_layers=20, heads=32, mla_layers=7, block_tokens=block_tokens, tp=tp)


def _hybrid(
    *, kda_layers: int, heads: int, mla_layers: int, block_tokens: int, tp: int
) -> Geometry:
    """State in float32, the convolutions of q, k and v in bfloat16; ranks share the heads of KDA."""
    of_rank = per_rank(heads, tp)
    recurrent_bytes = of_rank * _STATE_WIDTH * _STATE_WIDTH * 4
    convolution_bytes = (_KERNEL - 1) * 3 * of_rank * _STATE_WIDTH * 2
    return Geometry(
        (
            LatentAttention(name="mla", layers=mla_layers, block_tokens=block_tokens),
            RecurrentState(
                name="kda",
                layers=kda_layers,
                state_bytes_per_layer=recurrent_bytes + convolution_bytes,
            ),
        )
    )
