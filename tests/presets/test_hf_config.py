"""A geometry from a config.json: every family, and every way in which a file can be wrong."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from presets.record_configs import CLASSES, FOLDER, PUBLISHED

from kvcache.core.errors import ConfigError, InputError
from kvcache.presets import from_hf_config, model, names, preset, read_hf_config
from kvcache.presets.hf_config import MOST_FILE_BYTES, known_types
from kvcache.presets.layers import (
    CompressedLatent,
    Full,
    Indexed,
    Latent,
    Layers,
    Window,
)
from kvcache.presets.state_layers import GatedDelta

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}


def recorded(name: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return fields


def changed(name: str, **fields: Any) -> dict[str, Any]:
    """A recorded config with other fields, in its text part if it has one; None removes one."""
    config = recorded(name)
    part = config.get("text_config", config)
    for field, value in fields.items():
        if value is None:
            part.pop(field)
        else:
            part[field] = value
    return config


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor"}


@pytest.mark.parametrize(
    ("told", "words", "kv_dtype"),
    [
        ({"kv_cache_scheme": SCHEME}, "8-bit 'float' (kv_cache_scheme)", "fp8"),
        ({"kv_cache_scheme": SCHEME | {"num_bits": 4}}, "4-bit 'float' (kv_cache_scheme)", ""),
        ({"kv_cache_scheme": SCHEME | {"type": "int"}}, "8-bit 'int' (kv_cache_scheme)", ""),
        ({"kv_cache_scheme": {"type": "float"}}, "not said which (kv_cache_scheme)", ""),
        ({"kv_cache_scheme": {"num_bits": 8}}, "not said which (kv_cache_scheme)", ""),
        ({"kv_cache_quant_algo": "FP8"}, "'FP8' (kv_cache_quant_algo)", "fp8"),
        ({"kv_cache_quant_algo": "NVFP4"}, "'NVFP4' (kv_cache_quant_algo)", ""),
    ],
)
def test_the_kv_that_a_checkpoint_states_is_followed(
    told: dict[str, Any], words: str, kv_dtype: str
) -> None:
    """Engines store what it states: bf16 would be twice of what they hold."""
    found = read_hf_config(LLAMA | {"quantization_config": told})
    assert found.stated_kv == (words, kv_dtype)
    assert read_hf_config({"text_config": LLAMA | {"quantization_config": told}}) == found
    if "kv_cache_quant_algo" in told:
        nested = {"quantization_config": {"quantization": told}}
        assert read_hf_config(LLAMA | nested) == found
    plain = read_hf_config(LLAMA)
    assert found.layers == plain.layers
    assert found.geometry() == plain.geometry(kv_dtype=kv_dtype or "bf16")
    assert found.geometry(kv_dtype="bf16") == plain.geometry()
    assert found.kv_format("auto") == (kv_dtype or "bf16")


def test_kv_that_is_not_as_stated_is_told() -> None:
    def notes(algorithm: str, kv_dtype: str) -> list[str]:
        config = LLAMA | {"quantization_config": {"kv_cache_quant_algo": algorithm}}
        return read_hf_config(config).kv_notes(kv_dtype)

    stated = "the checkpoint states KV of another type, "
    assert notes("FP8", "auto") == notes("FP8", "fp8") == []
    assert notes("FP8", "bf16") == [
        f"{stated}'FP8' (kv_cache_quant_algo): bf16 here, which was asked for"
    ]
    for asked, taken in (("auto", "bf16"), ("fp8", "fp8")):
        assert notes("NVFP4", asked) == [
            f"{stated}'NVFP4' (kv_cache_quant_algo): {taken} here, no kv_dtype is the stated one"
        ]
    assert read_hf_config(LLAMA).kv_notes("fp8") == []


@pytest.mark.parametrize("none", ["NONE", "none", "auto", None])
def test_kv_of_the_weights_type_is_not_stated(none: str | None) -> None:
    told: dict[str, Any]
    for told in ({"kv_cache_quant_algo": none}, {"quantization": {"kv_cache_quant_algo": none}}):
        assert read_hf_config(LLAMA | {"quantization_config": told}) == read_hf_config(LLAMA)
    found = read_hf_config(LLAMA | {"quantization_config": {"kv_cache_scheme": None}})
    assert found == read_hf_config(LLAMA)


def test_the_file_of_modelopt_beside_the_config_is_read(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    beside = tmp_path / "hf_quant_config.json"
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    beside.write_text(json.dumps({"producer": {}, "quantization": quantization}))
    for source in (tmp_path, config):
        assert read_hf_config(source).stated_kv == ("'FP8' (kv_cache_quant_algo)", "fp8")
    own = {"quantization_config": {"kv_cache_quant_algo": "NVFP4"}}
    config.write_text(json.dumps(LLAMA | own))
    assert read_hf_config(tmp_path).stated_kv == ("'NVFP4' (kv_cache_quant_algo)", "")
    config.write_text(json.dumps(LLAMA))
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert read_hf_config(tmp_path).stated_kv is None
    for content, error in (
        ("{", "is not JSON"),
        ("[]", "no object with fields"),
        ('{"quantization": 3}', "quantization is 3: expected an object"),
        ('{"quantization": {"kv_cache_quant_algo": 8}}', "kv_cache_quant_algo is 8: it must be a"),
    ):
        beside.write_text(content)
        with pytest.raises(InputError, match=rf"hf_quant_config\.json.*{re.escape(error)}"):
            read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("section", "error"),
    [
        (8, "quantization_config is 8: expected an object"),
        ({"kv_cache_scheme": "fp8"}, "kv_cache_scheme is 'fp8': expected an object"),
        ({"kv_cache_scheme": SCHEME | {"num_bits": 8.0}}, "num_bits is 8.0: it must be a whole"),
        ({"kv_cache_scheme": SCHEME | {"type": 8}}, "type is 8: it must be a text"),
    ],
)
def test_an_impossible_statement_is_named(section: object, error: str) -> None:
    with pytest.raises(InputError, match=re.escape(error)):
        read_hf_config(LLAMA | {"quantization_config": section})


@pytest.mark.parametrize("name", ["llama4_text", "jamba", "mamba"])
def test_another_model_with_a_name_like_a_known_one_is_not_suggested(name: str) -> None:
    with pytest.raises(InputError, match=f"model type '{name}': what can be read is"):
        read_hf_config(LLAMA | {"model_type": name, "architectures": None})


def test_what_is_recorded_is_what_the_script_has() -> None:
    for name, fields in PUBLISHED.items():
        assert recorded(name) == fields
    files = {path.name.removesuffix(".json") for path in FOLDER.glob("*.json")}
    both = {f"{name}{end}" for name in PUBLISHED for end in ("", ".transformers")}
    assert files == both | {f"class-{kind}" for kind in CLASSES}
    assert sorted(PUBLISHED) == names()


@pytest.mark.parametrize("written_by", ["", ".transformers"])
@pytest.mark.parametrize("name", names())
def test_a_config_gives_the_preset_of_its_model(name: str, written_by: str) -> None:
    path = FOLDER / f"{name}{written_by}.json"
    found = read_hf_config(path)
    assert found.layers == model(name).layers
    assert found.unverified == ()
    for arguments in ({}, {"tp": 8, "dcp": 2, "kv_dtype": "bf16"}, {"block_tokens": 256}):
        assert from_hf_config(path, **arguments) == preset(name, **arguments)


@pytest.mark.parametrize("name", names())
def test_a_config_is_known_by_its_architecture_alone(name: str) -> None:
    config = recorded(name)
    del config["model_type"]
    config.get("text_config", {}).pop("model_type", None)
    assert read_hf_config(config).layers == model(name).layers


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("mistral", [Window(layers=32, kv_heads=8, head_dim=128, window=4096)]),
        ("mixtral", [Full(layers=32, kv_heads=8, head_dim=128)]),
        (
            "qwen2",
            [
                Full(layers=28, kv_heads=32, head_dim=128),
                Window(layers=4, kv_heads=32, head_dim=128, window=4096),
            ],
        ),
        ("qwen2_moe", [Full(layers=24, kv_heads=16, head_dim=128)]),
        ("qwen3", [Full(layers=32, kv_heads=32, head_dim=128)]),
        ("qwen3_moe", [Full(layers=24, kv_heads=4, head_dim=64)]),
        (
            "qwen3_next",
            [
                Full(layers=12, kv_heads=2, head_dim=256),
                GatedDelta(
                    layers=36, value_heads=32, key_heads=16, key_dim=128, value_dim=128, kernel=4
                ),
            ],
        ),
        ("smollm3", [Full(layers=36, kv_heads=4, head_dim=128)]),
        (
            "gemma2",
            [
                Full(layers=13, kv_heads=4, head_dim=256),
                Window(layers=13, kv_heads=4, head_dim=256, window=4096),
            ],
        ),
        ("glm4", [Full(layers=40, kv_heads=2, head_dim=128)]),
        ("glm4_moe", [Full(layers=46, kv_heads=8, head_dim=128)]),
        ("glm4_moe_lite", [Latent(layers=47, rank=512, rope_dim=64)]),
        ("deepseek_v2", [Latent(layers=32, rank=512, rope_dim=64)]),
        ("deepseek_v32", [Latent(layers=61, rank=512, rope_dim=64, index_dim=128)]),
        ("minimax_m2", [Full(layers=62, kv_heads=8, head_dim=128)]),
    ],
)
def test_families_without_a_preset_are_read_too(kind: str, layers: list[Layers]) -> None:
    found = read_hf_config(recorded(f"class-{kind}"))
    assert list(found.layers) == layers
    assert max(found.geometry(tp=8).padding()) <= 0.05
    assert f"model type {kind}" in found.sources[0]


def test_a_folder_is_read_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert from_hf_config(tmp_path) == preset("llama-3-8b")
    assert from_hf_config(str(tmp_path / "config.json"), tp=8) == preset("llama-3-8b", tp=8)
    assert from_hf_config(LLAMA) == preset("llama-3-8b")


def test_older_files_of_gemma_3_leave_out_what_equals_the_default() -> None:
    config = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    }
    found = read_hf_config(config)
    assert found.layers == (
        Full(layers=5, kv_heads=4, head_dim=256),
        Window(layers=29, kv_heads=4, head_dim=256, window=1024),
    )
    assert [text.split(":")[0] for text in found.unverified] == [
        "sliding_window_pattern 6",
        "num_key_value_heads 4",
        "head_dim 256",
    ]


def test_gemma_4_layers_that_share_kv_keep_none() -> None:
    """As Gemma 4 E2B: 35 layers, of which the last 20 read the KV of earlier ones."""
    types = ([*["sliding_attention"] * 4, "full_attention"]) * 7
    config = {
        "model_type": "gemma4_text",
        "head_dim": 256,
        "layer_types": types,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "sliding_window": 512,
    }
    assert read_hf_config(config).layers == (
        Full(layers=3, kv_heads=1, head_dim=512),
        Window(layers=12, kv_heads=1, head_dim=256, window=512),
    )
    assert read_hf_config(config).unverified[0].startswith("global_head_dim 512")


def test_glm_5_2_has_an_indexer_in_a_quarter_of_its_layers() -> None:
    """The schedule of GLM-5.2 and 5.3: the first three layers, then every fourth."""
    schedule = changed("glm-5", index_topk_freq=4, index_skip_topk_offset=3)
    types = ["full" if max(i - 2, 0) % 4 == 0 else "shared" for i in range(78)]
    listed = changed("glm-5", indexer_types=types)
    letters = changed("glm-5", index_topk_pattern="".join(t[0].upper() for t in types))
    layers = (
        Latent(layers=21, rank=512, rope_dim=64, index_dim=128),
        Latent(layers=57, rank=512, rope_dim=64, name="mla_shared"),
    )
    for config in (schedule, listed, letters):
        assert read_hf_config(config).layers == layers
    geometry = from_hf_config(schedule, tp=8)
    assert max(geometry.padding()) <= 0.05
    bytes_per_token = sum(g.page_bytes for g in geometry.groups) / 128
    assert bytes_per_token == 78 * 1152 + 21 * 132


def test_states_have_the_type_that_the_file_names() -> None:
    halved = changed("qwen3.5-9b", mamba_ssm_dtype="bfloat16")
    (_, state) = read_hf_config(halved).layers
    assert isinstance(state, GatedDelta)
    assert state.state_element_bytes == 2
    silent = read_hf_config(changed("qwen3.5-9b", mamba_ssm_dtype=None))
    assert silent.layers == model("qwen3.5-9b").layers
    assert silent.unverified[0].startswith("mamba_ssm_dtype float32: the file has none")


def test_the_text_part_decides_where_the_wrapper_is_unknown() -> None:
    found = read_hf_config({"model_type": "llava_next", "text_config": LLAMA})
    assert found.layers == model("llama-3-8b").layers


def test_a_minimax_without_sparse_layers_has_no_index_keys() -> None:
    dense = read_hf_config(changed("minimax-m3", sparse_attention_config=None))
    assert dense.layers == (Full(layers=60, kv_heads=4, head_dim=128),)
    assert dense.unverified[0].startswith("sparse_attention_config: the file has none, nor layer")
    sparse = read_hf_config(recorded("minimax-m3.transformers")).layers
    assert sparse == (
        Indexed(layers=60, indexed_layers=57, kv_heads=4, head_dim=128, index_dim=128),
    )


def test_a_deepseek_v4_of_windows_alone_has_one_group() -> None:
    config = changed("deepseek-v4-flash", compress_ratios=[0, 1], num_hidden_layers=2)
    (layers,) = read_hf_config(config).layers
    assert isinstance(layers, CompressedLatent)
    assert [g.name for g in from_hf_config(config).groups] == ["window"]


def test_an_unknown_type_is_named_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"model type 'gpt-17': what can be read is deepseek_v2, "):
        read_hf_config({**LLAMA, "model_type": "gpt-17"})
    with pytest.raises(InputError, match=r"'qwen3-moe' \(did you mean 'qwen3_moe'\?\): what can"):
        read_hf_config({**LLAMA, "model_type": "qwen3-moe"})
    with pytest.raises(InputError, match=r"model type 'GptForCausalLM': what can be read is"):
        read_hf_config({"architectures": ["GptForCausalLM"]})
    with pytest.raises(InputError, match="no model_type: what can be read is"):
        read_hf_config({"num_hidden_layers": 3})
    families = {*CLASSES, *(fields["model_type"] for fields in PUBLISHED.values())}
    assert families <= set(known_types())


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_each_field_that_is_missing_is_named(name: str) -> None:
    """A field may have a default, or be of no use to the KV; none is silently invented otherwise."""
    config = recorded(name)
    part = config.get("text_config", config)
    named = 0
    for field in sorted(part):
        without = json.loads(json.dumps(config))
        del without.get("text_config", without)[field]
        try:
            found = read_hf_config(without)
        except InputError as error:
            assert field in str(error) or "there is no field" in str(error)  # noqa: PT017
            named += 1
        else:
            named += bool(found.unverified)
            known = found.layers == model(name).layers or found.unverified
            assert known or field in OPTIONAL, field
    assert named >= 2


OPTIONAL = {
    "attention_k_eq_v",  # false without it
    "num_global_key_value_heads",  # as the others without it
}


HOSTILE = [
    -1,
    0,
    True,
    1.5,
    float("nan"),
    float("inf"),
    "8",
    "",
    [],
    {},
    [8],
    10**9,
    10**30,
    -(10**5000),
]


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-4-31b", "qwen3.5-9b", "kimi-k3", "glm-5"])
@pytest.mark.parametrize("written_by", ["", ".transformers"])
def test_hostile_values_end_in_a_named_error_or_change_nothing(name: str, written_by: str) -> None:
    config = recorded(f"{name}{written_by}")
    part = config.get("text_config", config)
    refused = 0
    for field in part:
        for value in HOSTILE:
            bad = copy.deepcopy(config)
            bad.get("text_config", bad)[field] = value
            try:
                geometry = from_hf_config(bad)
            except (InputError, ConfigError) as error:
                assert len(str(error)) < 2000  # noqa: PT017
                refused += 1
            else:
                assert geometry.groups
    assert refused > 3 * len(HOSTILE)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama-3-8b", {"num_hidden_layers": -3}, "num_hidden_layers is -3: it must be a whole"),
        ("llama-3-8b", {"num_hidden_layers": 10**9}, "from 1 to 10000"),
        ("llama-3-8b", {"num_key_value_heads": True}, "num_key_value_heads is True"),
        ("llama-3-8b", {"num_key_value_heads": "8"}, "num_key_value_heads is '8'"),
        ("llama-3-8b", {"hidden_size": 4095}, "no multiple of num_attention_heads 32"),
        ("llama-3-8b", {"num_hidden_layers": None}, "there is no field num_hidden_layers"),
        ("llama-3-8b", {"layer_types": ["sliding_attention"] * 32}, r"layer_types\[0\] is 'slid"),
        (
            "gpt-oss-20b",
            {"layer_types": ["full_attention"]},
            "has 1 entries: expected one for each",
        ),
        ("gpt-oss-20b", {"layer_types": 7}, "layer_types is no list"),
        ("gpt-oss-20b", {"layer_types": [None] * 24}, r"layer_types\[0\] is None: known are"),
        ("gpt-oss-20b", {"layer_types": [[]] * 24}, r"layer_types\[0\] is \[\]: known are"),
        (
            "gemma-4-31b",
            {"num_kv_shared_layers": 60},
            "at least one of 60 layers has KV of its own",
        ),
        ("gemma-4-31b", {"attention_k_eq_v": "yes"}, "attention_k_eq_v is 'yes': it must be true"),
        (
            "gemma-4-31b.transformers",
            {"per_layer_config": {}},
            "text_config, per_layer_config: there",
        ),
        (
            "deepseek-v4-pro",
            {"compress_ratios": [2] * 61},
            r"compress_ratios\[0\] is 2: known are 0",
        ),
        ("deepseek-v4-pro", {"compress_ratios": None}, "no field compress_rates"),
        ("deepseek-v4-pro", {"qk_rope_head_dim": 513}, "from 0 to 512"),
        (
            "deepseek-v4-pro.transformers",
            {
                "compress_rates": {
                    "compressed_sparse_attention": 8,
                    "heavily_compressed_attention": 128,
                }
            },
            "ratios are 8 and 128: only 4 and 128 are known",
        ),
        ("kimi-k3", {"linear_attn_config": []}, "linear_attn_config is .*: expected an object"),
        ("nemotron-3-nano", {"hybrid_override_pattern": "MX*"}, "has 3 layers, num_hidden_layers"),
        (
            "nemotron-3-nano",
            {"hybrid_override_pattern": "X" * 52},
            r"\[0\] is 'X': known are \*, M",
        ),
        ("nemotron-3-nano", {"hybrid_override_pattern": "E" * 52}, "no layer keeps anything"),
        ("nemotron-3-nano", {"hybrid_override_pattern": 8}, "hybrid_override_pattern is 8"),
        ("nemotron-3-nano", {"mamba_ssm_cache_dtype": "int3"}, "must be one of float32, bfloat16"),
        ("nemotron-3-nano.transformers", {"layers_block_type": 5}, "is 5: expected a list"),
        ("llama-3-8b", {"architectures": [7], "model_type": None}, "architectures has 7"),
        (
            "llama-3-8b",
            {"architectures": "x", "model_type": None},
            "architectures is 'x': expected",
        ),
    ],
)
def test_wrong_fields_are_named(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_hf_config(changed(name, **fields))


def test_kda_layers_are_numbered_from_1_and_once_each() -> None:
    for layers in ([0], [94], [1, 1], [True], ["1"], 5):
        config = recorded("kimi-k3")
        config["text_config"]["linear_attn_config"]["kda_layers"] = layers
        with pytest.raises(InputError, match="different whole numbers from 1 to 93"):
            read_hf_config(config)


def test_an_index_that_keeps_values_is_refused() -> None:
    config = recorded("minimax-m3")
    config["text_config"]["sparse_attention_config"]["sparse_disable_index_value"][59] = 0
    with pytest.raises(InputError, match="an index that keeps values too is not known"):
        read_hf_config(config)


def test_full_layers_of_gemma_4_have_one_size() -> None:
    config = recorded("gemma-4-31b.transformers")
    config["text_config"]["per_layer_config"]["05"]["head_dim"] = 256
    with pytest.raises(InputError, match=r"full layers have .* \[\(4, 256\), \(4, 512\)\]"):
        read_hf_config(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"model_type: llama", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[]", "is JSON, but no object"),
        (b"3", "is JSON, but no object"),
        (b"null", "is JSON, but no object"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a": ' * 100_000, "is not JSON"),
        (b'{"num_hidden_layers": ' + b"9" * 10_000 + b"}", "is not JSON"),
        (b'{"model_type": ["llama"]}', "model_type is .*: it must be a text"),
        (b'{"model_type": "llama", "text_config": 3}', "text_config is 3: expected an object"),
    ],
)
def test_what_is_no_config_is_named_with_its_path(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as raised:
        read_hf_config(path)
    assert str(path) in str(raised.value)


def test_nan_in_a_file_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "num_key_value_heads": float("nan")}))
    with pytest.raises(InputError, match="num_key_value_heads is nan"):
        read_hf_config(path)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*missing\.json: give a config\.json"):
        read_hf_config(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match=r"there is no .*config\.json"):
        read_hf_config(tmp_path)
    for name in ("\0", "x" * 10_000):
        with pytest.raises(ConfigError, match=r"cannot be read|there is no"):
            read_hf_config(name)
    with pytest.raises(ConfigError, match="a config is 5: give a path"):
        read_hf_config(5)  # type: ignore[arg-type]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no regular file"):
        read_hf_config(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no regular file"):
        read_hf_config("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").mkdir()
    with pytest.raises(ConfigError, match="is no regular file"):
        read_hf_config(tmp_path / "folder")


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as stream:
        stream.truncate(MOST_FILE_BYTES + 1)
    with pytest.raises(InputError, match=f"has more than {MOST_FILE_BYTES} bytes"):
        read_hf_config(path)
