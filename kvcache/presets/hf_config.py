"""The geometry of a model from its Hugging Face config.json on disk. Nothing is fetched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from kvcache.core.alike import alike
from kvcache.core.errors import ConfigError, InputError
from kvcache.core.layout import Geometry
from kvcache.core.values import shown
from kvcache.presets import deepseek, gemma, gpt_oss, kimi, llama, minimax, nemotron, qwen3_5
from kvcache.presets.class_defaults import CLASS_DEFAULTS
from kvcache.presets.fields import Fields
from kvcache.presets.layers import Layers
from kvcache.presets.model import Model, StatedKV

MOST_FILE_BYTES = 16 << 20
CONFIG = "config.json"
QUANTISATION = "hf_quant_config.json"
"""ModelOpt's own file, which older checkpoints have beside the config.json."""

_Reader = Callable[[Fields], list[Layers]]

_FAMILIES: dict[_Reader, tuple[str, ...]] = {
    llama.read: ("llama", "glm4", "glm4_moe"),
    llama.read_mistral: ("mistral", "mixtral"),
    llama.read_qwen: ("qwen2", "qwen3"),
    llama.read_listed: ("qwen2_moe", "qwen3_moe", "smollm3"),
    qwen3_5.read: (
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    ),
    gpt_oss.read: ("gpt_oss",),
    gemma.read_gemma_2: ("gemma2",),
    gemma.read_gemma_3: ("gemma3", "gemma3_text"),
    gemma.read_gemma_4: ("gemma4", "gemma4_text"),
    deepseek.read: (
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "kimi_k2",
        "glm4_moe_lite",
        "glm_moe_dsa",
    ),
    deepseek.read_v4: ("deepseek_v4",),
    kimi.read: ("kimi_linear", "kimi_k3"),
    minimax.read_m2: ("minimax_m2",),
    minimax.read: (
        "minimax_m3",
        "minimax_m3_text",
        "minimax_m3_vl",
        "minimax_m3_vl_text",
    ),
    nemotron.read: ("nemotron_h",),
}
_READERS = {name: read for read, names in _FAMILIES.items() for name in names}

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "SmolLM3ForCausalLM": "smollm3",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "GptOssForCausalLM": "gpt_oss",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "KimiLinearForCausalLM": "kimi_linear",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MiniMaxM3SparseForCausalLM": "minimax_m3",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3_vl",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "NemotronHForCausalLM": "nemotron_h",
}


def known_types() -> list[str]:
    """Model types that can be read."""
    return sorted(_READERS)


def from_hf_config(
    source: str | os.PathLike[str] | Mapping[str, object],
    *,
    block_tokens: int = 128,
    tp: int = 1,
    dcp: int = 1,
    kv_dtype: str = "auto",
) -> Geometry:
    """The geometry of a config.json, of the folder it lies in, or of its content.

    The other arguments are those of `Serving`.

    Raises:
        ConfigError: no such file, or a serving that does not work.
        InputError: no JSON object, an unknown model type, a field that is missing or impossible.
    """
    model = read_hf_config(source)
    return model.geometry(block_tokens=block_tokens, tp=tp, dcp=dcp, kv_dtype=kv_dtype)


def read_hf_config(source: str | os.PathLike[str] | Mapping[str, object]) -> Model:
    """The layers of a config; `Model.unverified` names what the file leaves open.

    `ConfigError` and `InputError` as `from_hf_config`.
    """
    if isinstance(source, Mapping):
        return _read("config", "the config that was given", source)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"a config is {shown(source)}: give a path, or the content as a mapping")
    if not os.fspath(source):
        raise ConfigError("a config is '': give a path")
    path = _file(Path(source))
    model = _read(str(source), str(path), _parse(path))
    return replace(model, stated_kv=model.stated_kv or _stated_beside(path))


