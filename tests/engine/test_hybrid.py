"""Models made from settings: what equal settings give, which layers share a group, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine import paged
from engine.mixes import GDN, HEAVY, KDA, LATENT, LIGHT, MIXES, WINDOW
from torch import Tensor

from kvcache.core.errors import ConfigError
from kvcache.engine.hybrid import HybridSettings, random_weights
from kvcache.engine.layer_settings import (
    CompressedLayer,
    FullLayer,
    GatedDeltaLayer,
    KimiDeltaLayer,
    LatentLayer,
)
from kvcache.engine.model import Model, Weights

torch.set_num_threads(1)

EVERY = MIXES["every"]


def tensors(value: object) -> Iterator[Tensor]:
    """All that a record of records holds."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors(getattr(value, name))


def weights(seed: int, **changes: int) -> Weights:
    return random_weights(
        HybridSettings(layers=EVERY.layers, **({"context_tokens": 64} | changes)), seed
    )


def test_equal_settings_and_seeds_give_equal_models_and_others_do_not() -> None:
    one, same, other = weights(1), weights(1), weights(2)
    assert one.name == same.name
    assert len({one.name, other.name, weights(1, hidden=32).name}) == 3
    pairs = list(zip(tensors(one), tensors(same), strict=True))
    assert len(pairs) > 80
    assert all(torch.equal(a, b) for a, b in pairs)
    changed = [not torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True)]
    assert sum(changed) == len(changed) - 5, "all but the tables of positions"


def test_layers_with_equal_pages_share_a_group_and_others_have_their_own() -> None:
    layers = (WINDOW, FullLayer(), GDN, WINDOW, FullLayer(window=5, heads=2), LIGHT, HEAVY, KDA)
    model = Model(
        random_weights(HybridSettings(layers=(*layers, LATENT, FullLayer()), context_tokens=64)),
        group_blocks={"window": 8},
    )
    groups = [(g.name, g.layers, g.rules.kind) for g in model.geometry.groups]
    assert groups == [
        ("attention", 2, "full"),
        ("entries", 1, "full"),
        ("entries-2", 1, "full"),
        ("latent", 1, "full"),
        ("window", 2, "span"),
        ("window-2", 1, "span"),
        ("rows", 2, "span"),
        ("pool", 1, "span"),
        ("pool-2", 1, "span"),
        ("gdn", 1, "state"),
        ("kda", 1, "state"),
    ]
    assert model.groups[0] == model.groups[3] == (4,)
    assert model.groups[5] == (6, 1, 7)
    assert [g.rules.block_tokens for g in model.geometry.groups[3:9]] == [16, 8, 8, 16, 4, 8]


def test_the_keys_of_models_and_formats_differ() -> None:
    prints = {
        EVERY._replace(kv_dtype=kind).model(seed).fingerprint()
        for kind in ("fp32", "bf16", "fp8")
        for seed in (0, 1)
    }
    assert len(prints) == 6


@pytest.mark.parametrize(
    "other",
    [
        {"layers": (FullLayer(head_dim=8, window=12),)},
        {"layers": (FullLayer(head_dim=8), FullLayer(head_dim=8))},
        {"hidden": 64},
        {"width": 32},
    ],
)
def test_a_name_of_its_own_gives_two_models_no_key_in_common(other: dict[str, Any]) -> None:
    settings = HybridSettings(layers=(FullLayer(head_dim=8),), name="mine")
    models = [Model(random_weights(each)) for each in (settings, replace(settings, **other))]
    assert models[0].name == models[1].name == "mine-0"
    assert models[0].fingerprint() != models[1].fingerprint()
    assert models[0].fingerprint() == Model(random_weights(settings)).fingerprint()


@pytest.mark.parametrize("position", [0, 21, 58])
@pytest.mark.parametrize("name", MIXES)
def test_the_next_token_depends_on_the_whole_context(name: str, position: int) -> None:
    model = MIXES[name]._replace(kv_dtype="fp32").model(4, exact=False)
    tokens = paged.random_tokens(model, 60, seed=7)
    changed = tokens.copy()
    changed[position] = (changed[position] + 1) % 256
    one, other = (paged.run(paged.new_sequence(model, 60), t)[0] for t in (tokens, changed))
    assert float((one - other).abs().max()) > 1e-4


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: FullLayer(heads=0), r"FullLayer\.heads is 0"),
        (lambda: FullLayer(heads=4, kv_heads=3), "kv_heads is 3: it must divide heads, 4"),
        (lambda: FullLayer(head_dim=7), "head_dim is 7: positions rotate pairs"),
        (lambda: FullLayer(window=-1), r"FullLayer\.window is -1"),
        (lambda: LatentLayer(rope_dim=3), "rope_dim is 3: positions rotate pairs"),
        (lambda: LatentLayer(rank=0), r"LatentLayer\.rank is 0"),
        (lambda: CompressedLayer(rope_dim=10), r"rope_dim is 10: .* index_dim \(8\)"),
        (lambda: CompressedLayer(heads=4, out_parts=3), "out_parts is 3: it must divide heads, 4"),
        (lambda: CompressedLayer(top=0), r"CompressedLayer\.top is 0"),
        (lambda: GatedDeltaLayer(key_heads=3), "key_heads is 3: it must divide value_heads, 4"),
        (lambda: KimiDeltaLayer(taps=0), r"KimiDeltaLayer\.taps is 0"),
        (lambda: HybridSettings(layers=()), "layers is empty: give one layer at least"),
        (lambda: HybridSettings(layers=(GDN,), width=0), r"HybridSettings\.width is 0"),
        (
            lambda: EVERY._replace(group_blocks={"widow": 4}).model(0),
            r"group_blocks names \['widow'\]: the groups are \['entries', 'attention'",
        ),
        (lambda: EVERY._replace(block_tokens=12).model(0), "must be a multiple of the ratio, 8"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()
