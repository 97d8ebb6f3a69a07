"""Presets: bytes against published figures, grid and waste, what ranks share, wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.bench.sizing import boundary_bytes, bytes_per_token, window_bytes_per_token
from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.presets import model, names, preset

MIB = 2**20
NAMES = [
    "kimi-k3",
    "kimi-linear-48b",
    "deepseek-v3",
    "deepseek-v4-pro",
    "deepseek-v4-flash",
    "minimax-m3",
    "glm-5",
    "qwen3.5-397b",
    "qwen3.5-35b",
    "qwen3.5-9b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "gemma-3-27b",
    "gemma-4-31b",
    "nemotron-3-super",
    "nemotron-3-nano",
    "llama-3-8b",
    "llama-3-70b",
    "smollm2-135m",
]


def span_bytes(geometry: Geometry, name: str, tokens: int) -> int:
    """Of `tokens` tokens of a window or a pooling state."""
    index = [g.name for g in geometry.groups].index(name)
    group, block = geometry.groups[index], geometry.block_tokens[index]
    assert tokens % block == 0
    return tokens // block * group.page_bytes


def test_these_are_the_presets() -> None:
    assert names() == sorted(NAMES)
    assert all(model(name).name == name for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_has_sources(name: str) -> None:
    assert model(name).sources
    assert all(len(text) > 20 for text in (*model(name).sources, *model(name).unverified))


@pytest.mark.parametrize(
    ("name", "kv", "state"),
    [
        ("smollm2-135m", 23_040, 0),
        ("llama-3-8b", 131_072, 0),
        ("llama-3-70b", 327_680, 0),
        ("deepseek-v3", 70_272, 0),
        ("minimax-m3", 137_472, 0),
        # 78 rows of 1,152 bytes, and as many index keys of 132
        ("glm-5", 100_152, 0),
        ("gpt-oss-120b", 36_864, 0),
        ("gpt-oss-20b", 24_576, 0),
        ("gemma-3-27b", 81_920, 0),
        ("gemma-4-31b", 81_920, 0),
        # 69 layers of 96 x 128 x 128 float32 and 3 x 3 x 12,288 bfloat16
        ("kimi-k3", 27_648, 449_372_160),
        ("kimi-linear-48b", 8_064, 43_417_600),
        # 24 layers of 32 x 128 x 128 float32 and 3 x 8,192 bfloat16: 49.1 MiB, 1,572 tokens of KV
        ("qwen3.5-9b", 32_768, 51_511_296),
        ("qwen3.5-35b", 20_480, 64_389_120),
        ("qwen3.5-397b", 30_720, 192_061_440),
        ("nemotron-3-nano", 6_144, 49_082_368),
        # 40 layers of 128 x 64 x 128 float32 and 3 x 10,240 bfloat16
        ("nemotron-3-super", 8_192, 170_229_760),
    ],
)
def test_bytes_of_a_preset_match_published_figures(name: str, kv: int, state: int) -> None:
    geometry = preset(name)
    assert bytes_per_token(geometry) == kv
    assert boundary_bytes(geometry).states == state


@pytest.mark.parametrize(
    ("name", "kv", "window_mib", "state_mib", "tokens"),
    [
        # As a survey of public figures has them: KV, window, state, both as tokens of KV.
        ("kimi-k3", 27_648, 0, 428.6, 16_253),
        ("kimi-linear-48b", 8_064, 0, 41.4, 5_384),
        ("qwen3.5-397b", 30_720, 0, 183.2, 6_252),
        ("qwen3.5-35b", 20_480, 0, 61.4, 3_144),
        ("qwen3.5-9b", 32_768, 0, 49.1, 1_572),
        ("gpt-oss-120b", 36_864, 4.5, 0, 128),
        ("gpt-oss-20b", 24_576, 3.0, 0, 128),
        ("gemma-3-27b", 81_920, 416, 0, 5_325),
        ("gemma-4-31b", 81_920, 800, 0, 10_240),
        ("nemotron-3-super", 8_192, 0, 162.3, 20_780),
        ("nemotron-3-nano", 6_144, 0, 46.8, 7_989),
    ],
)
def test_a_boundary_is_as_large_as_published(
    name: str, kv: int, window_mib: float, state_mib: float, tokens: int
) -> None:
    geometry = preset(name)
    one = boundary_bytes(geometry)
    assert bytes_per_token(geometry) == kv
    assert one.windows / MIB == pytest.approx(window_mib, abs=0.05)
    assert one.states / MIB == pytest.approx(state_mib, abs=0.05)
    assert one.total / kv == pytest.approx(tokens, abs=1)


@pytest.mark.parametrize(
    ("name", "kv_dtype", "kv"),
    [
        ("kimi-k3", "fp8", 13_824),
        ("kimi-k3", "fp8_ds_mla", 15_744),
        ("minimax-m3", "fp8", 68_736),
        ("deepseek-v4-pro", "bf16", 8_918),
        ("deepseek-v4-pro", "fp8", 5_511),
        ("deepseek-v4-flash", "fp8_ds_mla", 3_850),
        ("deepseek-v3", "fp8_ds_mla", 61 * 656),
        ("llama-3-70b", "fp8", 163_840),
        ("glm-5", "fp8", 78 * (576 + 132)),
        ("glm-5", "fp8_ds_mla", 78 * (656 + 132)),
    ],
)
def test_formats_of_the_kv_match_published_figures(name: str, kv_dtype: str, kv: int) -> None:
    assert bytes_per_token(preset(name, kv_dtype=kv_dtype)) == pytest.approx(kv, abs=0.5)


@pytest.mark.parametrize("name", names())
def test_states_do_not_depend_on_the_format_of_the_kv(name: str) -> None:
    states = {boundary_bytes(preset(name, kv_dtype=d)).states for d in ("auto", "bf16", "fp8")}
    assert len(states) == 1


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
    assert bytes_per_token(geometry) == pytest.approx(kv, abs=0.1)
    assert span_bytes(geometry, "window", 128) / MIB == pytest.approx(window_mib, abs=0.005)
    # vLLM keeps twice the ratio; a hit on the grid reads half of that.
    assert span_bytes(geometry, "light_pool", 8) / MIB == pytest.approx(light_mib, abs=0.005)
    assert span_bytes(geometry, "heavy_pool", 128) / MIB == pytest.approx(heavy_mib, abs=0.005)
    needs = [128 - r.need_begin(128) for r in geometry.rules if r.kind == "span"]
    assert needs == [127, 4, 0]
    one = boundary_bytes(geometry)
    assert one.windows / MIB == pytest.approx(window_mib, abs=0.005)
    assert one.pooling / MIB == pytest.approx(light_mib / 2, abs=0.005)


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


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("name", names())
def test_padding_stays_small_in_every_format(name: str, kv_dtype: str) -> None:
    for tp in (1, 8):
        try:
            geometry = preset(name, tp=tp, kv_dtype=kv_dtype)
        except ConfigError:
            assert kv_dtype == "fp8_ds_mla"
            continue
        assert geometry.grid_tokens <= 128
        assert max(geometry.padding()) <= 0.05


def test_ranks_share_heads_and_states_and_replicate_the_rest() -> None:
    assert bytes_per_token(preset("llama-3-8b", tp=4)) == 131_072 / 4
    assert bytes_per_token(preset("llama-3-8b", tp=16)) == 131_072 / 8  # a head is not cut
    assert bytes_per_token(preset("smollm2-135m", tp=2)) == 23_040 * 2 / 3  # 2 heads and 1
    assert bytes_per_token(preset("kimi-k3", tp=8)) == 27_648  # latent rows are replicated
    assert boundary_bytes(preset("kimi-k3", tp=8)).states == 449_372_160 // 8
    assert boundary_bytes(preset("qwen3.5-9b", tp=16)).states == 51_511_296 // 16
    assert bytes_per_token(preset("minimax-m3", tp=4)) == 122_880 / 4 + 14_592
    assert window_bytes_per_token(preset("gemma-4-31b", tp=8)) == 819_200 / 8
    assert preset("deepseek-v4-pro", tp=8) == preset("deepseek-v4-pro")


def test_the_grid_of_a_hybrid_preset_is_its_block_size() -> None:
    assert preset("qwen3.5-9b", block_tokens=64).grid_tokens == 64
    assert preset("kimi-k3").grid_tokens == 128
    assert preset("kimi-k3", block_tokens=16, dcp=8).grid_tokens == 128


def test_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"deepseek-v3, .*qwen3\.5-9b, smollm2-135m"):
        preset("gpt-17", block_tokens=16)
    with pytest.raises(ConfigError, match="no preset 'gpt-17'"):
        model("gpt-17")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("llama-3-8b", {"tp": 0}, "tp is 0"),
        ("llama-3-8b", {"tp": True}, "tp is True: it must be a whole number"),
        ("llama-3-8b", {"tp": 2**40}, "tp is 1099511627776: it must be from 1 to"),
        ("llama-3-8b", {"dcp": -1}, "dcp is -1"),
        ("llama-3-8b", {"dcp": 1.0}, r"dcp is 1\.0: it must be a whole number"),
        ("llama-3-8b", {"block_tokens": 0}, "block_tokens is 0"),
        ("llama-3-8b", {"kv_dtype": "fp4"}, "kv_dtype is 'fp4': choose one of auto, bf16"),
        ("deepseek-v4-pro", {"block_tokens": 64}, "multiple of the ratio, 128"),
    ],
)
def test_sizes_that_do_not_work_are_named(
    name: str, arguments: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        preset(name, **arguments)


@pytest.mark.parametrize("value", ["2", 2.0, None, True])
@pytest.mark.parametrize("setting", ["tp", "block_tokens"])
def test_sizes_of_a_preset_are_whole_numbers(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is .*: it must be a whole number"):
        preset("kimi-k3", **{setting: value})
