"""A plain dense forward of an engine model's weights: the baseline of `kvcache bench engine`.

What a careful engineer writes without paging: contiguous K/V memory in the layout that torch's
attention likes best, fused projections, products with the factors in the order that is faster, one
attention call for each layer. It shares the weights with the paged engine and no code. It has
attention and GDN layers: those of the models that are measured.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvcache.core.errors import ConfigError
from kvcache.engine.layers import Attention, GatedDelta
from kvcache.engine.model import Model

Biases = dict[int | None, Tensor]
"""For each window, None for attention over everything: what a decoding token does not see."""

FEW_ROWS = range(2, 129)
"""As the engine does: a CPU's BLAS is faster here with the weight as the left factor."""


class Dense:
    """The baseline: K and V of `[requests, kv_heads, context, head_dim]` for each layer."""

    def __init__(self, model: Model, requests: int, context: int) -> None:
        self.weights = model.weights
        self.context = context
        self.memory: list[tuple[Tensor, ...]] = []
        """Of each layer: K and V; or states and the convolution's last inputs, by request."""
        self._windows: set[int | None] = set()
        for layer in model.weights.layers:
            mixer = layer.mixer
            if isinstance(mixer, Attention):
                self._windows.add(mixer.window)
                shape = (requests, mixer.kv_heads, context, mixer.head_dim)
                self.memory.append((torch.zeros(shape), torch.zeros(shape)))
            elif isinstance(mixer, GatedDelta):
                h = mixer.heads
                matrix = (requests, h.value_heads, h.key_dim, h.value_dim)
                tail = (requests, h.channels, h.taps - 1)
                self.memory.append((torch.zeros(matrix), torch.zeros(tail)))
            else:
                raise ConfigError(
                    f"the dense baseline has no {type(mixer).__name__} layers: measure a model of"
                    " attention and GDN layers"
                )

    def fill(self, seed: int) -> None:
        """Random K, V and states, in place of those of long prompts."""
        generator = torch.Generator().manual_seed(seed)
        for part in (part for memory in self.memory for part in memory):
            part.normal_(generator=generator)

    def prefill(self, tokens: Tensor) -> Tensor:
        """Logits `[1, vocabulary]` after a prompt `[n]`, whose K, V and states are kept."""
        return self._forward(tokens[None], torch.arange(len(tokens))[None], None)

    def decode(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits `[requests, vocabulary]` after one more token `[requests]` each."""
        biases = {window: self._bias(lengths, window) for window in self._windows}
        return self._forward(tokens[:, None], lengths[:, None], biases)

    def _forward(self, tokens: Tensor, positions: Tensor, biases: Biases | None) -> Tensor:
        w = self.weights
        x = F.embedding(tokens, w.embed)
        for layer, memory in zip(w.layers, self.memory, strict=True):
            h = F.rms_norm(x, (x.shape[-1],), layer.mixer_norm, w.epsilon)
            if isinstance(layer.mixer, Attention):
                x = x + self._attention(layer.mixer, h, positions, memory, biases)
            else:
                assert isinstance(layer.mixer, GatedDelta)
                x = x + self._delta(layer.mixer, h, memory, fresh=biases is None)
            h = F.rms_norm(x, (x.shape[-1],), layer.mlp_norm, w.epsilon)
            gate, up = _linear(h, layer.gate_up).chunk(2, -1)
            x = x + _linear(F.silu(gate) * up, layer.down)
        last = F.rms_norm(x[:, -1], (x.shape[-1],), w.norm, w.epsilon)
        return _linear(last, w.head)

    def _attention(
        self, layer: Attention, h: Tensor, positions: Tensor, cache: tuple[Tensor, ...],
        biases: Biases | None,
    ) -> Tensor:  # fmt: skip
        n, t, _ = h.shape
        turns = layer.rotation[positions]
        qkv = _linear(h, layer.qkv).view(n, t, -1, layer.head_dim)
        split = qkv.shape[2] - layer.kv_heads
        turned = torch.view_as_complex(qkv[:, :, :split].contiguous().view(n, t, split, -1, 2))
        turned = torch.view_as_real(turned * turns[:, :, None]).flatten(-2).transpose(1, 2)
        q, k = turned.tensor_split([split - layer.kv_heads], dim=1)
        v = qkv[:, :, split:].transpose(1, 2)
        if biases is None:
            cache[0][:, :, :t], cache[1][:, :, :t] = k, v
            seen = None
            if layer.window is not None:
                seen = torch.ones(t, t, dtype=torch.bool).tril_().triu_(1 - layer.window)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=True
            )
        else:
            rows = torch.arange(n)
            cache[0][rows, :, positions[:, 0]] = k[:, :, 0]
            cache[1][rows, :, positions[:, 0]] = v[:, :, 0]
            grouped = q.reshape(n, layer.kv_heads, -1, layer.head_dim)
            bias = biases[layer.window]
            out = F.scaled_dot_product_attention(grouped, cache[0], cache[1], attn_mask=bias)
            out = out.reshape(n, -1, 1, layer.head_dim)
        return _linear(out.transpose(1, 2).reshape(n, t, -1), layer.out)

    def _bias(self, lengths: Tensor, window: int | None) -> Tensor:
        """What the one token after `lengths [requests]` sees, `[requests, 1, 1, context]`."""
        positions, last = torch.arange(self.context), lengths[:, None]
        hidden = positions > last
        if window is not None:
            hidden = hidden | (positions <= last - window)
        return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None, :]

    def _delta(
        self, layer: GatedDelta, h: Tensor, memory: tuple[Tensor, ...], *, fresh: bool
    ) -> Tensor:
        n, t, _ = h.shape
        heads, keys = layer.heads, layer.heads.key_heads * layer.heads.key_dim
        if fresh:
            for part in memory:
                part.zero_()
        state, tail = memory
        inputs = torch.cat((tail, _linear(h, layer.qkv).transpose(1, 2)), 2)
        tail.copy_(inputs[:, :, inputs.shape[2] - tail.shape[2] :])
        kernel = layer.taps.t().unsqueeze(1)
        qkv = F.silu(F.conv1d(inputs, kernel, groups=len(kernel))).transpose(1, 2)
        q, k, v = qkv.tensor_split((keys, 2 * keys), -1)
        each = heads.value_heads // heads.key_heads
        q, k = (
            F.normalize(part.view(n, t, heads.key_heads, -1), dim=-1).repeat_interleave(each, 2)
            for part in (q, k)
        )
        v = v.view(n, t, heads.value_heads, -1)
        forget = F.softplus(_linear(h, layer.decay) + layer.decay_bias) * layer.speed
        decay, rate = torch.exp(-forget), torch.sigmoid(_linear(h, layer.rate))
        s = state.clone()
        outputs = []
        for i in range(t):
            s = s * decay[:, i, :, None, None]
            wrong = v[:, i] - torch.einsum("nhkv,nhk->nhv", s, k[:, i])
            s = s + torch.einsum("nhk,nhv->nhkv", k[:, i], wrong * rate[:, i, :, None])
            outputs.append(torch.einsum("nhkv,nhk->nhv", s, q[:, i]))
        state.copy_(s)
        mixed = torch.stack(outputs, 1) * heads.key_dim**-0.5
        mixed = F.rms_norm(mixed, (mixed.shape[-1],), layer.norm, layer.epsilon)
        gate = F.silu(_linear(h, layer.gate)).view_as(mixed)
        return _linear((mixed * gate).flatten(2), layer.out)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x [requests, tokens, in] @ weight [out, in]^T`."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) in FEW_ROWS:
        return (weight @ rows.t()).t().reshape(*x.shape[:-1], -1)
    return F.linear(x, weight)
