"""What transformers' configuration classes take for a field that a config.json leaves out.

Read off the classes of transformers 5.20.2 (`CONFIG_MAPPING[model_type]`); `tests/presets/configs`
has each class as it writes itself. A field that is not here has no default that we know: its
absence is an error. So are the sizes of the model itself (layers, hidden size, query heads) and
lists of layers, where a class's default is that of one checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

VERSION = "transformers 5.20.2"


class ClassDefaults(NamedTuple):
    """One configuration class."""

    name: str
    fields: Mapping[str, int]


_QWEN_3_5 = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}

_LLAMA = ClassDefaults("LlamaConfig", {})
_GEMMA_3 = ClassDefaults(
    "Gemma3TextConfig",
    {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
)
_GEMMA_4 = ClassDefaults(
    "Gemma4TextConfig",
    {
        "global_head_dim": 512,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "num_kv_shared_layers": 0,
        "sliding_window": 512,
    },
)
_QWEN_3_5_DENSE = ClassDefaults("Qwen3_5TextConfig", _QWEN_3_5 | {"num_key_value_heads": 4})
_QWEN_3_5_MOE = ClassDefaults("Qwen3_5MoeTextConfig", _QWEN_3_5 | {"num_key_value_heads": 2})
_MINIMAX_M3 = ClassDefaults(
    "MiniMaxM3VLTextConfig", {"head_dim": 128, "index_head_dim": 128, "num_key_value_heads": 4}
)

CLASS_DEFAULTS: Mapping[str, ClassDefaults] = {
    "llama": _LLAMA,
    "mistral": ClassDefaults("MistralConfig", {"num_key_value_heads": 8, "sliding_window": 4096}),
    "mixtral": ClassDefaults("MixtralConfig", {"num_key_value_heads": 8}),
    "qwen2": ClassDefaults(
        "Qwen2Config",
        {"max_window_layers": 28, "num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "qwen2_moe": ClassDefaults("Qwen2MoeConfig", {"num_key_value_heads": 16}),
    "qwen3": ClassDefaults(
        "Qwen3Config",
        {
            "head_dim": 128,
            "max_window_layers": 28,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
        },
    ),
    "qwen3_moe": ClassDefaults("Qwen3MoeConfig", {"num_key_value_heads": 4}),
    "smollm3": ClassDefaults("SmolLM3Config", {"num_key_value_heads": 4}),
    "glm4": ClassDefaults("Glm4Config", {"head_dim": 128, "num_key_value_heads": 2}),
    "glm4_moe": ClassDefaults("Glm4MoeConfig", {"num_key_value_heads": 8}),
    "qwen3_next": ClassDefaults("Qwen3NextConfig", _QWEN_3_5 | {"num_key_value_heads": 2}),
    "qwen3_5": _QWEN_3_5_DENSE,
    "qwen3_5_text": _QWEN_3_5_DENSE,
    "qwen3_5_moe": _QWEN_3_5_MOE,
    "qwen3_5_moe_text": _QWEN_3_5_MOE,
    "gpt_oss": ClassDefaults(
        "GptOssConfig", {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128}
    ),
    "gemma2": ClassDefaults(
        "Gemma2Config", {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096}
    ),
    "gemma3": _GEMMA_3,
    "gemma3_text": _GEMMA_3,
    "gemma4": _GEMMA_4,
    "gemma4_text": _GEMMA_4,
    "deepseek_v2": ClassDefaults("DeepseekV2Config", _LATENT),
    "deepseek_v3": ClassDefaults("DeepseekV3Config", _LATENT),
    "deepseek_v32": ClassDefaults("DeepseekV32Config", _LATENT | {"index_head_dim": 128}),
    "glm4_moe_lite": ClassDefaults("Glm4MoeLiteConfig", _LATENT),
    "glm_moe_dsa": ClassDefaults("GlmMoeDsaConfig", _LATENT | {"index_head_dim": 128}),
    "deepseek_v4": ClassDefaults(
        "DeepseekV4Config",
        {"head_dim": 512, "index_head_dim": 128, "qk_rope_head_dim": 64, "sliding_window": 128},
    ),
    "kimi_linear": ClassDefaults(
        "KimiLinearConfig",
        _LATENT | {"linear_conv_kernel_dim": 4, "linear_head_dim": 128, "linear_num_heads": 32},
    ),
    "minimax_m2": ClassDefaults("MiniMaxM2Config", {"head_dim": 128, "num_key_value_heads": 8}),
    "minimax_m3_vl": _MINIMAX_M3,
    "minimax_m3_vl_text": _MINIMAX_M3,
    "nemotron_h": ClassDefaults(
        "NemotronHConfig",
        {
            "conv_kernel": 4,
            "head_dim": 128,
            "mamba_head_dim": 64,
            "mamba_num_heads": 128,
            "n_groups": 8,
            "num_key_value_heads": 8,
            "ssm_state_size": 128,
        },
    ),
}
"""By model type. Absent: kimi_k2, kimi_k3, minimax_m3(_text), of which transformers has no class."""