def _file(path: Path) -> Path:
    """The file itself, or the one in the folder."""
    try:
        if path.is_dir():
            path = path / CONFIG
        there, regular = path.exists(), path.is_file()
    except (OSError, ValueError) as error:  # a folder that is closed, no possible name
        raise ConfigError(f"{str(path)[:200]!r} cannot be read: {error}") from error
    if not there:
        raise ConfigError(f"there is no {path}: give a config.json, or the folder that has one")
    if not regular:
        raise ConfigError(f"{path} is no regular file: give a config.json")
    return path


def _parse(path: Path) -> Mapping[str, object]:
    try:
        with path.open("rb") as stream:
            data = stream.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) > MOST_FILE_BYTES:
        raise InputError(
            f"{path} has more than {MOST_FILE_BYTES} bytes: no config.json is so large"
        )
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} is JSON, but no object with fields: expected a model's config")
    return value


def _read(name: str, where: str, values: Mapping[str, object]) -> Model:
    fields = Fields(where, values)
    inner = fields.section("text_config") if fields.has("text_config") else fields
    types = _types(inner) + (_types(fields) if inner is not fields else [])
    model_type = next((t for t in types if t in _READERS), None)
    if model_type is None:
        named = ", ".join(shown(t) for t in dict.fromkeys(types))
        found = f"model type {named}" if types else "no model_type"
        # Only another spelling is meant: a name that is merely close is another model.
        like = alike(types[0], known_types(), least=0.9) if types else ""
        raise fields.error(f"{found}{like}: what can be read is {', '.join(known_types())}")
    inner = inner.of_class(CLASS_DEFAULTS.get(model_type))
    layers = _READERS[model_type](inner)
    return Model(
        name=name,
        layers=tuple(layers),
        sources=(f"{where}, model type {model_type}",),
        unverified=tuple(inner.assumed),
        stated_kv=_stated_kv(fields) or _stated_kv(inner),
    )


_NOT_QUANTISED = ("NONE", "AUTO")


def _stated_kv(fields: Fields) -> StatedKV | None:
    """The type of KV in a config's `quantization_config`, as engines read it.

    compressed-tensors has a `kv_cache_scheme` (bits and type), ModelOpt either that or the name
    `kv_cache_quant_algo`, there or in a section `quantization`.
    """
    if not fields.has("quantization_config"):
        return None
    section = fields.section("quantization_config")
    return _stated_in(section) or _stated_in_section(section)


def _stated_in_section(fields: Fields) -> StatedKV | None:
    return _stated_in(fields.section("quantization")) if fields.has("quantization") else None


def _stated_in(section: Fields) -> StatedKV | None:
    if section.has("kv_cache_scheme"):
        scheme = section.section("kv_cache_scheme")
        if not (scheme.has("num_bits") and scheme.has("type")):
            return StatedKV("not said which (kv_cache_scheme)", "")
        bits, kind = scheme.whole("num_bits", most=64), scheme.text("type")
        words = f"{bits}-bit {shown(kind)} (kv_cache_scheme)"
        return StatedKV(words, "fp8" if (bits, kind.lower()) == (8, "float") else "")
    if not section.has("kv_cache_quant_algo"):
        return None
    name = section.text("kv_cache_quant_algo")
    if name.upper() in _NOT_QUANTISED:
        return None
    return StatedKV(f"{shown(name)} (kv_cache_quant_algo)", "fp8" if name.upper() == "FP8" else "")


def _stated_beside(config: Path) -> StatedKV | None:
    path = config.with_name(QUANTISATION)
    try:
        there = path.is_file()
    except OSError as error:  # a link into a closed folder
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    return _stated_in_section(Fields(str(path), _parse(path))) if there else None


def _types(fields: Fields) -> list[str]:
    """What the section says it is: its model_type, then its architectures."""
    types = [fields.text("model_type")] if fields.has("model_type") else []
    if fields.has("architectures"):
        for name in fields.entries("architectures"):
            if not isinstance(name, str):
                raise fields.error(f"architectures has {shown(name)}: expected texts")
            types.append(_ARCHITECTURES.get(name, name))
    return types
