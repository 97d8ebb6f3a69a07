"""Nemotron-H and Nemotron 3: Mamba2 and expert layers, with a few layers of full attention."""

from __future__ import annotations

from kvcache.presets.fields import MOST_LAYERS, Fields
from kvcache.presets.layers import Full, Layers
from kvcache.presets.model import Model
from kvcache.presets.state_layers import StateSpace

NEMOTRON_3_SUPER = Model(
    name="nemotron-3-super",
    layers=(
        Full(layers=8, kv_heads=2, head_dim=128),
        StateSpace(layers=40, heads=128, head_dim=64, state_dim=128, state_groups=8, kernel=4),
    ),
    sources=(
        (
            "config.json of nvidia/NVIDIA-Nemotron-3-Super-120B-A12B: 88 layers, 40 Mamba2, 40 experts"
            " and 8 attention by hybrid_override_pattern (THUDM/slime pull request 2378, TensorRT-Model-"
            "Connect pull request 186: 2 KV heads); head_dim 128; mamba_num_heads 128 of 64,"
            " ssm_state_size 128, n_groups 8, conv_kernel 4"
        ),
        "the same file has mamba_ssm_cache_dtype float32 (vLLM pull request 39032)",
    ),
)
"""8,192 bytes per token, 162.3 MiB for each kept state. Source: config.json of the checkpoint."""

NEMOTRON_3_NANO = Model(
    name="nemotron-3-nano",
    layers=(
        Full(layers=6, kv_heads=2, head_dim=128),
        StateSpace(layers=23, heads=64, head_dim=64, state_dim=128, state_groups=8, kernel=4),
    ),
    sources=(
        (
            "config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B: 52 layers, 23 Mamba2, 23 experts and"
            " 6 attention by hybrid_override_pattern; num_key_value_heads 2, head_dim 128;"
            " mamba_num_heads 64 of 64, ssm_state_size 128, n_groups 8, conv_kernel 4,"
            " mamba_ssm_cache_dtype float32 (its in_proj has 10,304 = 2 x 4,096 + 2 x 8 x 128 + 64 rows)"
        ),
    ),
)
"""6,144 bytes per token, 46.8 MiB for each kept state. Source: config.json of the checkpoint."""

_ATTENTION, _MAMBA, _NEITHER = range(3)
_LETTERS = {"*": _ATTENTION, "M": _MAMBA, "E": _NEITHER, "-": _NEITHER}
_WORDS = {
    "attention": _ATTENTION,
    "full_attention": _ATTENTION,
    "mamba": _MAMBA,
    "linear_attention": _MAMBA,
    "moe": _NEITHER,
    "mlp": _NEITHER,
}


def read(fields: Fields) -> list[Layers]:
    """NemotronHConfig: `hybrid_override_pattern`, or `layers_block_type` of transformers 5."""
    kinds = _kinds(fields)
    found: list[Layers] = []
    if attention := kinds.count(_ATTENTION):
        found.append(
            Full(
                layers=attention,
                kv_heads=fields.whole("num_key_value_heads"),
                head_dim=fields.whole(fields.first("head_dim", "attention_head_dim")),
            )
        )
    if mamba := kinds.count(_MAMBA):
        found.append(
            StateSpace(
                layers=mamba,
                heads=fields.whole("mamba_num_heads"),
                head_dim=fields.whole("mamba_head_dim"),
                state_dim=fields.whole("ssm_state_size"),
                state_groups=fields.whole(fields.first("n_groups", "mamba_n_groups")),
                kernel=fields.whole(fields.first("conv_kernel", "mamba_d_conv")),
                state_element_bytes=fields.dtype_bytes(
                    "mamba_ssm_cache_dtype", "float32", "NemotronHConfig and vLLM take it"
                ),
            )
        )
    if not found:
        raise fields.error("no layer keeps anything: neither attention nor Mamba2 among them")
    return found


def _kinds(fields: Fields) -> list[int]:
    if fields.has("hybrid_override_pattern"):
        pattern = fields.text("hybrid_override_pattern")
        name, known, count = "hybrid_override_pattern", _LETTERS, len(pattern)
    else:
        name, known = fields.first("layers_block_type", "layer_types"), _WORDS
        count = len(fields.entries(name))
    if not 1 <= count <= MOST_LAYERS:
        raise fields.error(f"{name} has {count} layers: expected 1 to {MOST_LAYERS}")
    if fields.has("num_hidden_layers") and fields.layers() != count:
        raise fields.error(f"{name} has {count} layers, num_hidden_layers is {fields.layers()}")
    return fields.per_layer(name, count, known)
