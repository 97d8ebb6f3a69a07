"""Tensor operations that the models share. T = tokens, N = sequences, H = heads.

The results of `linear`, `swiglu` and of attention depend in the last bits on how many rows are
computed at once (measured, see `docs/log.md`); those of the state operations do not: they are
elementwise products and sums per row, and their activations are made from `exp` alone. `EXACT`
computes the former row by row, so that no result depends on how a prompt was cut: for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

FEW_ROWS = range(2, 129)
"""Rows for which a CPU's BLAS is faster with the weight as the left factor: two to three times at 2 to 4
rows, 1.3x to 1.9x at 16 (docs/log.md)."""

LINEAR_FROM = 20.0
"""From here on softplus is its argument: exp(-20) is below float32's rounding of 20."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x [T, in] @ weight [out, in]^T`. The result may be column-major."""
    if len(x) in FEW_ROWS and x.device.type == "cpu":
        return torch.mm(weight, x.t()).t()
    return F.linear(x, weight)


def linear_by_head(x: Tensor, weight: Tensor) -> Tensor:
    """Each head has a weight of its own: `[T, H, in]` by `[H, out, in]` to `[T, H, out]`."""
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last dimension (arXiv 1910.07467)."""
    return F.rms_norm(x, x.shape[-1:], weight, epsilon)


def unit(x: Tensor, epsilon: float) -> Tensor:
    """`x / sqrt(|x|^2 + epsilon)` over the last dimension."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + epsilon)


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[T, 2 * width]` (arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def sigmoid(x: Tensor) -> Tensor:
    """From `exp`: `torch.sigmoid` rounds differently in the tail of a vector loop."""
    return torch.reciprocal(torch.exp(-x) + 1)


def softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))`, from `exp` and `log1p` as `sigmoid` is from `exp`."""
    return torch.where(x > LINEAR_FROM, x, torch.log1p(torch.exp(x.clamp(max=LINEAR_FROM))))


def rotation_table(context_tokens: int, head_dim: int, base: float) -> Tensor:
    """Rotary position angles as unit complex numbers, `[context_tokens, head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.outer(torch.arange(context_tokens, dtype=torch.float64), base**-exponents)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def rotate_(x: Tensor, rotation: Tensor) -> None:
    """Rotary embedding in place, neighbouring elements being a pair (arXiv 2104.09864).

    `x [T, H, head_dim]` with contiguous heads, `rotation [T, head_dim / 2]`.
    """
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    pairs.mul_(rotation.unsqueeze(1))


def causal_bias(rows: int, context: int, repeat: int, window: int | None = None) -> Tensor:
    """What is added to attention scores so that a token sees itself and what is before it.

    `[rows * repeat, context]`: the last `rows` tokens of a context, each `repeat` times. For a
    shorter context, or fewer last tokens, take the lower right corner. With a window a token sees
    that many tokens, itself among them.
    """
    hidden = torch.ones(rows, context, dtype=torch.bool).triu_(context - rows + 1)
    if window is not None:
        hidden |= torch.ones(rows, context, dtype=torch.bool).tril_(context - rows - window)
    bias = torch.zeros(rows, repeat, context).masked_fill_(hidden.unsqueeze(1), -torch.inf)
    return bias.view(rows * repeat, context)


def short_convolution(x: Tensor, taps: Tensor) -> Tensor:
    """Each channel convolved with the last tokens, then silu: `[N, taps - 1 + T, C]` to `[N, T, C]`.

    `taps [n, C]`, the last for the token itself. Sums in one order, whatever T and N are.
    """
    count = x.shape[1] - len(taps) + 1
    out = x[:, :count] * taps[0]
    for i in range(1, len(taps)):
        out = out + x[:, i : i + count] * taps[i]
    return out * sigmoid(out)


def delta_rule(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor
) -> Tensor:
    """Gated delta rule, token by token (arXiv 2412.06464). `state` is updated in place.

        S = decay S;  S = S + rate key (value - S^T key)^T;  out = S^T query

    Shapes: state `[N, H, K, V]`; query, key `[N, T, H, K]`; value `[N, T, H, V]`; rate `[N, T, H]`;
    decay `[N, T, H, 1]`, or one for each row of the state: `[N, T, H, K]` (arXiv 2510.26692).
    Returns `[N, T, H, V]`. A token's result does not depend on T or N.
    """
    out = torch.empty_like(value)
    for t in range(value.shape[1]):
        state.mul_(decay[:, t, :, :, None])
        key_t = key[:, t, :, :, None]
        error = value[:, t] - (state * key_t).sum(-2)
        state.add_(key_t * (error * rate[:, t, :, None])[:, :, None, :])
        out[:, t] = (state * query[:, t, :, :, None]).sum(-2)
    return out


# ---- fast, or exact ------------------------------------------------------------------------------


def _linear_by_rows(x: Tensor, weight: Tensor) -> Tensor:
    """As `linear`; each row is a product of its own."""
    return torch.bmm(x.unsqueeze(1), weight.t().expand(len(x), -1, -1)).squeeze(1)


def _linear_by_head_and_row(x: Tensor, weight: Tensor) -> Tensor:
    parts = zip(x.unbind(1), weight, strict=True)
    return torch.stack([_linear_by_rows(part.contiguous(), w) for part, w in parts], dim=1)


def _swiglu_from_exp(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * sigmoid(gate) * up


def _rotate_by_elements_(x: Tensor, rotation: Tensor) -> None:
    """As `rotate_`; a product of complex numbers may be fused in one place and not in another."""
    pairs = x.view(*x.shape[:-1], -1, 2)
    cos, sin = rotation.real.unsqueeze(1), rotation.imag.unsqueeze(1)
    one, other = pairs[..., 0].clone(), pairs[..., 1].clone()
    pairs[..., 0] = one * cos - other * sin
    pairs[..., 1] = other * cos + one * sin


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of which there are two forms."""

    linear: Callable[[Tensor, Tensor], Tensor]
    linear_by_head: Callable[[Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    rotate_: Callable[[Tensor, Tensor], None]
    exact: bool
    """Attention too is computed token by token, each over exactly what it sees."""


FAST = Ops(linear, linear_by_head, swiglu, rotate_, exact=False)
EXACT = Ops(
    _linear_by_rows, _linear_by_head_and_row, _swiglu_from_exp, _rotate_by_elements_, exact=True
)
