"""GLM-5: MLA with a lightning indexer in every layer, as DeepSeek V3.2."""

from __future__ import annotations

from kvcache.presets.layers import Latent
from kvcache.presets.model import Model

GLM_5 = Model(
    name="glm-5",
    layers=(Latent(layers=78, rank=512, rope_dim=64, index_dim=128),),
    sources=(
        (
            "config.json of zai-org/GLM-5, the defaults of transformers' GlmMoeDsaConfig:"
            " num_hidden_layers 78, kv_lora_rank 512, qk_rope_head_dim 64, index_head_dim 128, no"
            " index_topk_freq, so an indexer in every layer (GLM-5.2 and 5.3 have one in 21)"
        ),
        "models/deepseek_v2.py of vLLM: 128 bytes and a scale an index key, in every KV format",
    ),
)
"""100,152 bytes per token, 10,296 of them index keys. Source: config.json of GLM-5, vLLM's code."""
