"""MiniMax M2 and M3: GQA in every layer; M3 has index keys for block-sparse attention in most."""

from __future__ import annotations

from kvcache.presets.fields import Fields
from kvcache.presets.layers import Full, Indexed, Layers
from kvcache.presets.llama import heads
from kvcache.presets.model import Model

MINIMAX_M3 = Model(
    name="minimax-m3",
    layers=(Indexed(layers=60, indexed_layers=57, kv_heads=4, head_dim=128, index_dim=128),),
    sources=(
        (
            "text_config of MiniMaxAI/MiniMax-M3 as vLLM's configs/minimax_m3.py mirrors it:"
            " num_hidden_layers 60, num_key_value_heads 4, head_dim 128, sparse_attention_freq with 57"
            " layers, sparse_index_dim 128"
        ),
        (
            "minimax_m3/common/indexer.py of vLLM: one index key a token and layer, on every rank;"
            " llama.cpp pull request 24908: the first 3 of 60 layers have none"
        ),
    ),
    unverified=(
        (
            "index keys in fp8 with kv_dtype fp8: vLLM has an option of its own for them, and keeps"
            " bf16 unless it is given (14,592 bytes per token instead of 7,296)"
        ),
    ),
)
"""137,472 bytes per token, 14,592 of them index keys. Source: vLLM's copy of the config."""


def read_m2(fields: Fields) -> list[Layers]:
    """MiniMaxM2Config: every layer full, unless the file says otherwise."""
    if fields.has("sparse_attention_config") or fields.has("layer_types"):
        return read(fields)
    kv_heads, head_dim = heads(fields)
    return [Full(layers=fields.layers(), kv_heads=kv_heads, head_dim=head_dim)]


def read(fields: Fields) -> list[Layers]:
    """MiniMax M3: the checkpoint's `sparse_attention_config`, or `layer_types` of transformers."""
    layers = fields.layers()
    kv_heads, head_dim = heads(fields)
    indexed = index_dim = 0
    if fields.has("sparse_attention_config"):
        sparse = fields.section("sparse_attention_config")
        indexed = sum(sparse.per_layer("sparse_attention_freq", layers, {0: 0, 1: 1}))
        index_dim = sparse.whole("sparse_index_dim")
        if sparse.has("sparse_disable_index_value"):
            keys_alone = sparse.per_layer("sparse_disable_index_value", layers, {0: 0, 1: 1})
            if sum(keys_alone) < indexed:
                raise sparse.error(
                    "sparse_disable_index_value is 0 where sparse_attention_freq is 1: an index that"
                    " keeps values too is not known"
                )
    elif fields.has("layer_types"):
        kinds = {"full_attention": 0, "minimax_m3_sparse": 1}
        indexed = sum(fields.per_layer("layer_types", layers, kinds))
        index_dim = fields.whole("index_head_dim") if indexed else 0
    else:
        fields.assume("sparse_attention_config", None, "nor layer_types: no sparse layer")
    if not indexed:
        return [Full(layers=layers, kv_heads=kv_heads, head_dim=head_dim)]
    return [
        Indexed(
            layers=layers,
            indexed_layers=indexed,
            kv_heads=kv_heads,
            head_dim=head_dim,
            index_dim=index_dim,
        )
    ]
