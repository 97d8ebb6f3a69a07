"""The runner's contract with a scheduler: which pages are read and written, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from engine import paged
from hypothesis import given, settings, strategies as st

from kvcache.core.errors import ConfigError, InputError, MisuseError
from kvcache.core.layout import Geometry
from kvcache.core.records import MOVE_DTYPE, UNLIMITED, StatePlan
from kvcache.core.specs import RecurrentState
from kvcache.engine import tiny
from kvcache.engine.batch import make_batch
from kvcache.engine.model import Model
from kvcache.engine.runner import TorchRunner
from kvcache.engine.storage import PagedStorage

torch.set_num_threads(1)

MODEL = tiny.build_model(seed=11)
SMALL_BLOCKS = tiny.build_model(seed=11, block_tokens=4)


def everything(runner: paged.Runner) -> list[torch.Tensor]:
    return [runner.storage.arena.clone()]


# ---- which numbers the pages have does not matter -------------------------------------------------


@pytest.mark.parametrize("cuts", [[], [16, 40], [1, 2, 3, 61]])
def test_page_numbers_do_not_change_a_bit(cuts: list[int]) -> None:
    tokens = paged.random_tokens(MODEL, 70, seed=1)
    plain, shuffled = (
        paged.run(paged.new_sequence(MODEL, 70, seed=s), tokens, cuts) for s in (None, 5)
    )
    assert all(map(torch.equal, plain, shuffled))


def test_what_earlier_owners_left_in_a_page_does_not_change_a_bit() -> None:
    tokens = paged.random_tokens(MODEL, 70, seed=2)
    cuts = [1, 16, 40, 41, 48, 49, 50, 64]
    clean = paged.run(paged.new_sequence(MODEL, 70), tokens, cuts)
    for left in (7.0, float("nan"), float("inf")):
        assert all(
            map(
                torch.equal,
                clean,
                paged.run(paged.new_sequence(MODEL, 70, fill=left), tokens, cuts),
            )
        )


@settings(max_examples=40)
@given(
    st.sampled_from([MODEL, SMALL_BLOCKS]),
    st.integers(2, 90),
    st.lists(st.integers(1, 89), max_size=6, unique=True).map(sorted),
    st.lists(st.integers(1, 89), max_size=3, unique=True),
    st.integers(0, 2**32),
)
def test_any_chunk_plan_gives_the_same_next_token(
    model: Model, count: int, cuts: list[int], stops: list[int], seed: int
) -> None:
    tokens = paged.random_tokens(model, count, seed)
    (whole,) = paged.run(paged.new_sequence(model, count), tokens)
    snapshots = {position: 10 + i for i, position in enumerate(stops)}
    request = paged.new_sequence(model, count, seed=seed)
    request.state %= 10
    *_, last = paged.run(request, tokens, cuts, snapshots)
    paged.assert_close(last, whole)


def test_a_chunk_of_many_query_blocks_gives_the_same_next_token() -> None:
    tokens = paged.random_tokens(MODEL, 700, seed=8)
    (whole,) = paged.run(paged.new_sequence(MODEL, 700), tokens)
    *_, late = paged.run(paged.new_sequence(MODEL, 700), tokens, cuts=[100])
    *_, small = paged.run(paged.new_sequence(MODEL, 700), tokens, cuts=range(90, 700, 90))
    paged.assert_close(whole, small)
    paged.assert_close(late, small)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 30)), min_size=1, max_size=7), st.data()
)
def test_a_request_computes_the_same_alone_and_among_others(
    shapes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """(tokens before, tokens now) of each request, all in one step: decoding and chunks mixed."""
    runner = paged.Runner(MODEL, paged.pages_for(MODEL, 100, requests=len(shapes)))
    pages = np.arange(8 * len(shapes)).reshape(len(shapes), 8)
    requests, chunks, alone = [], [], []
    for i, (before, now) in enumerate(shapes):
        count = before + (1 if before and data.draw(st.booleans()) else now)
        tokens = paged.random_tokens(MODEL, count, seed=i)
        request = paged.Request(runner, [pages[i]], state=i)
        single = paged.new_sequence(MODEL, 100)
        if before:
            paged.run(request, tokens[:before])
            paged.run(single, tokens[:before])
        requests.append(request)
        chunks.append(request.chunk(tokens[before:]))
        alone.append(paged.run(single, tokens[before:])[0])
    best = runner.run(chunks)
    paged.assert_close(runner.last_logits, torch.stack(alone))
    assert best.tolist() == torch.stack(alone).argmax(-1).tolist()


# ---- states ----------------------------------------------------------------------------------------


def test_a_restored_state_and_blocks_continue_bit_for_bit() -> None:
    tokens = paged.random_tokens(MODEL, 96, seed=3)
    first = paged.new_sequence(MODEL, 96, seed=3)
    first.state = 0
    paged.run(first, tokens[:48], cuts=[20], snapshots={32: 5, 48: 6})
    for start, snapshot in ((32, 5), (48, 6)):
        straight = paged.new_sequence(MODEL, 96)
        straight.state = 0
        paged.run(straight, tokens[:start], cuts=[20])
        expected = paged.run(straight, tokens[start:], cuts=[60, 61, 62])

        other = paged.new_sequence(MODEL, 96, seed=start)
        other.state, other.source, other.done = 1, 9, start
        blocks = start // 16
        for source, target in zip(first.tables[0][:blocks], other.tables[0][:blocks], strict=True):
            other.runner.pages(0)[int(target)] = first.runner.pages(0)[int(source)]
        other.runner.pages(1)[9] = first.runner.pages(1)[snapshot]
        restored = paged.run(other, tokens[start:], cuts=[60, 61, 62])
        assert all(map(torch.equal, restored, expected))


@pytest.mark.parametrize("count", [1, 20])
def test_a_source_page_that_is_not_a_target_is_only_read(count: int) -> None:
    tokens = paged.random_tokens(MODEL, 32 + count, seed=4)
    request = paged.new_sequence(MODEL, 64)
    request.state = 2
    paged.run(request, tokens[:32], snapshots={32: 3})
    before = request.runner.pages(1)[3].clone()
    paged.run(request, tokens[32:])
    assert torch.equal(request.runner.pages(1)[3], before)
    assert not torch.equal(request.runner.pages(1)[2], before)


@pytest.mark.parametrize("count", [1, 20])
def test_a_state_is_updated_in_place_where_source_and_target_are_one(count: int) -> None:
    tokens = paged.random_tokens(MODEL, 32 + count, seed=5)
    in_place, moved = paged.new_sequence(MODEL, 64), paged.new_sequence(MODEL, 64)
    in_place.state = moved.state = 2
    for request, snapshots in ((in_place, {}), (moved, {32: 3})):
        paged.run(request, tokens[:32], snapshots=snapshots)
        paged.run(request, tokens[32:])
    a, b = in_place.runner.pages(1), moved.runner.pages(1)
    assert torch.equal(a[2], b[2])


def test_a_snapshot_holds_the_state_of_its_position() -> None:
    tokens = paged.random_tokens(MODEL, 40, seed=6)
    whole, stopped = paged.new_sequence(MODEL, 40), paged.new_sequence(MODEL, 40)
    whole.state = stopped.state = 0
    paged.run(stopped, tokens[:32])
    paged.run(whole, tokens, snapshots={32: 7})
    a, b = (r.runner.pages(1).view(torch.float32) for r in (whole, stopped))
    assert float((a[7] - b[0]).abs().max()) < 1e-5
    assert float((a[7] - a[0]).abs().max()) > 1e-2


# ---- only the named pages are written ----------------------------------------------------------------


def test_a_step_writes_only_its_own_slots() -> None:
    runner = paged.Runner(SMALL_BLOCKS, [12, 8])
    runner.storage.arena.view(torch.float32).normal_(generator=torch.Generator().manual_seed(0))
    shared = [1, 2]
    one = paged.Request(runner, [[*shared, 3, 4]], state=0)
    two = paged.Request(runner, [[*shared, 5, 6]], state=1)
    for request in (one, two):
        request.done, request.source = 8, 4
    before = [runner.pages(g).clone() for g in (0, 1)]
    tokens = paged.random_tokens(SMALL_BLOCKS, 6, seed=1)
    runner.run([one.chunk(tokens[:1]), two.chunk(tokens[1:])])
    written = [
        {i for i, (a, b) in enumerate(zip(old, new, strict=True)) if not torch.equal(a, b)}
        for old, new in zip(before, map(runner.pages, (0, 1)), strict=True)
    ]
    assert written == [{3, 5, 6}, {0, 1}]


# ---- what is refused ---------------------------------------------------------------------------------


@pytest.fixture
def request_() -> paged.Request:
    request = paged.new_sequence(MODEL, 64)
    request.state = 0
    paged.run(request, paged.random_tokens(MODEL, 20, seed=0))
    return request


def refused(
    request: paged.Request,
    match: str,
    error: type[Exception] = MisuseError,
    tokens: Sequence[int] = (1, 2),
    **changes: Any,
) -> None:
    before = everything(request.runner)
    chunk = dataclasses.replace(request.chunk(np.array(tokens, np.int32)), **changes)
    with pytest.raises(error, match=match):
        request.runner.run([chunk])
    assert all(map(torch.equal, before, everything(request.runner)))


@pytest.mark.parametrize("token", [-1, 259, 2**31 - 1])
def test_a_token_out_of_range_is_refused(request_: paged.Request, token: int) -> None:
    message = f"token id {token} is out of range: the model has 259"
    refused(request_, message, InputError, (1, token))


def test_a_context_longer_than_the_models_is_refused(request_: paged.Request) -> None:
    refused(
        request_, "32769 tokens is longer than the model's 32768", InputError, (1,), start=32768
    )


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        ("no work", {"tokens": np.empty(0, np.int32)}),
        ("no work", {"start": -1}),
        ("1 tables and 2 states for 2 groups", {"tables": [None]}),
        ("1 pages for a context of 22 tokens, which needs 2", {"tables": [np.zeros(1, int), None]}),
        ("0 pages for a context", {"tables": [None, None]}),
        ("page -1 is not one of the 32", {"tables": [np.array([0, -1]), None]}),
        ("page 32 is not one of the 32", {"tables": [np.array([0, 32]), None]}),
        ("no state plan", {"states": [None, None]}),
        ("no state plan", {"states": [None, StatePlan(0, np.empty(0, int), np.empty(0, int))]}),
        ("do not cut", {"states": [None, StatePlan(0, np.array([21]), np.array([0]))]}),
        ("do not cut", {"states": [None, StatePlan(0, np.array([22, 22]), np.array([0, 1]))]}),
        ("do not cut", {"states": [None, StatePlan(0, np.array([20, 22]), np.array([0, 1]))]}),
        ("has no source", {"states": [None, StatePlan(-1, np.array([22]), np.array([0]))]}),
        ("page 24 is not one", {"states": [None, StatePlan(24, np.array([22]), np.array([0]))]}),
        ("page 99 is not one", {"states": [None, StatePlan(0, np.array([22]), np.array([99]))]}),
    ],
)
def test_a_chunk_that_cannot_be_is_refused(
    request_: paged.Request, match: str, changes: dict[str, Any]
) -> None:
    refused(request_, match, **changes)


def test_a_bad_chunk_stops_the_whole_step(request_: paged.Request) -> None:
    good = request_.chunk(np.array([1, 2], np.int32))
    before = everything(request_.runner)
    with pytest.raises(InputError):
        request_.runner.run([good, dataclasses.replace(good, tokens=np.array([300], np.int32))])
    assert all(map(torch.equal, before, everything(request_.runner)))


def test_a_step_without_chunks_does_nothing() -> None:
    assert TorchRunner(MODEL, 1).run([]).tolist() == []


# ---- results and memory ------------------------------------------------------------------------------


def test_gaps_tell_how_close_the_second_token_was(request_: paged.Request) -> None:
    other = paged.new_sequence(MODEL, 64)
    chunk = request_.chunk(np.array([5, 6, 7], np.int32))
    best = request_.runner.run([chunk])
    top, second = np.sort(request_.runner.last_logits[0].numpy())[::-1][:2]
    assert best[0] == int(request_.runner.last_logits[0].argmax())
    assert request_.runner.last_gaps.tolist() == [top - second]
    assert other.runner.last_gaps.shape == (0,)


def test_regions_name_the_memory_of_every_group() -> None:
    runner = TorchRunner(SMALL_BLOCKS, 3)
    sizes = [g.page_bytes for g in SMALL_BLOCKS.geometry.groups]
    state, tail = 4 * 16 * 16, 3 * (2 * 2 * 16 + 4 * 16)
    assert sizes == [4 * 2 * 2 * 2 * 16 * 4, 2 * (state + tail) * 4]
    got = [(r.page_bytes, r.step_bytes, r.pages) for r in runner.regions()]
    assert got == [(2048, 2048, 33), (11264, 11264, 6)]
    assert [r.address for r in runner.regions()] == [runner.storage.arena.data_ptr()] * 2
    assert len(runner.storage.arena) == 3 * SMALL_BLOCKS.geometry.slab_bytes


def test_pages_are_moved_one_after_the_other() -> None:
    storage = PagedStorage(SMALL_BLOCKS.geometry, 4)
    attention, state = storage.raw
    for page, bytes_ in enumerate(attention):
        bytes_.fill_(page)
    small, large = SMALL_BLOCKS.geometry.class_of_group
    # Page 8 goes on to where page 9 was, that is in turn overwritten by a page of the other class.
    moves = [(small, 8, 1), (small, 9, 8), (small, 1, 9), (large, 3, 0), (small, 8, 12)]
    storage.move(np.array(moves, MOVE_DTYPE))
    assert [int(attention[p][0]) for p in (8, 9, 12)] == [9, 8, 9]
    # A state is as large as eleven halves of the others' pages.
    assert state[0].view(11, -1)[:, 0].tolist() == [half // 2 for half in range(33, 44)]


def test_a_page_holds_layers_then_keys_and_values_then_tokens() -> None:
    request = paged.new_sequence(SMALL_BLOCKS, 8)
    request.tables, request.state = [np.array([1, 2])], 0
    paged.run(request, np.array([9, 9, 9, 9, 7], np.int32))
    group = SMALL_BLOCKS.geometry.groups[0]
    pages = request.runner.pages(0).view(torch.float32)
    pages = pages.view(-1, group.layers, 2, group.block_tokens, group.kv_heads, group.head_dim)
    assert pages[1].abs().amin((-1, -2)).shape == (2, 2, 4)
    assert (pages[1].abs().amax((-1, -2)) > 0).all()
    assert (pages[2].abs().amax((-1, -2)) > 0).sum(-1).tolist() == [[1, 1], [1, 1]]
    assert (pages[0] == 0).all()
    keys, values = pages[1, 0]
    assert not torch.allclose(keys[0], keys[1], atol=1e-3), "equal tokens have other positions"
    assert not torch.allclose(values[0], keys[0], atol=1e-3)


@pytest.mark.parametrize(
    ("slabs", "match"),
    [
        (0, "slabs is 0: it must be above 0"),
        (UNLIMITED, "slabs is -1"),
        (1 << 45, r"no memory for an arena of .* slabs .* give it fewer"),
    ],
)
def test_an_arena_that_cannot_be_is_refused(slabs: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        TorchRunner(MODEL, slabs)


def test_elements_must_fit_the_pages() -> None:
    odd = RecurrentState(name="s", layers=2, state_bytes_per_layer=6)
    storage = PagedStorage(Geometry((odd,)), 1)
    assert [part.shape[1] for part in storage.layers(0, torch.bfloat16)] == [3, 3]
    with pytest.raises(ConfigError, match=r"12 bytes for 2 layers.* not whole elements"):
        storage.layers(0, torch.float32)


def test_padding_of_decoding_requests_is_bounded() -> None:
    request = paged.new_sequence(MODEL, 2000)
    request.tables = [np.arange(100) % 3]
    chunks = []
    for start in (1599, 10, 700, 900, 40, 1000, 30):
        request.done, request.source = start, 0
        chunks.append(request.chunk(np.array([1], np.int32)))
    (plan,) = make_batch(chunks, MODEL.geometry, MODEL.readings).groups[0]
    padded = sum(len(b.pages) for b in plan.buckets)
    needed = sum(-(-c.end // 16) for c in chunks)
    assert [b.rows for b in plan.buckets] == [slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7)]
    assert padded < 2 * needed


def test_an_arena_begins_where_a_disk_can_write_it_in_place() -> None:
    for slabs in (1, 3):
        storage = PagedStorage(SMALL_BLOCKS.geometry, slabs)
        assert storage.arena.data_ptr() % 4096 == 0
        assert len(storage.arena) == slabs * SMALL_BLOCKS.geometry.slab_bytes
