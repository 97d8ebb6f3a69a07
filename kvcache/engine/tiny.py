"""A small hybrid with random weights: recurrent and attention layers in turn, over raw bytes.

For tests and where no real model is at hand. Equal seeds give equal weights; what it says means
nothing, but every next token depends on the whole context.
"""

from __future__ import annotations

from kvcache.engine.hybrid import HybridSettings, random_weights
from kvcache.engine.layer_settings import FullLayer, GatedDeltaLayer, LayerSettings
from kvcache.engine.model import Model

PAIRS = 2
"""Of one recurrent and one attention layer each; with a window, that many triples."""


def build_model(
    seed: int = 0,
    *,
    block_tokens: int = 16,
    context_tokens: int = 1 << 15,
    window: int | None = None,
    exact: bool = False,
) -> Model:
    """The model of a seed.

    Args:
        window: adds layers of sliding-window attention over so many tokens.
        exact: see `Model`.
    """
    name = "tiny-hybrid"
    layers: list[LayerSettings] = [GatedDeltaLayer(), FullLayer()]
    if window is not None:
        name = f"tiny-hybrid-window-{window}"
        layers.insert(1, FullLayer(window=window))
    settings = HybridSettings(
        layers=tuple(layers) * PAIRS, context_tokens=context_tokens, name=name
    )
    return Model(random_weights(settings, seed), block_tokens=block_tokens, exact=exact)
