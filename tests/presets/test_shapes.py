"""Presets against a second derivation, from tensor shapes (`shapes.py`), by TP, DCP, format, block."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from presets.shapes import Kept, Shapes, shapes, size

from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.presets import names, preset

TP = (1, 2, 3, 4, 8, 16)
LATENT = {"deepseek-v3", "glm-5", "kimi-k3", "kimi-linear-48b"}
V4 = {"deepseek-v4-pro", "deepseek-v4-flash"}


def blocks_of(name: str) -> tuple[int, ...]:
    return (128, 256) if name in V4 else (16, 64, 128)


def total(kept: Sequence[Kept], tp: int, kv_bytes: int) -> float:
    return sum(size(each, tp, kv_bytes) for each in kept)


def per_token(geometry: Geometry, kind: str, *, transient: bool = False) -> float:
    return sum(
        group.page_bytes / rules.block_tokens
        for group, rules in zip(geometry.groups, geometry.rules, strict=True)
        if rules.kind == kind and rules.transient == transient
    )


def check(geometry: Geometry, model: Shapes, tp: int, dcp: int, kv_bytes: int) -> None:
    assert per_token(geometry, "full") == pytest.approx(
        total(model.grows, tp, kv_bytes) / dcp, abs=1e-9
    )
    windows = {
        r.lead_tokens + 1: g.page_bytes / r.block_tokens
        for g, r in zip(geometry.groups, geometry.rules, strict=True)
        if r.kind == "span" and not r.transient
    }
    assert windows == {w: size(kept, tp, kv_bytes) for w, kept in model.windows}
    pools = {
        r.chunk_tokens: g.page_bytes / r.block_tokens
        for g, r in zip(geometry.groups, geometry.rules, strict=True)
        if r.transient
    }
    assert pools == {ratio: size(kept, tp, kv_bytes) for ratio, kept in model.pooling}
    states = [
        g.page_bytes
        for g, r in zip(geometry.groups, geometry.rules, strict=True)
        if r.kind == "state"
    ]
    assert sum(states) == total(model.state, tp, kv_bytes)


def test_the_table_has_every_preset() -> None:
    assert sorted(shapes()) == names()


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("name", names())
def test_bytes_follow_from_the_shapes_of_the_tensors(name: str, tp: int) -> None:
    for block in blocks_of(name):
        for dcp in (1, 2, 8):
            sizes = {"block_tokens": block, "tp": tp, "dcp": dcp}
            check(preset(name, **sizes), shapes()[name], tp, dcp, 2)
            check(preset(name, kv_dtype="fp8", **sizes), shapes()[name], tp, dcp, 1)
            bf16 = shapes(v4_bf16=True)[name]
            check(preset(name, kv_dtype="bf16", **sizes), bf16, tp, dcp, 2)


@pytest.mark.parametrize("name", sorted(LATENT | V4))
def test_packed_latent_rows_carry_their_scales(name: str) -> None:
    for tp in TP:
        geometry = preset(name, tp=tp, kv_dtype="fp8_ds_mla")
        check(geometry, shapes(packed=True)[name], tp, 1, 2)


@pytest.mark.parametrize("name", sorted(set(names()) - LATENT - V4))
def test_a_format_of_latent_rows_is_refused_elsewhere(name: str) -> None:
    with pytest.raises(ConfigError, match="fp8_ds_mla is a format of latent"):
        preset(name, kv_dtype="fp8_ds_mla")


@pytest.mark.parametrize("name", names())
def test_context_parallel_ranks_share_tokens_and_copy_windows_and_states(name: str) -> None:
    one, four = preset(name, tp=8), preset(name, tp=8, dcp=4)
    assert per_token(four, "full") == pytest.approx(per_token(one, "full") / 4)
    assert per_token(four, "span") == per_token(one, "span")
    for alone, shared in zip(one.rules, four.rules, strict=True):
        if alone.kind == "full":
            assert shared.block_tokens == 4 * alone.block_tokens
        else:
            assert shared == alone
    assert [g.page_bytes for g in one.groups] == [g.page_bytes for g in four.groups]
