"""Times of steps: by hand for one model, against one query at a time for all."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from engine.simulations import prefill_seconds

from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.specs import (
    Compressed,
    FullAttention,
    IndexedAttention,
    LatentAttention,
    LatentWindow,
    SlidingWindow,
)
from kvcache.engine.simulated_hardware import HARDWARE, Hardware, parse_hardware
from kvcache.engine.simulated_roofline import Roofline
from kvcache.presets import model, names
from kvcache.presets.weights import WEIGHTS, Weights, parse_weights

PLAIN = Hardware(
    flops=1e12, memory=1e11, capacity=80e9, link=1e9, flops_share=1.0, memory_share=1.0
)


def roofline(name: str, hardware: Hardware = PLAIN, tp: int = 1, dcp: int = 1) -> Roofline:
    geometry = model(name).geometry(block_tokens=128, tp=tp, dcp=dcp)
    return Roofline(geometry, WEIGHTS[name], hardware, tp=tp)


def seconds(line: Roofline, *chunks: tuple[int, int]) -> float:
    return float(line.seconds(*np.array(chunks, np.int64).T))


# ---- by hand ---------------------------------------------------------------------------------------


def test_a_decode_reads_the_weights_once_and_each_context() -> None:
    line = roofline("llama-3-8b")
    weights = 8_030_261_248 * 2 / 1e11
    kv = (1001 + 1 + 6001 + 1) * 131_072 / 1e11  # contexts, and the rows that are written
    assert seconds(line, (1000, 1001), (6000, 6001)) == pytest.approx(weights + kv, rel=1e-12)


def test_a_prefill_multiplies_each_token_and_each_pair() -> None:
    line = roofline("llama-3-8b")
    products = 2 * 8_030_261_248 * 3000 / 1e12
    pairs = 3000 * 3001 / 2 + 3000 * 1000
    attention = 4 * 32 * 32 * 128 * pairs / 1e12
    assert seconds(line, (1000, 4000)) == pytest.approx(products + attention, rel=1e-12)


def test_shares_and_the_constant_of_a_step_count() -> None:
    slow = Hardware(
        flops=2e12, memory=4e11, capacity=1e9, link=1e9,
        flops_share=0.5, memory_share=0.25, step_seconds=0.5,
    )  # fmt: skip
    for chunk in ((0, 4000), (4000, 4001)):
        assert seconds(roofline("llama-3-8b", slow), chunk) == pytest.approx(
            0.5 + seconds(roofline("llama-3-8b"), chunk), rel=1e-12
        )


def test_a_prompt_alone_takes_the_sum_of_its_chunks() -> None:
    line = roofline("gemma-3-27b")
    chunks = [(0, 512), (512, 1024), (1024, 1300)]
    total = sum(seconds(line, chunk) for chunk in chunks)
    assert prefill_seconds(line, 1300, 512) == pytest.approx(total, rel=1e-12)


def test_experts_are_read_as_often_as_random_choices_touch_them() -> None:
    weights = WEIGHTS["gpt-oss-20b"]  # 4 of 32
    line = roofline("gpt-oss-20b")
    rng = random.Random(0)
    for tokens in (1, 3, 20):
        touched = np.mean(
            [
                len({e for _ in range(tokens) for e in rng.sample(range(32), 4)}) / 32
                for _ in range(2000)
            ]
        )
        expected = weights.parameters - weights.routed * (1 - touched)
        starts = np.zeros(tokens, np.int64)
        read = line.costs(starts, starts + 1).weight_bytes / weights.parameter_bytes
        assert read == pytest.approx(expected, rel=0.01)
    one = line.costs(np.zeros(1, np.int64), np.ones(1, np.int64))
    assert one.weight_bytes == pytest.approx(weights.multiplied * weights.parameter_bytes)


# ---- one query at a time -----------------------------------------------------------------------------


def naive(  # noqa: PLR0912  (a branch for each kind of group)
    geometry: Geometry, weights: Weights, chunk: tuple[int, int], tp: int
) -> tuple[float, float]:
    """FLOPs and bytes of attention, query by query, in whole numbers of tokens."""
    start, end = chunk
    heads, flops, size = -(-weights.query_heads // tp), 0.0, 0.0
    for group in geometry.groups:
        spans = group.rules.block_tokens
        if group.rules.kind == "state":
            flops += 8 * group.page_bytes / 4 * (end - start)
            size += 2 * group.page_bytes
            continue
        own = getattr(group, "block_tokens", spans) / spans
        stored, index, dims, ratio, layers = group.page_bytes / spans, 0.0, 0, 1, group.layers
        reach: float = float("inf")
        if isinstance(group, FullAttention | SlidingWindow | IndexedAttention):
            dims = 2 * group.head_dim
        if isinstance(group, SlidingWindow | LatentWindow):
            reach = group.window
        if isinstance(group, LatentAttention):
            dims, index = weights.latent_dims, own * group.layers * group.index_bytes
        if isinstance(group, Compressed):
            dims, ratio = weights.latent_dims, group.ratio
            index = own * group.layers * group.index_bytes / ratio
        if isinstance(group, LatentWindow):
            dims = weights.latent_dims
        if isinstance(group, IndexedAttention):
            layers = group.indexed_layers
            index = own * layers * group.index_dim * group.index_element_bytes
        selects = bool(index and weights.selected)
        if selects:
            reach = weights.selected * ratio
        if group.rules.kind == "span" and not isinstance(group, SlidingWindow | LatentWindow):
            reach = group.rules.lead_tokens + 1
        seen: set[int] = set()
        for query in range(start, end):
            context = query + 1
            attended = min(context, reach)
            flops += 2 * dims * heads * group.layers / ratio * own * attended
            if selects:
                flops += 2 * weights.index_dims * layers / ratio * own * context
            else:
                seen.update(range(int(context - attended), context))
        read = min(end, (end - start) * reach) if selects else len(seen)
        size += read * (stored - index * selects) + end * index * selects
        size += (end - start) * stored
    return flops, size


@pytest.mark.parametrize("name", names())
def test_attention_costs_what_its_queries_do_one_by_one(name: str) -> None:
    rng = random.Random(name)
    for tp, dcp in ((1, 1), (4, 2)):
        line = roofline(name, tp=tp, dcp=dcp)
        for start in (0, 1, 100, 1500, 6000):
            end = start + rng.choice((1, 2, 150))
            costs = line.costs(np.array([start], np.int64), np.array([end], np.int64))
            flops, size = naive(line.geometry, line.weights, (start, end), tp)
            assert costs.attention_flops == pytest.approx(flops, rel=1e-9)
            assert costs.kv_bytes == pytest.approx(size, rel=1e-9)


@pytest.mark.parametrize("name", names())
def test_cutting_a_prompt_changes_no_flop(name: str) -> None:
    line = roofline(name)
    whole = line.costs(np.array([100], np.int64), np.array([5000], np.int64))
    cuts = np.array([100, 228, 1024, 1025, 5000], np.int64)
    parts = line.costs(cuts[:-1, None], cuts[1:, None])
    assert parts.attention_flops.sum() == pytest.approx(whole.attention_flops, rel=1e-9)
    assert parts.flops.sum() == pytest.approx(whole.flops, rel=1e-12)


@pytest.mark.parametrize("name", names())
def test_a_batch_costs_no_more_than_its_parts_and_no_less_than_the_largest(name: str) -> None:
    line = roofline(name, HARDWARE["h100"], tp=8)
    rng = random.Random(name)
    chunks = [(n, n + rng.choice((1, 1, 300))) for n in (rng.randrange(50_000) for _ in range(12))]
    alone = [seconds(line, chunk) for chunk in chunks]
    assert max(alone) <= seconds(line, *chunks) <= sum(alone)


# ---- figures -----------------------------------------------------------------------------------------


def test_every_preset_has_weights_with_a_source() -> None:
    assert sorted(WEIGHTS) == names()
    assert all(weights.source for weights in WEIGHTS.values())


@pytest.mark.parametrize(
    ("name", "hidden", "inner", "layers", "keys", "vocabulary", "tied"),
    [
        ("llama-3-8b", 4096, 14336, 32, 1024, 128256, False),
        ("llama-3-70b", 8192, 28672, 80, 1024, 128256, False),
        ("smollm2-135m", 576, 1536, 30, 192, 49152, True),
    ],
)
def test_parameters_of_dense_models_are_the_sum_of_their_matrices(
    name: str, hidden: int, inner: int, layers: int, keys: int, vocabulary: int, *, tied: bool
) -> None:
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner + 2 * hidden
    embeddings = vocabulary * hidden * (1 if tied else 2)
    assert WEIGHTS[name].parameters == layers * layer + embeddings + hidden


def test_hardware_is_read_by_name_by_figures_and_both() -> None:
    assert parse_hardware("h100") == HARDWARE["h100"]
    assert parse_hardware("h100,link=25G,step_seconds=0.002").link == 25e9
    own = parse_hardware("flops=989.4T,memory=3.35T,capacity=80G,link=53G")
    assert (own.flops, own.memory, own.capacity, own.link) == (989.4e12, 3.35e12, 80e9, 53e9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10", "there is no hardware 'h10' .did you mean 'h100'.*choose one of a100"),
        ("", "'' is no figure: known are flops, memory"),
        ("flops=1T,memory=1T", "has no capacity, link"),
        ("h100,lnk=3", "'lnk' is no figure .did you mean 'link'"),
        ("h100,link=x", "link='x' is not a number"),
        ("h100,link=1G,link=2G", "has link twice"),
        ("h100,link=0", "link of the hardware is 0: it must be from 1"),
        ("h100,flops_share=1.5", "flops_share of the hardware is 1.5: it must be"),
        ("h100,link=1e99", "link of the hardware is 1e.99: it must be"),
    ],
)
def test_hardware_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_hardware(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parameters=8G", "has no query_heads"),
        ("query_heads=8", "has no parameters"),
        ("parameters=8G,query_heads=1.5", "query_heads is 1.5: it must be a whole number"),
        ("parameters=8G,query_heads=0", "query_heads is 0"),
        ("parameters=0,query_heads=1", "parameters is 0"),
        ("parameters=8G,query_heads=1,active=9G", "active is 9000000000.0"),
        ("parameters=8G,query_heads=1,experts=2,chosen=3", "chosen is 3"),
        ("heads=8", "'heads' is no figure"),
    ],
)
def test_weights_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_weights(text)


def test_weights_are_read_by_figures() -> None:
    read = parse_weights("parameters=8.03G,query_heads=32,active=4G,experts=8,chosen=2")
    assert read == Weights(
        parameters=8.03e9, query_heads=32, active=4e9, experts=8, chosen=2, source="as given"
    )
    assert read.routed == pytest.approx(4.03e9 / 0.75)
