"""What each preset's model keeps, tensor by tensor, and its bytes: an oracle that shares no code with them.

A tensor is a shape and the bytes of an element; `Heads(n)` is an axis that tensor-parallel ranks
share, ceil(n / tp) on the rank that has most. Shapes are written from the sources that
`kvcache.presets.model(NAME).sources` names, not from the preset's own layers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

F32, BF16, U8 = 4, 2, 1
KV = 0
"""Element of K, V or a latent row: 2 bytes in bf16, 1 in fp8."""


class Heads(int):
    """An axis that ranks share."""


Tensor = tuple[tuple[int, ...], int]


class Kept(NamedTuple):
    """Tensors that each of `layers` layers keeps for every `tokens` tokens."""

    layers: int
    tensors: list[Tensor]
    tokens: int = 1


class Shapes(NamedTuple):
    """One model: what grows, windows by size, what is kept at a position, pooling rows of a token."""

    grows: list[Kept]
    windows: tuple[tuple[int, Kept], ...] = ()
    state: tuple[Kept, ...] = ()
    pooling: tuple[tuple[int, Kept], ...] = ()


def gqa(kv_heads: int, head_dim: int) -> list[Tensor]:
    return [((Heads(kv_heads), head_dim), KV), ((Heads(kv_heads), head_dim), KV)]


MLA: list[Tensor] = [((512,), KV), ((64,), KV)]
MLA_PACKED: list[Tensor] = [((512,), U8), ((4,), F32), ((64,), BF16)]
INDEX_KEY: list[Tensor] = [((128,), U8), ((1,), F32)]


def kda(heads: int) -> list[Tensor]:
    conv: list[Tensor] = [((3, Heads(heads), 128), BF16)] * 3
    return [((Heads(heads), 128, 128), F32), *conv]


def gdn(values: int, keys: int = 16) -> list[Tensor]:
    q_and_k: list[Tensor] = [((3, Heads(keys), 128), BF16)] * 2
    return [((Heads(values), 128, 128), F32), *q_and_k, ((3, Heads(values), 128), BF16)]


def mamba2(heads: int) -> list[Tensor]:
    b_and_c: list[Tensor] = [((3, Heads(8), 128), BF16)] * 2
    return [((Heads(heads), 64, 128), F32), ((3, Heads(heads), 64), BF16), *b_and_c]


V4_ROW: list[Tensor] = [((448,), U8), ((64,), BF16), ((8,), U8)]
V4_ROW_BF16: list[Tensor] = [((512,), BF16)]
V4_LIGHT_POOL: list[Tensor] = [((2, 2, 512), F32), ((2, 2, 128), F32)]
V4_HEAVY_POOL: list[Tensor] = [((2, 512), F32)]


def v4(layers: int, light: int, heavy: int, row: list[Tensor]) -> Shapes:
    return Shapes(
        [Kept(light, [*row, *INDEX_KEY], 4), Kept(heavy, row, 128)],
        ((128, Kept(layers, row)),),
        (),
        ((4, Kept(light, V4_LIGHT_POOL)), (128, Kept(heavy, V4_HEAVY_POOL))),
    )


def shapes(packed: bool = False, v4_bf16: bool = False) -> dict[str, Shapes]:
    """Every preset. `packed`: latent rows in fp8_ds_mla; `v4_bf16`: DeepSeek V4 rows in bf16."""
    mla = MLA_PACKED if packed else MLA
    row = V4_ROW_BF16 if v4_bf16 else V4_ROW
    return {
        "smollm2-135m": Shapes([Kept(30, gqa(3, 64))]),
        "llama-3-8b": Shapes([Kept(32, gqa(8, 128))]),
        "llama-3-70b": Shapes([Kept(80, gqa(8, 128))]),
        "gpt-oss-20b": Shapes([Kept(12, gqa(8, 64))], ((128, Kept(12, gqa(8, 64))),)),
        "gpt-oss-120b": Shapes([Kept(18, gqa(8, 64))], ((128, Kept(18, gqa(8, 64))),)),
        "gemma-3-27b": Shapes([Kept(10, gqa(16, 128))], ((1024, Kept(52, gqa(16, 128))),)),
        "gemma-4-31b": Shapes([Kept(10, gqa(4, 512))], ((1024, Kept(50, gqa(16, 256))),)),
        "minimax-m3": Shapes([Kept(60, gqa(4, 128)), Kept(57, [((128,), KV)])]),
        "deepseek-v3": Shapes([Kept(61, mla)]),
        "glm-5": Shapes([Kept(78, mla), Kept(78, INDEX_KEY)]),
        "deepseek-v4-pro": v4(61, 30, 31, row),
        "deepseek-v4-flash": v4(43, 21, 20, row),
        "kimi-k3": Shapes([Kept(24, mla)], (), (Kept(69, kda(96)),)),
        "kimi-linear-48b": Shapes([Kept(7, mla)], (), (Kept(20, kda(32)),)),
        "qwen3.5-9b": Shapes([Kept(8, gqa(4, 256))], (), (Kept(24, gdn(32)),)),
        "qwen3.5-35b": Shapes([Kept(10, gqa(2, 256))], (), (Kept(30, gdn(32)),)),
        "qwen3.5-397b": Shapes([Kept(15, gqa(2, 256))], (), (Kept(45, gdn(64)),)),
        "nemotron-3-nano": Shapes([Kept(6, gqa(2, 128))], (), (Kept(23, mamba2(64)),)),
        "nemotron-3-super": Shapes([Kept(8, gqa(2, 128))], (), (Kept(40, mamba2(128)),)),
    }


def size(kept: Kept, tp: int, kv_bytes: int) -> float:
    """Bytes on the rank that has most, per token (or of the one state)."""
    of_layer = 0
    for shape, element in kept.tensors:
        axes = [math.ceil(axis / tp) if isinstance(axis, Heads) else axis for axis in shape]
        of_layer += math.prod(axes) * (element or kv_bytes)
    return kept.layers * of_layer / kept.tokens
