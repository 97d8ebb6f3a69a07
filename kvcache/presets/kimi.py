"""Kimi Linear and K3: delta attention (KDA) with a fixed-size state, MLA in every fourth layer."""

from __future__ import annotations

from kvcache.presets.fields import Fields
from kvcache.presets.layers import Latent, Layers
from kvcache.presets.model import Model
from kvcache.presets.state_layers import DeltaAttention

KIMI_K3 = Model(
    name="kimi-k3",
    layers=(
        Latent(layers=24, rank=512, rope_dim=64),
        DeltaAttention(layers=69, heads=96, head_dim=128, kernel=4),
    ),
    sources=(
        (
            "text_config in config.json of moonshotai/Kimi-K3 (quoted in inference-sim issue 1635 and"
            " llama.cpp pull request 26185): num_hidden_layers 93, linear_attn_config with 69"
            " kda_layers of 96 heads x 128 and short_conv_kernel_size 4, 24 full_attn_layers;"
            " kv_lora_rank 512, qk_rope_head_dim 64"
        ),
        (
            "kimi_k3/nvidia/mla.py and mamba_utils.py of vLLM for the shapes; vLLM issue 50855 states"
            " the same bytes of a state (0.75 MiB a layer at TP 8)"
        ),
    ),
)
"""27,648 bytes per token, 428.6 MiB for each kept state. Source: config.json of Kimi-K3.

Tools that count every layer as MLA say 107,136 bytes per token (93 x 1,152).
"""

KIMI_LINEAR_48B = Model(
    name="kimi-linear-48b",
    layers=(
        Latent(layers=7, rank=512, rope_dim=64),
        DeltaAttention(layers=20, heads=32, head_dim=128, kernel=4),
    ),
    sources=(
        (
            "config.json of moonshotai/Kimi-Linear-48B-A3B-Instruct: num_hidden_layers 27,"
            " linear_attn_config with 20 kda_layers of 32 heads x 128 and short_conv_kernel_size 4,"
            " full_attn_layers 4, 8, 12, 16, 20, 24, 27; kv_lora_rank 512, qk_rope_head_dim 64"
            " (transformers' KimiLinearConfig without arguments has 6 full layers: not this model)"
        ),
    ),
)
"""8,064 bytes per token, 41.4 MiB for each kept state. Source: config.json of the checkpoint."""


def read(fields: Fields) -> list[Layers]:
    """KimiLinearConfig: `linear_attn_config` of the checkpoints, or `layer_types` of transformers."""
    layers = fields.layers()
    if fields.has("linear_attn_config"):
        delta = fields.section("linear_attn_config")
        linear = len(delta.numbers("kda_layers", layers))
        heads, head_dim = delta.whole("num_heads"), delta.whole("head_dim")
        kernel = delta.whole("short_conv_kernel_size")
    else:
        kinds = {"full_attention": False, "linear_attention": True}
        linear = sum(fields.per_layer("layer_types", layers, kinds))
        heads, head_dim = fields.whole("linear_num_heads"), fields.whole("linear_head_dim")
        kernel = fields.whole("linear_conv_kernel_dim")
    found: list[Layers] = []
    if layers - linear:
        found.append(
            Latent(
                layers=layers - linear,
                rank=fields.whole("kv_lora_rank"),
                rope_dim=fields.whole("qk_rope_head_dim", least=0),
            )
        )
    if linear:
        found.append(DeltaAttention(layers=linear, heads=heads, head_dim=head_dim, kernel=kernel))
    return found
