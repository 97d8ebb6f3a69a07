"""Qwen3-Next and Qwen3.5: three of four layers are gated delta networks (GDN), the fourth is full."""

from __future__ import annotations

from kvcache.presets.fields import Fields
from kvcache.presets.layers import Full, Layers
from kvcache.presets.llama import heads
from kvcache.presets.model import Model
from kvcache.presets.state_layers import GatedDelta


def _model(name: str, layers: int, kv_heads: int, value_heads: int, *sources: str) -> Model:
    return Model(
        name=name,
        layers=(
            Full(layers=layers // 4, kv_heads=kv_heads, head_dim=256),
            GatedDelta(
                layers=layers - layers // 4,
                value_heads=value_heads,
                key_heads=16,
                key_dim=128,
                value_dim=128,
                kernel=4,
            ),
        ),
        sources=(*sources, "mamba_ssm_dtype float32 in the same file; gdn/ of vLLM for the shapes"),
    )


QWEN_3_5_9B = _model(
    "qwen3.5-9b",
    32,
    4,
    32,
    "text_config in config.json of Qwen/Qwen3.5-9B, the defaults of transformers' Qwen3_5TextConfig:"
    " 32 layers, full_attention_interval 4, num_key_value_heads 4, head_dim 256,"
    " linear_num_value_heads 32, linear_num_key_heads 16, dimensions 128, linear_conv_kernel_dim 4",
)
"""32,768 bytes per token, 49.1 MiB for each kept state. Source: Qwen3_5TextConfig."""

QWEN_3_5_35B = _model(
    "qwen3.5-35b",
    40,
    2,
    32,
    "text_config in config.json of Qwen/Qwen3.5-35B-A3B, the defaults of transformers'"
    " Qwen3_5MoeTextConfig: 40 layers, full_attention_interval 4, num_key_value_heads 2,"
    " head_dim 256, linear_num_value_heads 32, linear_num_key_heads 16, dimensions 128,"
    " linear_conv_kernel_dim 4",
)
"""20,480 bytes per token, 61.4 MiB for each kept state. Source: Qwen3_5MoeTextConfig."""

QWEN_3_5_397B = _model(
    "qwen3.5-397b",
    60,
    2,
    64,
    "text_config in config.json of Qwen/Qwen3.5-397B-A17B (as the tests of NVIDIA-NeMo's"
    " Megatron-Bridge have it; ai-dynamo/aiconfigurator pull request 410): 60 layers,"
    " full_attention_interval 4, num_key_value_heads 2, head_dim 256, linear_num_value_heads 64,"
    " linear_num_key_heads 16, dimensions 128, linear_conv_kernel_dim 4",
)
"""30,720 bytes per token, 183.2 MiB for each kept state. Source: config.json of the checkpoint."""


def read(fields: Fields) -> list[Layers]:
    """Qwen3NextConfig, Qwen3_5TextConfig, Qwen3_5MoeTextConfig."""
    layers = fields.layers()
    if fields.has("layer_types"):
        kinds = {"full_attention": True, "linear_attention": False}
        full = sum(fields.per_layer("layer_types", layers, kinds))
    else:
        full = layers // fields.whole("full_attention_interval")
    kv_heads, head_dim = heads(fields)
    state_bytes = fields.dtype_bytes(
        "mamba_ssm_dtype",
        "float32",
        "the delta rule is computed in it (vLLM without this field takes the model's own type)",
    )
    found: list[Layers] = []
    if full:
        found.append(Full(layers=full, kv_heads=kv_heads, head_dim=head_dim))
    if layers - full:
        found.append(
            GatedDelta(
                layers=layers - full,
                value_heads=fields.whole("linear_num_value_heads"),
                key_heads=fields.whole("linear_num_key_heads"),
                key_dim=fields.whole("linear_key_head_dim"),
                value_dim=fields.whole("linear_value_head_dim"),
                kernel=fields.whole("linear_conv_kernel_dim"),
                state_element_bytes=state_bytes,
            )
        )
    return found
