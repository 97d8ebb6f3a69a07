"""Records the config.json files of `configs/`: what checkpoints publish, and what transformers makes of it.

Run it with a Python that has transformers and vLLM (`make conformance` makes one):

    .venv-vllm/bin/python tests/presets/record_configs.py

`NAME.json` has the fields of the published file that the KV depends on, `NAME.transformers.json` what
the library's own class writes when it is given those, with the library's names and defaults.
`class-TYPE.json` is a class with its defaults, of every family. Vision and audio
parts are left out, and lists of expert layers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "configs"

_QWEN = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "num_attention_heads": 16,
}
_NEMOTRON = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "mamba_ssm_cache_dtype": "float32",
}
_V4 = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "head_dim": 512,
    "index_head_dim": 128,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
}
_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 8}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}
_KDA_K3 = [i for i in range(1, 93) if i % 4]
_KDA_LINEAR = [i for i in range(1, 27) if i % 4]

PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA
    | {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32},
    "llama-3-70b": _LLAMA
    | {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80},
    "smollm2-135m": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
    },
    "gpt-oss-20b": _GPT_OSS
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_hidden_layers": 24,
    },
    "gpt-oss-120b": _GPT_OSS
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "num_hidden_layers": 36,
    },
    "gemma-3-27b": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma3_text",
            "head_dim": 128,
            "hidden_size": 5376,
            "num_attention_heads": 32,
            "num_hidden_layers": 62,
            "num_key_value_heads": 16,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
        },
    },
    "gemma-4-31b": {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma4_text",
            "attention_k_eq_v": True,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_size": 5376,
            "layer_types": ([*["sliding_attention"] * 5, "full_attention"]) * 10,
            "num_attention_heads": 32,
            "num_global_key_value_heads": 4,
            "num_hidden_layers": 60,
            "num_key_value_heads": 16,
            "num_kv_shared_layers": 0,
            "sliding_window": 1024,
        },
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": _QWEN
        | {
            "model_type": "qwen3_5_text",
            "linear_num_value_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
        },
    },
    "qwen3.5-35b": {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": _QWEN
        | {
            "model_type": "qwen3_5_moe_text",
            "linear_num_value_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
        },
    },
    "qwen3.5-397b": {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": _QWEN
        | {
            "model_type": "qwen3_5_moe_text",
            "linear_num_value_heads": 64,
            "num_attention_heads": 32,
            "num_hidden_layers": 60,
            "num_key_value_heads": 2,
        },
    },
    "kimi-linear-48b": {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "head_dim": 128,
            "kda_layers": _KDA_LINEAR,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "num_attention_heads": 32,
        "num_hidden_layers": 27,
        "qk_rope_head_dim": 64,
    },
    "kimi-k3": {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": {
            "model_type": "kimi_linear",
            "kv_lora_rank": 512,
            "linear_attn_config": {
                "full_attn_layers": [*range(4, 93, 4), 93],
                "head_dim": 128,
                "kda_layers": _KDA_K3,
                "num_heads": 96,
                "short_conv_kernel_size": 4,
            },
            "num_attention_heads": 96,
            "num_hidden_layers": 93,
            "qk_rope_head_dim": 64,
        },
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "kv_lora_rank": 512,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "qk_rope_head_dim": 64,
    },
    "deepseek-v4-pro": _V4
    | {"compress_ratios": [128, 128, *[4, 128] * 29, 4, 0], "num_hidden_layers": 61},
    "deepseek-v4-flash": _V4
    | {"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "num_hidden_layers": 43},
    "minimax-m3": {
        "model_type": "minimax_m3_vl",
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "text_config": {
            "head_dim": 128,
            "num_attention_heads": 64,
            "num_hidden_layers": 60,
            "num_key_value_heads": 4,
            "sparse_attention_config": {
                "sparse_attention_freq": [0] * 3 + [1] * 57,
                "sparse_disable_index_value": [0] * 3 + [1] * 57,
                "sparse_index_dim": 128,
                "sparse_num_index_heads": 4,
            },
        },
    },
    "glm-5": {
        "model_type": "glm_moe_dsa",
        "architectures": ["GlmMoeDsaForCausalLM"],
        "index_head_dim": 128,
        "kv_lora_rank": 512,
        "num_hidden_layers": 78,
        "num_nextn_predict_layers": 1,
        "qk_rope_head_dim": 64,
    },
    "nemotron-3-super": _NEMOTRON
    | {
        "hybrid_override_pattern": (
            "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
        ),
        "mamba_num_heads": 128,
        "num_hidden_layers": 88,
    },
    "nemotron-3-nano": _NEMOTRON
    | {
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "mamba_num_heads": 64,
        "num_hidden_layers": 52,
    },
}
"""By preset. Sources: `kvcache.presets.model(NAME).sources`."""

CLASSES: dict[str, dict[str, Any]] = {
    "mistral": {},
    "mixtral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 28, "sliding_window": 4096},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "smollm3": {},
    "gemma2": {},
    "glm4": {},
    "glm4_moe": {"head_dim": 128},
    "glm4_moe_lite": {},
    "deepseek_v2": {},
    "deepseek_v32": {},
    "minimax_m2": {},
    "llama": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "gpt_oss": {},
    "gemma3_text": {},
    "gemma4_text": {},
    "deepseek_v3": {},
    "glm_moe_dsa": {},
    "deepseek_v4": {},
    "kimi_linear": {},
    "minimax_m3_vl_text": {},
    "nemotron_h": {},
}
"""By model type: arguments, where the defaults would not say much."""

_DROPPED = {"vision_config", "audio_config", "mlp_layer_types", "mlp_only_layers"}


def as_written(config: Any) -> dict[str, Any]:
    """What `save_pretrained` writes, less what is left out here."""
    fields: dict[str, Any] = json.loads(config.to_json_string())
    return {
        name: {k: v for k, v in value.items() if k not in _DROPPED}
        if name == "text_config"
        else value
        for name, value in fields.items()
        if name not in _DROPPED
    }


def as_text(fields: dict[str, Any]) -> str:
    """JSON with one field a line, lists on theirs."""
    lines = [f" {json.dumps(name)}: {json.dumps(fields[name])}" for name in sorted(fields)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Writes every file."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 (of another environment)
    from vllm.transformers_utils.configs.kimi_k3 import KimiK3Config  # noqa: PLC0415

    FOLDER.mkdir(exist_ok=True)
    for name, fields in PUBLISHED.items():
        (FOLDER / f"{name}.json").write_text(as_text(fields))
        kind = fields["model_type"]
        make = KimiK3Config if kind == "kimi_k3" else CONFIG_MAPPING[kind]
        given = {k: v for k, v in fields.items() if k != "model_type"}
        (FOLDER / f"{name}.transformers.json").write_text(as_text(as_written(make(**given))))
    for kind, arguments in CLASSES.items():
        written = as_written(CONFIG_MAPPING[kind](**arguments))
        (FOLDER / f"class-{kind}.json").write_text(as_text(written))
    print(f"{len(list(FOLDER.glob('*.json')))} files in {FOLDER}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
