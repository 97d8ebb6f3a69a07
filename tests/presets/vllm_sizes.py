"""Bytes of every preset by vLLM's own specs and state shapes. Run with vLLM's Python, prints JSON.

For each recorded config, TP and KV format: bytes per token of full layers, of each window, and of the
states at one position. Layers are counted here from the config's own fields.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateDtypeCalculator as Dtypes,
    MambaStateShapeCalculator as Shapes,
)
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

FOLDER = Path(__file__).parent / "configs"
BLOCK = 256
TP = (1, 2, 4, 8, 16)
ELEMENTS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
BF16 = torch.bfloat16


def gqa(kv_heads: int, head_dim: int, tp: int, kv_dtype: str) -> float:
    """K and V of one layer; vLLM keeps at least one head on a rank."""
    spec = FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=max(1, kv_heads // tp),
        head_size=head_dim,
        dtype=ELEMENTS[kv_dtype],
    )
    return spec.page_size_bytes / BLOCK


def row(
    elements: int, dtype: torch.dtype, *, packed_bytes: int | None = None, ratio: int = 1
) -> float:
    """One latent row or index key of a layer."""
    spec = MLAAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=1,
        head_size=elements,
        dtype=dtype,
        state_content_bytes=packed_bytes,
        tokens_per_state=ratio,
    )
    return spec.page_size_bytes / BLOCK


def state(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> int:
    """One layer's state."""
    pairs = zip(shapes, dtypes, strict=True)
    return sum(prod(shape) * get_dtype_size(dtype) for shape, dtype in pairs)


