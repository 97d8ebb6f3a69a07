"""Element types of GGUF tensors, and their expansion to fp32.

A quantised tensor is a row of blocks of 32 elements (ggml's `block_q8_0` and `block_q4_1`):

    Q8_0   fp16 scale            | 32 x int8                        x = scale * q
    Q4_1   fp16 scale, fp16 base | 16 bytes: elements 0..15 in the  x = scale * q + base
                                   low halves, 16..31 in the high
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
_Q8_0 = np.dtype([("scale", "<f2"), ("quants", "i1", BLOCK)])
_Q4_1 = np.dtype([("scale", "<f2"), ("base", "<f2"), ("quants", "u1", BLOCK // 2)])


class ElementType(NamedTuple):
    """How the elements of a tensor are stored."""

    name: str
    block_elements: int
    block: np.dtype[Any]
    expand: Callable[[NDArray[Any]], NDArray[np.float32]]
    """Blocks `[n]` to elements `[n * block_elements]`, a new array."""


def _plain(values: NDArray[Any]) -> NDArray[np.float32]:
    return values.astype(np.float32)


def _expand_q8_0(blocks: NDArray[Any]) -> NDArray[np.float32]:
    out: NDArray[np.float32] = blocks["quants"].astype(np.float32)
    out *= blocks["scale"].astype(np.float32)[:, None]
    return out.reshape(-1)


def _expand_q4_1(blocks: NDArray[Any]) -> NDArray[np.float32]:
    half = BLOCK // 2
    out = np.empty((len(blocks), BLOCK), np.float32)
    out[:, :half] = blocks["quants"] & 15
    out[:, half:] = blocks["quants"] >> 4
    out *= blocks["scale"].astype(np.float32)[:, None]
    out += blocks["base"].astype(np.float32)[:, None]
    return out.reshape(-1)


ELEMENT_TYPES = {
    0: ElementType("F32", 1, np.dtype("<f4"), _plain),
    1: ElementType("F16", 1, np.dtype("<f2"), _plain),
    3: ElementType("Q4_1", BLOCK, _Q4_1, _expand_q4_1),
    8: ElementType("Q8_0", BLOCK, _Q8_0, _expand_q8_0),
}
"""By the number that stands in the file (`ggml_type`)."""
