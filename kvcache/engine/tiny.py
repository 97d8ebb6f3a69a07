"""A small hybrid with random weights: state and attention layers in turn, over raw bytes.

For tests and where no real model is at hand. Equal seeds give equal weights; what it says means
nothing, but every next token depends on the whole context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcache.engine import ops
from kvcache.engine.layers_attention import Attention
from kvcache.engine.layers_state import DeltaRule
from kvcache.engine.model import Layer, Model, Weights
from kvcache.engine.tokenizer import ByteTokenizer

WIDTH = 64
HIDDEN = 128
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
STATE_HEADS, KEY_DIM, VALUE_DIM = 4, 16, 16
PAIRS = 2
"""Of one state and one attention layer each; with a window, that many triples."""
EPSILON = 1e-5
ROTATION_BASE = 10_000.0
SLOW_DECAY = 4.0
"""Bias of the decay: sigmoid(4) = 0.982 a token, so that states remember some hundred tokens."""


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
    random = _Random(seed)
    vocabulary = ByteTokenizer().vocab_size
    layers = []
    for _ in range(PAIRS):
        layers.append(random.layer(random.state()))
        if window is not None:
            layers.append(random.layer(random.attention(window)))
        layers.append(random.layer(random.attention()))
    weights = Weights(
        name=f"tiny-hybrid-{seed}" + (f"-window-{window}" if window is not None else ""),
        embed=random.matrix(vocabulary, WIDTH, scale=1.0),
        layers=layers,
        norm=torch.ones(WIDTH),
        head=random.matrix(vocabulary, WIDTH),
        epsilon=EPSILON,
        context_tokens=context_tokens,
        rotation=ops.rotation_table(context_tokens, HEAD_DIM, ROTATION_BASE),
    )
    return Model(weights, block_tokens=block_tokens, exact=exact)


class _Random:
    """Weights from one stream of random numbers."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, scale: float | None = None) -> Tensor:
        values = torch.randn(rows, columns, generator=self._generator)
        return values * (columns**-0.5 if scale is None else scale)

    def layer(self, mixer: Attention | DeltaRule) -> Layer:
        return Layer(
            mixer_norm=torch.ones(WIDTH),
            mixer=mixer,
            mlp_norm=torch.ones(WIDTH),
            gate_up=self.matrix(2 * HIDDEN, WIDTH),
            down=self.matrix(WIDTH, HIDDEN),
        )

    def attention(self, window: int | None = None) -> Attention:
        return Attention(
            qkv=self.matrix((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH),
            out=self.matrix(WIDTH, HEADS * HEAD_DIM),
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            window=window,
        )

    def state(self) -> DeltaRule:
        return DeltaRule(
            qkv=self.matrix(STATE_HEADS * (2 * KEY_DIM + VALUE_DIM), WIDTH),
            gates=self.matrix(STATE_HEADS * (2 + VALUE_DIM), WIDTH),
            decay_bias=torch.full((STATE_HEADS,), SLOW_DECAY),
            norm=torch.ones(VALUE_DIM),
            out=self.matrix(WIDTH, STATE_HEADS * VALUE_DIM),
            heads=STATE_HEADS,
            key_dim=KEY_DIM,
            value_dim=VALUE_DIM,
            epsilon=EPSILON,
        )