def mla(config: dict[str, Any], layers: int, kv_dtype: str) -> float:
    """Latent rows, with the keys of an indexer where there is one."""
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    if kv_dtype == "fp8_ds_mla":
        latent = row(width, torch.uint8, packed_bytes=656)
    else:
        latent = row(width, ELEMENTS[kv_dtype])
    index = config.get("index_head_dim", 0)
    return layers * (latent + (row(index + index // 128 * 4, torch.uint8) if index else 0))


def kimi(text: dict[str, Any], tp: int, kv_dtype: str) -> dict[str, Any]:
    """MLA and delta attention."""
    linear = text["linear_attn_config"]
    shapes = Shapes.kda_state_shape(
        tp,
        linear["num_heads"],
        linear["head_dim"],
        conv_kernel_size=linear["short_conv_kernel_size"],
    )
    own = state(shapes, Dtypes.kda_state_dtype(BF16, "auto"))
    full = mla(text, len(linear["full_attn_layers"]), kv_dtype)
    return {"token": full, "state": len(linear["kda_layers"]) * own}


def nemotron(text: dict[str, Any], tp: int, kv_dtype: str) -> dict[str, Any]:
    """GQA and Mamba2."""
    pattern = text["hybrid_override_pattern"]
    shapes = Shapes.mamba2_state_shape(
        tp,
        text["mamba_num_heads"] * text["mamba_head_dim"],
        text["n_groups"],
        text["mamba_num_heads"],
        text["mamba_head_dim"],
        text["ssm_state_size"],
        text["conv_kernel"],
    )
    dtypes = Dtypes.mamba2_state_dtype(BF16, "auto", text["mamba_ssm_cache_dtype"])
    one = gqa(text["num_key_value_heads"], text["head_dim"], tp, kv_dtype)
    return {
        "token": pattern.count("*") * one,
        "state": pattern.count("M") * state(shapes, dtypes),
    }


def qwen(text: dict[str, Any], tp: int, kv_dtype: str) -> dict[str, Any]:
    """GQA and gated delta networks."""
    layers = text["num_hidden_layers"]
    full = layers // text["full_attention_interval"]
    shapes = Shapes.gated_delta_net_state_shape(
        tp,
        text["linear_num_key_heads"],
        text["linear_num_value_heads"],
        text["linear_key_head_dim"],
        text["linear_value_head_dim"],
        text["linear_conv_kernel_dim"],
    )
    dtypes = Dtypes.gated_delta_net_state_dtype(BF16, "auto", text["mamba_ssm_dtype"])
    one = gqa(text["num_key_value_heads"], text["head_dim"], tp, kv_dtype)
    return {"token": full * one, "state": (layers - full) * state(shapes, dtypes)}


def minimax(text: dict[str, Any], tp: int, kv_dtype: str) -> dict[str, Any]:
    """GQA with index keys."""
    sparse = text["sparse_attention_config"]
    keys = sum(sparse["sparse_attention_freq"])
    key = row(sparse["sparse_index_dim"], ELEMENTS[kv_dtype])
    one = gqa(text["num_key_value_heads"], text["head_dim"], tp, kv_dtype)
    return {"token": text["num_hidden_layers"] * one + keys * key}


def latent(text: dict[str, Any], _: int, kv_dtype: str) -> dict[str, Any]:
    """MLA in every layer."""
    return {"token": mla(text, text["num_hidden_layers"], kv_dtype)}


def windows(text: dict[str, Any], tp: int, kv_dtype: str) -> dict[str, Any]:
    """Full and windowed GQA layers."""
    layers = text["num_hidden_layers"]
    heads, queries = text["num_key_value_heads"], text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // queries
    if "sliding_window" not in text:
        return {"token": layers * gqa(heads, head_dim, tp, kv_dtype)}
    if "layer_types" in text:
        full = text["layer_types"].count("full_attention")
    else:
        full = layers // text["sliding_window_pattern"]
    one = gqa(heads, head_dim, tp, kv_dtype)
    of_full = one
    if "global_head_dim" in text:
        of_full = gqa(text["num_global_key_value_heads"], text["global_head_dim"], tp, kv_dtype)
    return {"token": full * of_full, "window": (layers - full) * one}


def v4(config: dict[str, Any], _: int, kv_dtype: str) -> dict[str, Any]:
    """DeepSeek V4: vLLM serves fp8 as fp8_ds_mla; 584 bytes are its attention layer's."""
    ratios = config["compress_ratios"][: config["num_hidden_layers"]]
    width, packed = config["head_dim"], None if kv_dtype == "bf16" else 584
    dtype = BF16 if kv_dtype == "bf16" else torch.uint8
    key = config["index_head_dim"] + 4
    token = 0.0
    pooling = 0.0
    for ratio in (4, 128):
        entry = row(width, dtype, packed_bytes=packed, ratio=ratio)
        rows = pool(width, ratio)
        if ratio == 4:
            entry += row(key, torch.uint8, ratio=ratio)
            rows += pool(config["index_head_dim"], ratio)
        token += ratios.count(ratio) * entry
        pooling += ratios.count(ratio) * rows
    window = len(ratios) * row(width, dtype, packed_bytes=packed)
    return {"token": token, "window": window, "pooling": pooling}


def pool(width: int, ratio: int) -> float:
    """One token's row of a compressor's state: K and gate, twice where entries overlap."""
    overlap = 1 + (ratio == 4)
    cache = SimpleNamespace(
        block_size=ratio,
        state_dim=2 * overlap * width,
        dtype=torch.float32,
        sliding_window=overlap * ratio,
    )
    config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="bf16"))
    spec = CompressorStateCache.get_kv_cache_spec(cache, config)
    return spec.real_page_size_bytes / ratio


FAMILIES: dict[str, Callable[[dict[str, Any], int, str], dict[str, Any]]] = {
    "compress_ratios": v4,
    "linear_attn_config": kimi,
    "kv_lora_rank": latent,
    "hybrid_override_pattern": nemotron,
    "linear_num_value_heads": qwen,
    "sparse_attention_config": minimax,
    "num_key_value_heads": windows,
}
"""By the first of these fields that the config has."""


def sizes(config: dict[str, Any], tp: int) -> dict[str, Any]:
    """By KV format, bytes on one rank: `token`, `state`, and of a token `window`, `pooling`."""
    text = config.get("text_config", config)
    family = next(read for field, read in FAMILIES.items() if field in text)
    packed = ["fp8_ds_mla"] if family in (v4, kimi, latent) else []
    return {kv_dtype: family(text, tp, kv_dtype) for kv_dtype in ("bf16", "fp8", *packed)}


def main() -> None:
    """All of it, as {name: {tp: {format: sizes}}}."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(FOLDER.glob("*.json")):
        if not path.name.startswith("class-") and not path.name.endswith(".transformers.json"):
            config = json.loads(path.read_text())
            found[path.stem] = {str(tp): sizes(config, tp) for tp in TP}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
