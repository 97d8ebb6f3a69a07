"""The maths of each kind of layer against transformers' modelling code, with random small weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from engine import oracles, paged
from engine.oracles import LayerOracle, Oracle

from kvcache.engine.batch import make_batch
from kvcache.engine.layers import LayerStep
from kvcache.engine.model import Layer, Model, Weights

torch.set_num_threads(1)

TOKENS = 60
CUTS = [1, 2, 9, 16, 17, 30, 31]
"""One chunk of each kind: one token, many, ends on a block and off it."""

MODELS: dict[str, Callable[[int], Oracle]] = {
    "attention (Mistral)": lambda seed: oracles.mistral(seed, None),
    "window (Mistral)": lambda seed: oracles.mistral(seed, 11),
    "window of one token (Mistral)": lambda seed: oracles.mistral(seed, 1),
    "MLA (DeepSeek V3)": lambda seed: oracles.deepseek_v3(seed, None),
    "MLA with low-rank queries (DeepSeek V3)": lambda seed: oracles.deepseek_v3(seed, 12),
    "GDN (Qwen3.5)": oracles.qwen3_5,
    "KDA and MLA without positions (Kimi Linear)": oracles.kimi_linear,
}

LAYERS: dict[str, Callable[[int], LayerOracle]] = {
    "the window alone": lambda seed: oracles.deepseek_v4(seed, "sliding_attention"),
    "entries of 4 tokens, picked": lambda seed: oracles.deepseek_v4(
        seed, "compressed_sparse_attention"
    ),
    "entries of 4 tokens, all": lambda seed: oracles.deepseek_v4(
        seed, "compressed_sparse_attention", top=64
    ),
    "entries of 6 tokens, no overlap": lambda seed: oracles.deepseek_v4(
        seed, "heavily_compressed_attention", ratio=6
    ),
}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_transformers_computes(name: str, exact: bool) -> None:
    oracle = MODELS[name](5)
    model = Model(oracle.weights, block_tokens=4, exact=exact)
    tokens = paged.random_tokens(model, TOKENS, seed=6)
    expected = oracle.logits(torch.from_numpy(tokens).long())
    got = paged.run(paged.new_sequence(model, TOKENS, seed=7), tokens, CUTS)
    for end, row in zip([*CUTS, TOKENS], got, strict=True):
        paged.assert_close(row, expected[end - 1])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_compressed_layer_computes_what_transformers_computes(name: str, exact: bool) -> None:
    oracle = LAYERS[name](5)
    x = torch.randn(TOKENS, oracle.width, generator=torch.Generator().manual_seed(8))
    expected = oracle.outputs(x)
    model = Model(_around(oracle), block_tokens=12, group_blocks={"rows": 4}, exact=exact)
    request = paged.new_sequence(model, TOKENS, seed=9)
    (cache,) = model.caches(request.runner.storage)
    for start, end in zip([0, *CUTS], [*CUTS, TOKENS], strict=True):
        chunk = request.chunk(np.zeros(end - start, np.int32))
        batch = make_batch([chunk], model.geometry, model.readings, by_request=exact)
        step = LayerStep(
            oracle.mixer.rotation[batch.positions], [batch.groups[g] for g in model.groups[0]]
        )
        with torch.inference_mode():
            got = oracle.mixer.forward(x[start:end], step, [cache], model.ops)
        assert float((got - expected[start:end]).abs().max()) < 1e-5


def _around(oracle: LayerOracle) -> Weights:
    """A model that has the layer's groups; nothing of it is computed but the layer."""
    nothing = torch.zeros(0)
    layer = Layer(nothing, oracle.mixer, nothing, nothing, nothing)
    embed = torch.zeros(oracles.VOCABULARY, oracle.width)
    return Weights("layer", embed, [layer], nothing, embed, 1e-6, oracles.CONTEXT_TOKENS)
