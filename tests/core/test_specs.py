from __future__ import annotations

from typing import Any

import pytest

from kvcache.core.errors import ConfigError
from kvcache.core.specs import (
    ChunkedLocal,
    Compressed,
    CrossAttention,
    FullAttention,
    GroupRules,
    GroupSpec,
    IndexedAttention,
    LatentAttention,
    LatentWindow,
    PoolingState,
    RecurrentState,
    RingBuffer,
    SlidingWindow,
)

FIELDS: dict[type, dict[str, Any]] = {
    FullAttention: {"layers": 2, "kv_heads": 3, "head_dim": 8, "block_tokens": 4},
    LatentAttention: {"layers": 2, "block_tokens": 4},
    IndexedAttention: {
        "layers": 3,
        "indexed_layers": 2,
        "kv_heads": 2,
        "head_dim": 8,
        "index_dim": 4,
        "block_tokens": 4,
    },
    Compressed: {"layers": 2, "ratio": 4, "entry_bytes": 584, "block_tokens": 8},
    SlidingWindow: {"layers": 2, "kv_heads": 3, "head_dim": 8, "window": 5, "block_tokens": 4},
    LatentWindow: {"layers": 2, "entry_bytes": 584, "window": 5, "block_tokens": 4},
    ChunkedLocal: {
        "layers": 2,
        "kv_heads": 3,
        "head_dim": 8,
        "chunk_tokens": 8,
        "block_tokens": 4,
    },
    PoolingState: {"layers": 2, "ratio": 4, "token_bytes": 16, "block_tokens": 2},
    RecurrentState: {"layers": 2, "state_bytes_per_layer": 100},
    RingBuffer: {"layers": 2, "ring_tokens": 8, "token_bytes": 16},
    CrossAttention: {
        "layers": 2,
        "kv_heads": 3,
        "head_dim": 8,
        "max_encoder_tokens": 9,
        "block_tokens": 4,
    },
}
kinds = pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)


def make(kind: type, **changes: Any) -> Any:
    return kind(name="g", **{**FIELDS[kind], **changes})


