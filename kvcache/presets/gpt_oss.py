"""gpt-oss: a sliding window of 128 tokens and full attention, layer by layer in turn."""

from __future__ import annotations

from kvcache.presets.fields import MOST_WINDOW, Fields
from kvcache.presets.layers import Full, Layers, Window
from kvcache.presets.llama import heads, in_turn, split
from kvcache.presets.model import Model


def _model(name: str, layers: int) -> Model:
    half = layers // 2
    return Model(
        name=name,
        layers=(
            Full(layers=half, kv_heads=8, head_dim=64),
            Window(layers=half, kv_heads=8, head_dim=64, window=128),
        ),
        sources=(
            (
                f"config.json of openai/{name}: num_hidden_layers {layers}, every second layer with"
                " sliding_window 128, num_key_value_heads 8, head_dim 64"
            ),
            "GptOssConfig of transformers (its defaults are those of gpt-oss-120b)",
        ),
    )


GPT_OSS_120B = _model("gpt-oss-120b", 36)
"""36,864 bytes per token, a window of 4.5 MiB. Source: config.json, GptOssConfig."""

GPT_OSS_20B = _model("gpt-oss-20b", 24)
"""24,576 bytes per token, a window of 3 MiB. Source: config.json, GptOssConfig."""


def read(fields: Fields) -> list[Layers]:
    """GptOssConfig: without `layer_types` every second layer is full, the first has a window."""
    windowed = in_turn(fields, fields.layers())
    return split(windowed, *heads(fields), fields.whole("sliding_window", most=MOST_WINDOW))
