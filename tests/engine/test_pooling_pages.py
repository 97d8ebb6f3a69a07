"""Pooling rows lie in pages only where a later step reads them: the others are stored nowhere."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from engine import paged
from engine.mixes import HEAVY, LIGHT, Mix

from kvcache.core.errors import MisuseError
from kvcache.engine.model import Model

torch.set_num_threads(1)

ENTRIES, ROWS, POOL = range(3)


@pytest.fixture(params=["overlap", "apart"])
def model(request: pytest.FixtureRequest) -> Model:
    layer = LIGHT if request.param == "overlap" else HEAVY
    return Mix((layer, layer)).model(1)


def read_at(model: Model, position: int) -> range:
    """Blocks of the pool that a step from `position` on reads."""
    rules = model.geometry.rules[POOL]
    return range(
        rules.need_begin(position) // rules.block_tokens, -(-position // rules.block_tokens)
    )


def test_rows_that_no_later_step_reads_need_no_page(model: Model) -> None:
    tokens = paged.random_tokens(model, 60, seed=1)
    cuts = [19, 40, 41, 46]
    expected = paged.run(paged.new_sequence(model, 60), tokens, cuts)
    sparse = paged.new_sequence(model, 60, seed=2)
    pages = sparse.tables[POOL].copy()
    got = []
    for start, end in zip([0, *cuts], [*cuts, 60], strict=True):
        read = [*read_at(model, start), *read_at(model, end)]
        for block, page in enumerate(pages):
            sparse.tables[POOL][block] = page if block in read else -1 - sparse.runner.first[POOL]
        before = sparse.runner.pages(POOL).clone()
        got += paged.run(sparse, tokens[start:end])
        after = sparse.runner.pages(POOL)
        written = (before != after).any(1).nonzero()[:, 0].tolist()
        block = model.geometry.rules[POOL].block_tokens
        wanted = [b for b in set(read) if b * block < end and (b + 1) * block > start]
        assert sorted(written) == sorted(int(pages[b]) for b in wanted)
    assert all(map(torch.equal, got, expected))


def test_a_row_that_is_read_must_have_a_page(model: Model) -> None:
    request = paged.new_sequence(model, 60)
    paged.run(request, paged.random_tokens(model, 22, seed=1))
    chunk = request.chunk(np.array([1, 2, 3], np.int32))
    tables = [table.copy() for table in chunk.tables if table is not None]
    tables[POOL][read_at(model, 22)[0]] = -1
    with pytest.raises(MisuseError, match="group 2: page -1 is not one of"):
        request.runner.run([dataclasses.replace(chunk, tables=tables)])
    tables[POOL] = np.full_like(tables[POOL], 10**6)
    with pytest.raises(MisuseError, match="group 2: page 1000000 is not one of"):
        request.runner.run([dataclasses.replace(chunk, tables=tables)])


def test_what_a_step_does_not_read_may_hold_anything(model: Model) -> None:
    tokens = paged.random_tokens(model, 50, seed=3)
    cuts = [1, 7, 24, 33, 34]
    clean = paged.run(paged.new_sequence(model, 50), tokens, cuts)
    for left in (float("nan"), float("inf"), 7.0):
        dirty = paged.run(paged.new_sequence(model, 50, seed=4, fill=left), tokens, cuts)
        assert all(map(torch.equal, dirty, clean))
