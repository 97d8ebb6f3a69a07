"""Writes GGUF files for tests, and expands quantised blocks one element at a time."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

KINDS = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"),
    "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"),
    "f64": (12, "d"),
}  # fmt: skip
STRING, ARRAY = 8, 9
F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
BLOCKS = {F32: (1, 4), F16: (1, 2), Q4_1: (32, 20), Q8_0: (32, 34)}
"""Elements and bytes of a block."""


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: str, value: Any) -> bytes:
    """One metadata entry; `kind` as in `KINDS`, or `str`, or either with `[]` behind it."""
    base = kind.removesuffix("[]")
    number = STRING if base == "str" else KINDS[base][0]
    if kind == base:
        body = text(value) if base == "str" else struct.pack("<" + KINDS[base][1], value)
        return text(key) + struct.pack("<I", number) + body
    head = struct.pack("<IIQ", ARRAY, number, len(value))
    if base == "str":
        return text(key) + head + b"".join(map(text, value))
    return text(key) + head + struct.pack(f"<{len(value)}{KINDS[base][1]}", *value)


def tensor(name: str | bytes, sizes: Sequence[int], kind: int, offset: int) -> bytes:
    """One entry of the tensor table; sizes with the contiguous dimension first, as in the file."""
    return (
        text(name)
        + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        + struct.pack("<IQ", kind, offset)
    )


def gguf(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file. `counts`: what the header claims about tensors and entries."""
    claimed = counts or (len(tensors), len(entries))
    head = magic + struct.pack("<IQQ", version, *claimed) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def pack(
    blocks: Mapping[str, tuple[Sequence[int], int, bytes]], alignment: int = 32
) -> tuple[list[bytes], bytes]:
    """Table and data of tensors given as (sizes, kind, raw bytes)."""
    table, data = [], b""
    for name, (sizes, kind, raw) in blocks.items():
        data += bytes(-len(data) % alignment)
        table.append(tensor(name, sizes, kind, len(data)))
        data += raw
    return table, data


def expand(kind: int, raw: bytes) -> list[np.float32]:
    """Elements of whole blocks, one at a time, in fp32 steps."""
    elements, size = BLOCKS[kind]
    out: list[np.float32] = []
    for at in range(0, len(raw), size):
        block = raw[at : at + size]
        if kind == F32:
            out.append(np.float32(struct.unpack("<f", block)[0]))
        elif kind == F16:
            out.append(np.float32(struct.unpack("<e", block)[0]))
        elif kind == Q8_0:
            scale = np.float32(struct.unpack("<e", block[:2])[0])
            out += [scale * np.float32(q) for q in struct.unpack("<32b", block[2:])]
        else:
            scale, base = (np.float32(v) for v in struct.unpack("<2e", block[:4]))
            for i in range(elements):
                nibble = block[4 + i % 16] >> 4 if i >= 16 else block[4 + i % 16] & 15
                out.append(scale * np.float32(nibble) + base)
    return out


def random_blocks(kind: int, elements: int, rng: np.random.Generator) -> bytes:
    """Raw bytes of so many elements, scales finite and small."""
    per_block, _ = BLOCKS[kind]
    parts = []
    for _ in range(elements // per_block):
        scale, base = rng.normal(0, 0.05, 2)
        if kind == F32:
            parts.append(struct.pack("<f", scale * 20))
        elif kind == F16:
            parts.append(struct.pack("<e", scale * 20))
        elif kind == Q8_0:
            parts.append(struct.pack("<e", scale / 8) + rng.bytes(32))
        else:
            parts.append(struct.pack("<2e", scale, base) + rng.bytes(16))
    return b"".join(parts)


# ---- a small model of the llama architecture, with a byte-level BPE vocabulary ---------------------


def byte_characters() -> list[str]:
    """GPT-2's character for each byte (written from its description: byte order, gaps from 256)."""
    out, gap = [], 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            out.append(chr(byte))
        else:
            out.append(chr(256 + gap))
            gap += 1
    return out


SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "Ã ©"]
TOKENS = [*SPECIALS, *byte_characters(), *(m.replace(" ", "") for m in MERGES)]
WIDTH, HIDDEN, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 2


def tokenizer_entries() -> list[bytes]:
    return [
        entry("tokenizer.ggml.tokens", "str[]", TOKENS),
        entry("tokenizer.ggml.token_type", "i32[]", [3 if t in SPECIALS else 1 for t in TOKENS]),
        entry("tokenizer.ggml.merges", "str[]", MERGES),
    ]


def llama_entries(**changes: Any) -> list[bytes]:
    """Settings of the small model; a change by the last part of the key."""
    whole = {
        "block_count": LAYERS, "context_length": 256, "embedding_length": WIDTH,
        "feed_forward_length": HIDDEN, "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "rope.dimension_count": WIDTH // HEADS,
    }  # fmt: skip
    real = {"rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": 1e-5}
    unknown = changes.keys() - {k.rpartition(".")[2] for k in (*whole, *real)} - {"architecture"}
    assert not unknown, unknown
    return [
        entry("general.architecture", "str", changes.get("architecture", "llama")),
        *(
            entry(f"llama.{k}", "u64", changes.get(k.rpartition(".")[2], v))
            for k, v in whole.items()
        ),
        *(
            entry(f"llama.{k}", "f32", changes.get(k.rpartition(".")[2], v))
            for k, v in real.items()
        ),
    ]


def llama_shapes() -> dict[str, tuple[int, ...]]:
    """Tensors of the small model, row-major."""
    kv = KV_HEADS * WIDTH // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), WIDTH),
        "output_norm.weight": (WIDTH,),
    }
    for i in range(LAYERS):
        rows = {
            "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH),
            "attn_k": (kv, WIDTH), "attn_v": (kv, WIDTH), "attn_output": (WIDTH, WIDTH),
            "ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH), "ffn_down": (WIDTH, HIDDEN),
        }  # fmt: skip
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in rows.items()}
    return shapes


def llama_file(weights: Mapping[str, NDArray[np.float32]] | None = None, **changes: Any) -> bytes:
    """The small model; random quantised weights where none are given."""
    rng = np.random.default_rng(5)
    blocks: dict[str, tuple[Sequence[int], int, bytes]] = {}
    for number, (name, shape) in enumerate(llama_shapes().items()):
        kind = F32 if len(shape) == 1 else (Q8_0, Q4_1, F16)[number % 3]
        raw = random_blocks(kind, int(np.prod(shape)), rng)
        if weights is not None:
            kind, raw = F32, weights[name].astype("<f4").tobytes()
        blocks[name] = (shape[::-1], kind, raw)
    table, data = pack(blocks)
    return gguf([*llama_entries(**changes), *tokenizer_entries()], table, data)
