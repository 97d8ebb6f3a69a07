"""Fields that a config.json leaves out: what its class takes, named; where none is known, refused."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from presets.record_configs import CLASSES, FOLDER

from kvcache.core.errors import InputError
from kvcache.presets import read_hf_config
from kvcache.presets.class_defaults import CLASS_DEFAULTS, VERSION
from kvcache.presets.hf_config import known_types
from kvcache.presets.layers import Full, Latent, Layers, Window

SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
QUARTER = {"num_hidden_layers": 4}

BARE: dict[str, tuple[dict[str, Any], list[Layers], list[str]]] = {
    "llama": (
        SIZES,
        [Full(layers=32, kv_heads=32, head_dim=128)],
        ["num_key_value_heads 32"],
    ),
    "mistral": (
        SIZES,
        [Window(layers=32, kv_heads=8, head_dim=128, window=4096)],
        ["num_key_value_heads 8", "sliding_window 4096"],
    ),
    "mixtral": (SIZES, [Full(layers=32, kv_heads=8, head_dim=128)], ["num_key_value_heads 8"]),
    "qwen2": (SIZES, [Full(layers=32, kv_heads=32, head_dim=128)], ["num_key_value_heads 32"]),
    "qwen2_moe": (SIZES, [Full(layers=32, kv_heads=16, head_dim=128)], ["num_key_value_heads 16"]),
    "qwen3": (
        {**SIZES, "hidden_size": 2048},
        [Full(layers=32, kv_heads=32, head_dim=128)],
        ["num_key_value_heads 32", "head_dim 128"],
    ),
    "qwen3_moe": (SIZES, [Full(layers=32, kv_heads=4, head_dim=128)], ["num_key_value_heads 4"]),
    "smollm3": (SIZES, [Full(layers=32, kv_heads=4, head_dim=128)], ["num_key_value_heads 4"]),
    "glm4": (
        {**SIZES, "hidden_size": 2048},
        [Full(layers=32, kv_heads=2, head_dim=128)],
        ["num_key_value_heads 2", "head_dim 128"],
    ),
    "glm4_moe": (SIZES, [Full(layers=32, kv_heads=8, head_dim=128)], ["num_key_value_heads 8"]),
    "minimax_m2": (
        QUARTER,
        [Full(layers=4, kv_heads=8, head_dim=128)],
        ["num_key_value_heads 8", "head_dim 128"],
    ),
    "gpt_oss": (
        QUARTER,
        [
            Full(layers=2, kv_heads=8, head_dim=64),
            Window(layers=2, kv_heads=8, head_dim=64, window=128),
        ],
        ["layer_types", "num_key_value_heads 8", "head_dim 64", "sliding_window 128"],
    ),
    "gemma2": (
        QUARTER,
        [
            Full(layers=2, kv_heads=4, head_dim=256),
            Window(layers=2, kv_heads=4, head_dim=256, window=4096),
        ],
        ["layer_types", "sliding_window 4096", "num_key_value_heads 4", "head_dim 256"],
    ),
    "deepseek_v3": (
        QUARTER,
        [Latent(layers=4, rank=512, rope_dim=64)],
        ["kv_lora_rank 512", "qk_rope_head_dim 64"],
    ),
    "glm_moe_dsa": (
        QUARTER,
        [Latent(layers=4, rank=512, rope_dim=64, index_dim=128)],
        ["kv_lora_rank 512", "qk_rope_head_dim 64", "index_head_dim 128"],
    ),
}


@pytest.mark.parametrize("kind", BARE)
def test_a_file_with_sizes_alone_has_the_rest_of_its_class(kind: str) -> None:
    fields, layers, filled = BARE[kind]
    found = read_hf_config({"model_type": kind, **fields})
    assert list(found.layers) == layers
    assert [text.split(":")[0] for text in found.unverified] == filled
    assert all(VERSION in text and "Config" in text for text in found.unverified)


RULES = {"layer_types", "per_layer_config", "sparse_attention_config"}
"""Lists by layer, for which most classes have a rule."""


@pytest.mark.parametrize("kind", sorted(CLASSES))
def test_without_any_default_a_class_reads_as_it_writes_itself(kind: str) -> None:
    """As transformers writes it with nothing given, then with all of that left out again."""
    written = json.loads((FOLDER / f"class-{kind}.json").read_text())
    whole = read_hf_config(written)
    defaults = CLASS_DEFAULTS[kind].fields
    listed = {"kimi_linear", "deepseek_v4", "nemotron_h"}
    dropped = set(defaults) | (RULES if kind not in listed else set())
    bare = {name: value for name, value in written.items() if name not in dropped}
    found = read_hf_config(bare)
    assert found.layers == whole.layers
    new = set(found.unverified) - set(whole.unverified)
    named = {text.split(":")[0].split()[0] for text in new}
    assert named <= dropped
    assert named or not set(defaults) & set(written)


@pytest.mark.parametrize("kind", known_types())
def test_the_size_of_a_model_is_never_filled_in(kind: str) -> None:
    with pytest.raises(
        InputError, match=r"there is no field (num_hidden_layers|layers_block_type)"
    ):
        read_hf_config({"model_type": kind})


NULLS = [
    ("mistral", {"sliding_window": None}, [Full(layers=32, kv_heads=8, head_dim=128)]),
    ("mistral", {"num_key_value_heads": None, "sliding_window": None}, None),
    ("qwen3", {"head_dim": None}, [Full(layers=32, kv_heads=32, head_dim=128)]),
]


@pytest.mark.parametrize(("kind", "nulls", "layers"), NULLS)
def test_null_is_not_absent(kind: str, nulls: dict[str, None], layers: list[Layers] | None) -> None:
    found = read_hf_config({"model_type": kind, **SIZES, **nulls})
    assert list(found.layers) == (layers or [Full(layers=32, kv_heads=32, head_dim=128)])
    assert found.unverified[0].startswith("num_key_value_heads")


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("kimi_k2", QUARTER, "there is no field kv_lora_rank"),
        ("deepseek_v3", {**QUARTER, "kv_lora_rank": None}, "kv_lora_rank is null"),
        ("glm_moe_dsa", {**QUARTER, "index_head_dim": None}, "index_head_dim is null"),
        ("gpt_oss", {**QUARTER, "sliding_window": None}, "sliding_window is null"),
        ("minimax_m3", QUARTER, "there is no field num_attention_heads"),
        ("minimax_m3", {**SIZES}, "there is no field num_key_value_heads"),
        (
            "minimax_m3",
            {**SIZES, "num_key_value_heads": 4, "head_dim": 128},
            "there is no field sparse_attention_config",
        ),
        ("llama", QUARTER, "there is no field num_attention_heads"),
        ("deepseek_v4", QUARTER, "there is no field compress_rates"),
        ("kimi_linear", QUARTER, "there is no field layer_types"),
        (
            "qwen2_moe",
            {**SIZES, "use_sliding_window": True, "sliding_window": 64},
            "there is no field layer_types",
        ),
        (
            "smollm3",
            {**SIZES, "use_sliding_window": True, "sliding_window": 64},
            "there is no field layer_types",
        ),
    ],
)
def test_what_no_class_says_is_refused_by_name(
    kind: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read_hf_config({"model_type": kind, **fields})


def test_the_defaults_are_those_of_the_classes(require: Callable[[str, str], NoReturn]) -> None:
    python = os.environ.get("KVCACHE_VLLM_PYTHON")
    if not python:
        require("vllm", "KVCACHE_VLLM_PYTHON names no Python with transformers")
    program = """
import json, sys, transformers
from transformers import CONFIG_MAPPING
kinds = json.load(sys.stdin)
names = {kind: getattr(CONFIG_MAPPING[kind], "__name__") for kind in kinds if "_text" in kind or kind not in
         ("qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "minimax_m3_vl")}
values = {kind: {name: getattr(CONFIG_MAPPING[kind], name) for name in kinds[kind]
                 if hasattr(CONFIG_MAPPING[kind], name)} for kind in names}
print(json.dumps([transformers.__version__, names, values]))
"""
    asked = {kind: sorted(of_class.fields) for kind, of_class in CLASS_DEFAULTS.items()}
    done = subprocess.run(
        [python, "-c", program],
        input=json.dumps(asked),
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    version, names, values = json.loads(done.stdout.splitlines()[-1])
    assert f"transformers {version}" == VERSION
    compared = 0
    for kind, name in names.items():
        assert name == CLASS_DEFAULTS[kind].name
        for field, value in values[kind].items():
            assert value == CLASS_DEFAULTS[kind].fields[field], (kind, field)
            compared += 1
    assert compared > 70
