"""Prompt embeddings that come as torch tensors: keys of their bytes and type, without a look at torch."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from core.managing import FULL, text

from kvcache.core.errors import ConfigError
from kvcache.core.manager import Manager
from kvcache.core.media import PromptEmbeddings, extras
from kvcache.retention import Sparse


def chain_of(values: Any) -> bytes:
    manager = Manager(FULL, slabs=8, retention=Sparse())
    handle = manager.open(text(8), embeddings=[PromptEmbeddings(offset_tokens=0, values=values)])
    return manager.digests(handle).tobytes()


def test_a_torch_tensor_has_the_keys_of_its_array() -> None:
    numbers = np.arange(24, dtype=np.float32).reshape(6, 4)
    tensor = torch.from_numpy(numbers)
    assert chain_of(tensor) == chain_of(numbers)
    assert chain_of(tensor.clone().requires_grad_()) == chain_of(numbers)
    assert chain_of(tensor.double()) == chain_of(numbers.astype(np.float64)) != chain_of(numbers)
    assert chain_of(torch.from_numpy(numbers.T.copy()).T) == chain_of(numbers)


def test_bfloat16_and_fp8_tensors_are_hashed_by_their_bytes_and_their_type() -> None:
    tensor = torch.arange(24).reshape(6, 4).to(torch.bfloat16)
    raw = tensor.view(torch.int16).numpy().tobytes()
    items = extras([], [PromptEmbeddings(offset_tokens=0, values=tensor)], 8, 8)
    header = b"kvcache/embedding/1\0<V2/bfloat16/4\0"
    assert items == [(0, 6, hashlib.sha256(header + raw).digest())]
    different = [
        tensor,
        tensor.view(torch.int16),
        tensor.view(torch.float16),
        tensor.float(),
        tensor + 1,
        tensor.to(torch.float8_e4m3fn),
        tensor.to(torch.float8_e5m2),
        tensor.to(torch.float8_e4m3fn).view(torch.uint8),
    ]
    assert len({chain_of(values) for values in different}) == len(different)
    assert chain_of(tensor.t().contiguous().t()) == chain_of(tensor)


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_tensors_that_are_more_than_their_numbers_are_refused_in_words() -> None:
    for values in (
        torch.ones(2, 4).to_sparse(),
        torch.empty(2, 4, device="meta"),
        torch.quantize_per_tensor(torch.ones(2, 4), 0.1, 0, torch.qint8),
    ):
        with pytest.raises(ConfigError, match=r"embeddings\[0\]\.values cannot be made an array"):
            chain_of(values)
