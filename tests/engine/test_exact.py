"""Exact operations, driven without an engine: any chunks, any batch mates, any pages.

With them no bit of a result depends on how a prompt was cut, on what else is in the batch, or on
where pages lie. So equality is equality of bits. With an engine around: `test_exact_mixes.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine import paged
from engine.mixes import MIXES, SHARDINGS
from hypothesis import given, settings, strategies as st

from kvcache.engine.model import Model
from kvcache.engine.tiny import build_model

torch.set_num_threads(1)

WINDOW = 20
WINDOWED = build_model(5, block_tokens=4, window=WINDOW, context_tokens=512, exact=True)
MODELS = {name: mix.model(seed=1) for name, mix in MIXES.items()} | {
    f"window of {window}": build_model(5, block_tokens=8, window=window, exact=True)
    for window in (1, 16)
}
MODELS |= {
    f"every, {name}": MIXES["every"].model(seed=1, shards=shards)
    for name, shards in SHARDINGS.items()
}


@settings(max_examples=30)
@given(
    st.sampled_from(list(MODELS)),
    st.integers(2, 60),
    st.lists(st.integers(1, 59), max_size=8, unique=True).map(sorted),
    st.integers(0, 2**32),
)
def test_any_chunk_plan_computes_the_same_bits(
    name: str, count: int, cuts: list[int], seed: int
) -> None:
    model = MODELS[name]
    tokens = paged.random_tokens(model, count, seed)
    (whole,) = paged.run(paged.new_sequence(model, count), tokens)
    sequence = paged.new_sequence(model, count, seed=seed, fill=float("nan"))
    *_, last = paged.run(sequence, tokens, cuts)
    assert torch.equal(last, whole)


@pytest.mark.parametrize("name", MIXES)
def test_a_request_computes_the_same_bits_alone_and_among_others(name: str) -> None:
    lengths = [(33, 1), (7, 20), (50, 1), (0, 12), (21, 1), (0, 1)]
    model = MODELS[name]
    runner = paged.Runner(model, paged.pages_for(model, 60, requests=len(lengths)))
    chunks, alone = [], []
    for i, (before, now) in enumerate(lengths):
        tokens = paged.random_tokens(model, before + now, seed=i)
        tables = [
            np.arange(60 * i // r.block_tokens, 60 * (i + 1) // r.block_tokens + 1) + i
            for r in model.geometry.rules
            if r.kind != "state"
        ]
        request = paged.Request(runner, tables, state=i)
        if before:
            paged.run(request, tokens[:before])
        chunks.append(request.chunk(tokens[before:]))
        alone += paged.run(paged.new_sequence(model, 60), tokens)
    runner.run(chunks)
    assert torch.equal(runner.last_logits, torch.stack(alone))


@pytest.mark.parametrize("cuts", [[40], [40, 41, 42], [30, 60]])
@pytest.mark.parametrize("exact", [False, True])
def test_what_lies_before_the_window_is_not_read(cuts: list[int], exact: bool) -> None:
    model = Model(WINDOWED.weights, block_tokens=4, exact=exact)
    tokens = paged.random_tokens(model, 64, seed=1)
    expected = paged.run(paged.new_sequence(model, 64), tokens, cuts)
    request = paged.new_sequence(model, 64, seed=2)
    got = []
    for begin, end in zip([0, *cuts], [*cuts, 64], strict=True):
        given_up = max(0, begin - WINDOW + 1) // 4
        for page in request.tables[1][:given_up]:
            if page >= 0:
                request.runner.pages(1)[page].view(torch.float32).fill_(torch.nan)
        request.tables[1][:given_up] = -1000
        got += paged.run(request, tokens[begin:end])
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("name", MIXES)
def test_exact_and_fast_operations_compute_the_same_model(name: str) -> None:
    mix = MIXES[name]._replace(kv_dtype="fp32")  # in a narrow format a last bit may become more
    model, fast = mix.model(seed=1), mix.model(seed=1, exact=False)
    tokens = paged.random_tokens(model, 70, seed=3)
    cuts = [1, 2, 30, 31, 32]
    for one, other in zip(
        paged.run(paged.new_sequence(model, 70), tokens, cuts),
        paged.run(paged.new_sequence(fast, 70, seed=3), tokens, cuts),
        strict=True,
    ):
        paged.assert_close(one, other)


@pytest.mark.parametrize("name", MIXES)
def test_fast_operations_restore_bit_for_bit_with_the_same_chunks(name: str) -> None:
    model = MIXES[name].model(seed=2, exact=False)
    tokens = paged.random_tokens(model, 60, seed=4)
    cuts = [16, 24, 40, 41]
    straight = paged.new_sequence(model, 60)
    straight.state = 0
    expected = paged.run(straight, tokens, cuts)
    first, other = (paged.new_sequence(model, 60, seed=seed) for seed in (5, 6))
    first.state = other.state = 0
    paged.run(first, tokens[:24], cuts)
    tables = iter(zip(first.tables, other.tables, strict=True))
    for group, rules in enumerate(model.geometry.rules):
        source, target = first.runner.pages(group), other.runner.pages(group)
        if rules.kind == "state":
            target[0] = source[0]
            continue
        blocks = range(rules.need_begin(24) // rules.block_tokens if rules.kind == "span" else 0,
                       24 // rules.block_tokens)  # fmt: skip
        old, new = next(tables)
        target[new[blocks]] = source[old[blocks]]
    other.source, other.done = 0, 24
    restored = paged.run(other, tokens[24:], cuts)
    assert all(map(torch.equal, restored, expected[2:]))
