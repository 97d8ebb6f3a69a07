"""Roots of hash chains: who may share a prefix with whom.

Native key of block i: `SHA-256(domain || key of block i-1 || tokens as little-endian int32)`, in
C++; the first parent is the root made here. Everything that changes the *content* of a KV block
goes into the root; layout (shard, page order, padding) does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcache.core import arrays, native
from kvcache.core.errors import ConfigError
from kvcache.core.values import MOST, digest, text, whole

ROOT_DOMAIN = b"kvcache/root/1"
NATIVE_NAMESPACE = bytes(32)
MAX_EPOCH = MOST


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What makes two models' KV bytes differ for equal tokens. Part of every root.

    `secret` keeps keys of one deployment from being guessed by users of another.
    """

    model: str = ""
    weights_epoch: int = 0
    kv_dtype: str = ""
    position_scheme: str = ""
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        for name in ("model", "kv_dtype", "position_scheme"):
            text(getattr(self, name), f"Fingerprint.{name}")
        epoch = whole(self.weights_epoch, "Fingerprint.weights_epoch", least=0, most=MAX_EPOCH)
        object.__setattr__(self, "weights_epoch", epoch)
        if not isinstance(self.secret, bytes):
            raise ConfigError(f"Fingerprint.secret is a {type(self.secret).__name__}: give bytes")


def root_digest(
    fingerprint: Fingerprint,
    *,
    hash_unit_tokens: int,
    salt: str = "",
    lora: str = "",
    lora_version: str = "",
) -> bytes:
    """32 bytes: the first parent of a native chain, and the namespace of foreign keys.

    Fields are length-prefixed, so that no two field lists have one encoding.
    """
    fields = [
        fingerprint.model.encode(),
        str(fingerprint.weights_epoch).encode(),
        fingerprint.kv_dtype.encode(),
        fingerprint.position_scheme.encode(),
        fingerprint.secret,
        str(hash_unit_tokens).encode(),
        text(lora, "lora").encode(),
        text(salt, "salt").encode(),
    ]
    if lora_version:
        fields.append(text(lora_version, "lora_version").encode())
    root = hashlib.sha256(ROOT_DOMAIN)
    for raw in fields:
        root.update(len(raw).to_bytes(8, "little") + raw)
    return root.digest()


def as_tokens(tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
    """A contiguous int32 array; no copy if it is one. `ConfigError` for anything else."""
    return arrays.flat(tokens, np.int32, "tokens")


def hash_chain(
    parent: bytes, tokens: NDArray[np.int32], block_tokens: int, *, path: int = 0
) -> NDArray[np.uint8]:
    """Digests `[n_blocks, 32]` of the full blocks. `path`: 0 best, 1 portable, 2 SHA-NI."""
    parent = digest(parent, "parent")
    block_tokens = whole(block_tokens, "block_tokens", least=1)
    ffi, lib = native.load()
    array = as_tokens(tokens)
    blocks = len(array) // block_tokens
    out = np.empty((blocks, 32), dtype=np.uint8)
    native.call(
        lib.kvc_hash_chain,
        path,
        parent,
        ffi.from_buffer("int32_t[]", array),
        blocks,
        block_tokens,
        ffi.from_buffer("uint8_t[]", out),
    )
    return out


def block_keys(
    chain: NDArray[np.uint8], block_tokens: int, lookahead_tokens: int, unit: int
) -> NDArray[np.uint8]:
    """Keys `[blocks, 32]` of one group, from the links of the hash chain.

    A block has the link of the unit that holds its last token; of a draft group, the last token
    that its content depends on. Blocks smaller than a unit are told apart by the number of blocks
    that follow them in it: XORed into the last four bytes, little endian.
    """
    if not block_tokens:
        return chain[:0]
    if not lookahead_tokens and block_tokens % unit == 0:
        return chain[block_tokens // unit - 1 :: block_tokens // unit]
    ends = np.arange(block_tokens, len(chain) * unit + 1, block_tokens)
    links = -(-(ends + lookahead_tokens) // unit)
    ends, links = ends[links <= len(chain)], links[links <= len(chain)]
    keys = chain[links - 1].copy()
    keys[:, 28:].view("<u4")[:, 0] ^= (-ends % unit // block_tokens).astype("<u4")
    return keys
