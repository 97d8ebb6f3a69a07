from __future__ import annotations

import pytest

from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention
from kvcache.presets import names, preset


def kv_bytes_per_token(geometry: Geometry) -> int:
    return sum(g.bytes_per_token for g in geometry.groups if isinstance(g, FullAttention))


def state_bytes(geometry: Geometry) -> int:
    return sum(g.page_bytes for g in geometry.groups if g.kind == "recurrent")


@pytest.mark.parametrize(
    ("name", "kv", "state"),
    [
        ("smollm2-135m", 23_040, 0),
        ("llama-3-8b", 131_072, 0),
        # 24 layers of 32 x 128 x 128 float32 and 3 x 8,192 bfloat16: 49.1 MiB, 1,572 tokens of KV
        ("qwen3.5-9b", 32_768, 51_511_296),
    ],
)
def test_bytes_of_a_preset_match_published_figures(name: str, kv: int, state: int) -> None:
    geometry = preset(name, block_tokens=16)
    assert kv_bytes_per_token(geometry) == kv
    assert state_bytes(geometry) == state


def test_the_grid_of_a_hybrid_preset_is_its_block_size() -> None:
    assert preset("qwen3.5-9b", block_tokens=128).grid_tokens == 128


def test_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"llama-3-8b, qwen3\.5-9b, smollm2-135m"):
        preset("gpt-17", block_tokens=16)
    assert names() == ["llama-3-8b", "qwen3.5-9b", "smollm2-135m"]
