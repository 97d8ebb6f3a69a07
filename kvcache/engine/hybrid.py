"""A model with any mix of layers, with random weights: equal settings and seeds give equal models.

For tests, and to try what a mix of layers does to a cache: what such a model says means nothing,
but every next token depends on its whole context.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial

import torch

from kvcache.core.errors import ConfigError
from kvcache.core.specs.base import require_positive
from kvcache.engine import ops
from kvcache.engine.layer_settings import EPSILON, LayerSettings, Random
from kvcache.engine.model import Layer, Weights
from kvcache.engine.tokenizer import ByteTokenizer

ROTATION_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True)
class HybridSettings:
    """The layers of a model, from the first to the last, and its other sizes."""

    layers: tuple[LayerSettings, ...]
    width: int = 64
    hidden: int = 128
    """Of the MLP behind every layer."""
    context_tokens: int = 1 << 15
    name: str = ""
    """What the model is called, in place of one made from the settings. Keys depend on these, too."""

    def __post_init__(self) -> None:
        require_positive(self, "width", "hidden", "context_tokens")
        if not self.layers:
            raise ConfigError("HybridSettings.layers is empty: give one layer at least")


def random_weights(settings: HybridSettings, seed: int = 0) -> Weights:
    """The weights of a seed, for bytes as tokens."""
    rotations: dict[int, torch.Tensor] = {}

    def rotation(head_dim: int) -> torch.Tensor:
        if head_dim not in rotations:
            make = partial(ops.rotation_table, settings.context_tokens, base=ROTATION_BASE)
            rotations[head_dim] = make(head_dim)
        return rotations[head_dim]

    width, hidden = settings.width, settings.hidden
    random = Random(seed, width, rotation)
    vocabulary = ByteTokenizer().vocab_size
    layers = [
        Layer(
            mixer_norm=random.norm(width),
            mixer=each.make(random),
            mlp_norm=random.norm(width),
            gate_up=random.matrix(2 * hidden, width),
            down=random.matrix(width, hidden),
        )
        for each in settings.layers
    ]
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
    return Weights(
        name=f"{settings.name or f'hybrid-{digest}'}-{seed}",
        embed=random.matrix(vocabulary, width, scale=1.0),
        layers=layers,
        norm=random.norm(width),
        head=random.matrix(vocabulary, width),
        epsilon=EPSILON,
        context_tokens=settings.context_tokens,
        digest=digest,
    )
