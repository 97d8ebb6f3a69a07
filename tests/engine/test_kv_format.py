"""K and V in float32, bfloat16 and float8: what is stored, what it takes, what it does to a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine import paged
from engine.mixes import MIXES

from kvcache.core.errors import ConfigError
from kvcache.engine.kv_format import KV_FORMATS, find_kv_format

torch.set_num_threads(1)

WIDE = ("gdn", "kda", "pool", "pool-2")
"""Groups of states: float32 always."""


def test_torch_has_every_format() -> None:
    assert list(KV_FORMATS) == ["fp32", "bf16", "fp8"]
    assert [f.element_bytes for f in KV_FORMATS.values()] == [4, 2, 1]


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype is 'pf8' \(did you mean 'fp8'\?\): choose"):
        MIXES["full"]._replace(kv_dtype="pf8").model(0)


def test_float8_stores_the_nearest_number_and_never_more_than_its_largest() -> None:
    values = torch.tensor([0.0, -1.0, 1.06, 1.07, 300.0, 448.0, 1e9, -1e9])
    expected = [0.0, -1.0, 1.0, 1.125, 288.0, 448.0, 448.0, -448.0]
    fp8 = find_kv_format("fp8")
    assert fp8.encode(values).dtype == torch.uint8
    assert fp8.decode(fp8.encode(values)).tolist() == expected


@pytest.mark.parametrize("name", ["bf16", "fp8"])
@pytest.mark.parametrize("mix", ["full", "latent"])
def test_pages_hold_what_float32_pages_hold_rounded(mix: str, name: str) -> None:
    stored = []
    for kind in ("fp32", name):
        model = MIXES[mix]._replace(kv_dtype=kind).model(1)
        sequence = paged.new_sequence(model, 16)
        paged.run(sequence, paged.random_tokens(model, 16, seed=1))
        first = sequence.runner.first[0]
        cache: Any = model.caches(sequence.runner.storage)[0]  # nothing was read before this layer
        stored.append(cache.pages[first : first + 2])
    wide, narrow = stored
    assert float(wide.abs().min()) > 0
    assert torch.equal(narrow, find_kv_format(name).encode(wide))


@pytest.mark.parametrize(("name", "share"), [("bf16", 2), ("fp8", 4)])
def test_pages_of_k_and_v_shrink_with_the_format_and_states_do_not(name: str, share: int) -> None:
    wide, narrow = (
        MIXES["every"]._replace(kv_dtype=kind).model(1).geometry.groups for kind in ("fp32", name)
    )
    for one, other in zip(wide, narrow, strict=True):
        assert one.page_bytes == other.page_bytes * (1 if one.name in WIDE else share)


@pytest.mark.parametrize(("name", "least", "most"), [("bf16", 1e-4, 0.1), ("fp8", 1e-2, 1.0)])
@pytest.mark.parametrize("mix", ["full", "window", "latent", "compressed"])
def test_a_narrow_format_costs_a_little_accuracy(
    mix: str, name: str, least: float, most: float
) -> None:
    models = [MIXES[mix]._replace(kv_dtype=kind).model(3, exact=False) for kind in ("fp32", name)]
    tokens = paged.random_tokens(models[0], 50, seed=2)
    one, other = (paged.run(paged.new_sequence(m, 50), tokens)[0] for m in models)
    assert least < float((one - other).abs().max()) < most