@pytest.mark.parametrize(
    ("kind", "page_bytes"),
    [
        (FullAttention, 2 * 2 * 3 * 8 * 2 * 4),
        (LatentAttention, 2 * (512 + 64) * 2 * 4),
        (IndexedAttention, (3 * 2 * 2 * 8 + 2 * 4) * 2 * 4),
        (Compressed, 2 * 2 * 584),
        (SlidingWindow, 2 * 2 * 3 * 8 * 2 * 4),
        (LatentWindow, 2 * 584 * 4),
        (ChunkedLocal, 2 * 2 * 3 * 8 * 2 * 4),
        (PoolingState, 2 * 16 * 2),
        (RecurrentState, 200),
        (RingBuffer, 2 * 8 * 16),
        (CrossAttention, 2 * 2 * 3 * 8 * 2 * 4),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_page_holds_all_layers(kind: type, page_bytes: int) -> None:
    assert make(kind).page_bytes == page_bytes


def test_rules_are_what_the_kinds_need() -> None:
    assert make(FullAttention).rules == GroupRules("full", block_tokens=4)
    assert make(LatentAttention).rules == GroupRules("full", block_tokens=4)
    assert make(IndexedAttention).rules == GroupRules("full", block_tokens=4)
    assert make(Compressed).rules == GroupRules("full", block_tokens=8)
    assert make(SlidingWindow).rules == GroupRules("span", block_tokens=4, lead_tokens=4)
    assert make(LatentWindow).rules == GroupRules("span", block_tokens=4, lead_tokens=4)
    assert make(ChunkedLocal).rules == GroupRules("span", block_tokens=4, chunk_tokens=8)
    pooling = GroupRules("span", block_tokens=2, chunk_tokens=4, transient=True)
    assert make(PoolingState).rules == pooling
    assert make(PoolingState, overlap=True).rules.lead_tokens == 4
    assert make(RecurrentState).rules == GroupRules("state")
    assert make(RecurrentState, speculative_tokens=3).rules.request_pages == 3
    assert make(RingBuffer).rules == GroupRules("private", request_pages=1)
    assert make(CrossAttention).rules == GroupRules("private", request_pages=3)


@pytest.mark.parametrize(
    ("rules", "begins"),
    [
        (make(SlidingWindow, window=1).rules, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (make(SlidingWindow, window=4).rules, [0, 0, 0, 0, 1, 2, 3, 4, 5, 6]),
        (make(ChunkedLocal, chunk_tokens=4).rules, [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]),
        (make(PoolingState, overlap=True).rules, [0, 0, 0, 0, 0, 0, 0, 0, 4, 4]),
    ],
)
def test_need_begins_where_the_next_query_reads_first(rules: GroupRules, begins: list[int]) -> None:
    assert [rules.need_begin(position) for position in range(10)] == begins


@pytest.mark.parametrize("kind", [FullAttention, LatentAttention, IndexedAttention, Compressed])
def test_context_parallel_ranks_widen_a_page_but_add_no_bytes(kind: type) -> None:
    alone, shared = make(kind), make(kind, dcp_shards=4)
    assert shared.rules.block_tokens == 4 * alone.rules.block_tokens
    assert shared.page_bytes == alone.page_bytes


DRAFTS = [
    FullAttention,
    LatentAttention,
    IndexedAttention,
    SlidingWindow,
    LatentWindow,
    ChunkedLocal,
]


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_draft_group_is_one_that_looks_ahead(kind: type) -> None:
    assert make(kind).rules.lookahead_tokens == 0
    draft = make(kind, lookahead_tokens=2).rules
    assert draft == make(kind).rules._replace(lookahead_tokens=2)


def test_packed_rows_have_the_bytes_of_vllm_formats() -> None:
    v32 = LatentAttention(name="g", layers=1, block_tokens=64, entry_bytes=656, index_bytes=132)
    assert v32.page_bytes == 64 * (656 + 132)
    # vLLM pads the 64 rows of a layer to 576 bytes: 37,376 to 37,440.
    aligned = {"entry_bytes": 584, "alignment_bytes": 576, "layers": 3}
    assert make(LatentWindow, **aligned, block_tokens=64).page_bytes == 3 * 37_440
    assert make(Compressed, **aligned, block_tokens=256).page_bytes == 3 * 37_440
    assert make(LatentAttention, **aligned, block_tokens=64).page_bytes == 3 * 37_440


def test_all_layers_keep_index_keys_unless_told() -> None:
    assert make(IndexedAttention, indexed_layers=0) != make(IndexedAttention, indexed_layers=3)
    some = make(IndexedAttention, indexed_layers=3).page_bytes
    assert make(IndexedAttention, indexed_layers=0).page_bytes == some


@kinds
def test_a_spec_refuses_sizes_that_are_no_whole_number_above_zero(kind: type) -> None:
    for field in FIELDS[kind]:
        for value in (0, -1, 1.5, "2", True, None):
            if field == "indexed_layers" and value == 0:
                continue
            with pytest.raises(ConfigError, match=rf"{kind.__name__}\.{field} is"):
                make(kind, **{field: value})


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (FullAttention, "dcp_shards"),
        (FullAttention, "lookahead_tokens"),
        (LatentAttention, "alignment_bytes"),
        (LatentAttention, "entry_bytes"),
        (Compressed, "index_bytes"),
        (LatentWindow, "alignment_bytes"),
        (RecurrentState, "speculative_tokens"),
        (SlidingWindow, "lookahead_tokens"),
        (IndexedAttention, "lookahead_tokens"),
        (ChunkedLocal, "lookahead_tokens"),
    ],
)
def test_a_spec_refuses_negative_options(kind: type, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\.{field} is -1"):
        make(kind, **{field: -1})


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (Compressed, {"block_tokens": 6}, "multiple of the ratio, 4"),
        (ChunkedLocal, {"block_tokens": 3}, "must divide chunk_tokens, 8"),
        (PoolingState, {"block_tokens": 3}, "must divide the ratio, 4"),
        (IndexedAttention, {"indexed_layers": 4}, "more than the group's 3 layers"),
    ],
)
def test_blocks_that_would_cut_something_in_two_are_refused(
    kind: type, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(kind, **changes)


@kinds
def test_events_call_a_kind_what_vllm_calls_it(kind: type) -> None:
    # Values of KVCacheSpecKind in vLLM's kv_cache_interface.
    assert make(kind).kind in {
        "full_attention",
        "mla_attention",
        "sliding_window",
        "sliding_window_mla",
        "mamba",
        "chunked_local_attention",
        "cross_attention",
        "unknown",
    }


@pytest.mark.parametrize(
    ("spec", "tokens"),
    [
        (make(SlidingWindow, window=5), 5),
        (make(LatentWindow, window=128), 128),
        # Compressors of DeepSeek V4, as vLLM 0.33.0 describes them.
        (make(PoolingState, ratio=4, overlap=True), 8),
        (make(PoolingState, ratio=128, overlap=False), 128),
        (make(ChunkedLocal), None),
        (make(FullAttention), None),
        (make(LatentAttention), None),
        (make(Compressed), None),
        (make(IndexedAttention), None),
        (make(RecurrentState), None),
        (make(RingBuffer), None),
        (make(CrossAttention), None),
    ],
)
def test_events_tell_the_window_that_vllm_tells(spec: GroupSpec, tokens: int | None) -> None:
    assert spec.window_tokens == tokens
