"""Gemma 2, 3 and 4: sliding-window layers with full attention in every second or sixth."""

from __future__ import annotations

from kvcache.presets.fields import MOST_LAYERS, MOST_WINDOW, Fields
from kvcache.presets.layers import Full, Layers, Window
from kvcache.presets.llama import KINDS, in_turn, split
from kvcache.presets.model import Model

GEMMA_3_27B = Model(
    name="gemma-3-27b",
    layers=(
        Full(layers=10, kv_heads=16, head_dim=128),
        Window(layers=52, kv_heads=16, head_dim=128, window=1024),
    ),
    sources=(
        (
            "text_config in config.json of google/gemma-3-27b-it: num_hidden_layers 62,"
            " num_key_value_heads 16, head_dim 128, sliding_window 1024, sliding_window_pattern 6"
        ),
    ),
)
"""81,920 bytes per token, a window of 416 MiB. Source: config.json of gemma-3-27b-it."""

GEMMA_4_31B = Model(
    name="gemma-4-31b",
    layers=(
        Full(layers=10, kv_heads=4, head_dim=512),
        Window(layers=50, kv_heads=16, head_dim=256, window=1024),
    ),
    sources=(
        (
            "text_config in config.json of google/gemma-4-31B-it: num_hidden_layers 60, every sixth"
            " full with num_global_key_value_heads 4 and global_head_dim 512, the others with"
            " num_key_value_heads 16, head_dim 256, sliding_window 1024; num_kv_shared_layers 0"
        ),
        "Gemma4TextConfig of transformers; gemma4.py of vLLM keeps K and V apart",
    ),
)
"""81,920 bytes per token, a window of 800 MiB. Source: config.json of gemma-4-31B-it.

`attention_k_eq_v` shares a projection between K and V of full layers. K is rotated and normed by
another weight than V, so both are kept.
"""


def read_gemma_2(fields: Fields) -> list[Layers]:
    """Gemma2Config: without `layer_types` every second layer is full, the first has a window."""
    windowed = in_turn(fields, fields.layers())
    window = fields.whole("sliding_window", most=MOST_WINDOW)
    return split(windowed, fields.whole("num_key_value_heads"), fields.whole("head_dim"), window)


def read_gemma_3(fields: Fields) -> list[Layers]:
    """Gemma3TextConfig: without `layer_types` each `sliding_window_pattern`-th (6th) is full."""
    layers = fields.layers()
    if fields.has("layer_types"):
        windowed = fields.per_layer("layer_types", layers, KINDS)
    else:
        every = fields.whole("sliding_window_pattern")
        windowed = [(i + 1) % every != 0 for i in range(layers)]
    kv_heads, head_dim = fields.whole("num_key_value_heads"), fields.whole("head_dim")
    return split(windowed, kv_heads, head_dim, fields.whole("sliding_window", most=MOST_WINDOW))


def read_gemma_4(fields: Fields) -> list[Layers]:
    """Gemma4TextConfig. The last `num_kv_shared_layers` read the KV of earlier layers."""
    layers = fields.layers()
    shared = fields.whole("num_kv_shared_layers", least=0, most=MOST_LAYERS)
    if shared >= layers:
        raise fields.error(
            f"num_kv_shared_layers is {shared}: at least one of {layers} layers has KV of its own"
        )
    if fields.has("layer_types"):
        windowed = fields.per_layer("layer_types", layers, KINDS)
    else:
        windowed = [(i + 1) % 6 != 0 for i in range(layers)]
        fields.assume("layer_types", None, "every sixth layer full")
    windowed = [*windowed[:-1], False][: layers - shared]  # the last layer of the model is full
    kv_heads, head_dim = fields.whole("num_key_value_heads"), fields.whole("head_dim")
    found: list[Layers] = []
    full = [i for i, has_window in enumerate(windowed) if not has_window]
    if full:
        full_heads, full_dim = _full_sizes(fields, full, kv_heads)
        found.append(Full(layers=len(full), kv_heads=full_heads, head_dim=full_dim))
    if with_window := len(windowed) - len(full):
        window = fields.whole("sliding_window", most=MOST_WINDOW)
        found.append(
            Window(layers=with_window, kv_heads=kv_heads, head_dim=head_dim, window=window)
        )
    return found


def _full_sizes(fields: Fields, full: list[int], kv_heads: int) -> tuple[int, int]:
    """KV heads and head dimension of full layers: files of the hub, and of transformers 5."""
    if not fields.has("per_layer_config"):
        if fields.flag("attention_k_eq_v") and fields.has("num_global_key_value_heads"):
            kv_heads = fields.whole("num_global_key_value_heads")
        return kv_heads, fields.whole("global_head_dim")
    each = fields.section("per_layer_config")
    sizes = set()
    for i in full:
        layer = each.section(each.first(f"{i:02}", str(i)))
        own = layer.whole("num_key_value_heads") if layer.has("num_key_value_heads") else kv_heads
        sizes.add((own, layer.whole("head_dim")))
    if len(sizes) != 1:
        raise each.error(f"full layers have (KV heads, head_dim) of {sorted(sizes)}: expected one")
    return sizes.pop()
