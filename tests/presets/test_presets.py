from __future__ import annotations

from typing import Any

import pytest

from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.presets import names, preset

MIB = 2**20


def kv_bytes_per_token(geometry: Geometry) -> float:
    """Of the groups that grow with the prompt."""
    return sum(
        group.page_bytes / rules.block_tokens
        for group, rules in zip(geometry.groups, geometry.rules, strict=True)
        if rules.kind == "full"
    )


def state_bytes(geometry: Geometry) -> int:
    kinds = [rules.kind for rules in geometry.rules]
    return sum(g.page_bytes for g, k in zip(geometry.groups, kinds, strict=True) if k == "state")


def span_bytes(geometry: Geometry, name: str, tokens: int) -> int:
    """Of `tokens` tokens of a window or a pooling state."""
    index = [g.name for g in geometry.groups].index(name)
    group, block = geometry.groups[index], geometry.block_tokens[index]
    assert tokens % block == 0
    return tokens // block * group.page_bytes


@pytest.mark.parametrize(
    ("name", "kv", "state"),
    [
        ("smollm2-135m", 23_040, 0),
        ("llama-3-8b", 131_072, 0),
        ("deepseek-v3", 70_272, 0),
        ("minimax-m3", 137_472, 0),
        ("gpt-oss-120b", 36_864, 0),
        ("gpt-oss-20b", 24_576, 0),
        ("gemma-3-27b", 81_920, 0),
        # 69 layers of 96 x 128 x 128 float32 and 3 x 3 x 12,288 bfloat16
        ("kimi-k3", 27_648, 449_372_160),
        ("kimi-linear-48b", 8_064, 43_417_600),
        # 24 layers of 32 x 128 x 128 float32 and 3 x 8,192 bfloat16: 49.1 MiB, 1,572 tokens of KV
        ("qwen3.5-9b", 32_768, 51_511_296),
        ("qwen3.5-35b", 20_480, 64_389_120),
        ("qwen3.5-397b", 30_720, 192_061_440),
        ("nemotron-3-nano", 6_144, 49_082_368),
    ],
)
def test_bytes_of_a_preset_match_published_figures(name: str, kv: int, state: int) -> None:
    geometry = preset(name)
    assert kv_bytes_per_token(geometry) == kv
    assert state_bytes(geometry) == state


@pytest.mark.parametrize(
    ("name", "tokens", "mib"),
    [("gpt-oss-120b", 128, 4.5), ("gpt-oss-20b", 128, 3.0), ("gemma-3-27b", 1024, 416)],
)
def test_bytes_of_a_window_match_published_figures(name: str, tokens: int, mib: float) -> None:
    assert span_bytes(preset(name), "window", tokens) == mib * MIB


@pytest.mark.parametrize(
    ("name", "kv", "window_mib", "light_mib", "heavy_mib"),
    [
        ("deepseek-v4-pro", 5_511.4, 4.35, 2.34, 15.5),
        ("deepseek-v4-flash", 3_850.2, 3.07, 1.64, 10.0),
    ],
)
def test_bytes_of_deepseek_v4_match_published_figures(
    name: str, kv: float, window_mib: float, light_mib: float, heavy_mib: float
) -> None:
    geometry = preset(name)
    assert kv_bytes_per_token(geometry) == pytest.approx(kv, abs=0.1)
    assert span_bytes(geometry, "window", 128) / MIB == pytest.approx(window_mib, abs=0.005)
    # vLLM keeps twice the ratio; a hit on the grid reads half of that.
    assert span_bytes(geometry, "light_pool", 8) / MIB == pytest.approx(light_mib, abs=0.005)
    assert span_bytes(geometry, "heavy_pool", 128) / MIB == pytest.approx(heavy_mib, abs=0.005)
    needs = [128 - r.need_begin(128) for r in geometry.rules if r.kind == "span"]
    assert needs == [127, 4, 0]


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", names())
def test_every_preset_hits_on_128_tokens_and_pads_5_percent_at_most(name: str, tp: int) -> None:
    geometry = preset(name, tp=tp)
    assert geometry.grid_tokens <= 128
    assert max(geometry.padding()) <= 0.05
    # The smallest arena for a million tokens is at most a few slabs above what the pages take.
    tokens = 1_000_000
    least = geometry.slabs_needed(tokens) * geometry.slab_bytes
    assert least <= geometry.pool_bytes(geometry.pages_needed(tokens)) / 0.95 + (
        len(geometry.pages_per_slab) * geometry.slab_bytes
    )


def test_ranks_share_heads_and_states_and_replicate_the_rest() -> None:
    assert kv_bytes_per_token(preset("llama-3-8b", tp=4)) == 131_072 / 4
    assert kv_bytes_per_token(preset("llama-3-8b", tp=16)) == 131_072 / 8  # a head is not cut
    assert kv_bytes_per_token(preset("smollm2-135m", tp=2)) == 23_040 * 2 / 3  # 2 heads and 1
    assert kv_bytes_per_token(preset("kimi-k3", tp=8)) == 27_648  # latent rows are replicated
    assert state_bytes(preset("kimi-k3", tp=8)) == 449_372_160 // 8
    assert state_bytes(preset("qwen3.5-9b", tp=16)) == 51_511_296 // 16
    assert kv_bytes_per_token(preset("minimax-m3", tp=4)) == 122_880 / 4 + 14_592
    assert preset("deepseek-v4-pro", tp=8) == preset("deepseek-v4-pro")


def test_the_grid_of_a_hybrid_preset_is_its_block_size() -> None:
    assert preset("qwen3.5-9b", block_tokens=64).grid_tokens == 64
    assert preset("kimi-k3").grid_tokens == 128


def test_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"deepseek-v3, .*qwen3\.5-9b, smollm2-135m"):
        preset("gpt-17", block_tokens=16)
    assert names() == sorted(names())
    assert len(names()) == 15


@pytest.mark.parametrize(
    ("name", "block_tokens", "tp", "message"),
    [
        ("llama-3-8b", 16, 0, "tp is 0"),
        ("llama-3-8b", 0, 1, "block_tokens is 0"),
        ("deepseek-v4-pro", 64, 1, "multiple of the ratio, 128"),
    ],
)
def test_sizes_that_do_not_work_are_named(
    name: str, block_tokens: int, tp: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        preset(name, block_tokens=block_tokens, tp=tp)


@pytest.mark.parametrize("value", ["2", 2.0, None, True])
@pytest.mark.parametrize("setting", ["tp", "block_tokens"])
def test_sizes_of_a_preset_are_whole_numbers(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is .*: it must be a whole number"):
        preset("kimi-k3", **{setting: value})
