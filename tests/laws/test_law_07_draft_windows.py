"""Draft groups that are spans: a block's key waits for the tokens that its last entry looks ahead to.

Those may be told long after the block was computed, and when its page has left the window.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st
from laws import cases
from laws.drive import ONE_CHUNK, compute, found_keys, open_request
from laws.engine import Engine
from laws.grants import allocate
from laws.oracle import Key
from laws.records import Request
from laws.verify import verify

from kvcache import Geometry, Manager
from kvcache.retention import Sparse

GEOMETRIES = [
    cases.geometry(cases.full("a", block), draft)
    for block, draft in [
        (8, cases.window("d", 3, 8, draft=1)),
        (8, cases.window("d", 6, 4, draft=2)),
        (4, cases.window("d", 9, 2, draft=4)),
        (4, cases.window("d", 5, 8, draft=3)),
        (4, cases.window("d", 3, 8, draft=7)),
        (2, cases.window("d", 11, 8, draft=8)),
        (4, cases.latent_window("d", draft=1)),
        (4, cases.chunked("d", draft=3)),
    ]
]
"""Blocks smaller and larger than a hash unit, windows too; look-ahead up to the grid, which is more
than a hash unit in some."""


def keys_of(
    geometry: Geometry,
    interval: int | None,
    prompt: Sequence[int],
    output: Sequence[int],
    chunks: Sequence[int],
    told: Sequence[int],
    *,
    guessed: bool,
) -> list[set[Key]]:
    """What is left by a request whose output comes in portions of so many tokens."""
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    request = open_request(engine, prompt, output=len(output))
    compute(engine, request, chunks=chunks)
    sizes, at = itertools.cycle(told), 0
    while at < len(output):
        portion = output[at : at + next(sizes)]
        at += len(portion)
        if guessed:
            verified(engine, request, portion)
        else:
            engine.extend(request, portion)
        compute(engine, request, chunks=chunks)
    engine.finish(request)
    verify(engine)
    return found_keys(engine, [[*prompt, *output]])


def verified(engine: Engine, request: Request, portion: Sequence[int]) -> None:
    """A sampled token and guesses that turn out to be right: told when all are computed."""
    engine.extend(request, portion[:1])
    engine.begin_step()
    assert allocate(engine, request, 1, len(portion) - 1)
    engine.commit(request)
    verify(engine)
    engine.extend(request, portion[1:])
    engine.end_step()
    verify(engine)


@cases.law(150)
@given(
    geometry=st.sampled_from(GEOMETRIES),
    interval=cases.intervals,
    prompt=cases.prompts,
    output=cases.texts(40),
    chunks=cases.chunk_plans,
    told=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    guessed=st.booleans(),
)
def test_law_07_draft_windows_get_the_same_keys_however_late_their_tokens_are_told(
    geometry: Geometry,
    interval: int | None,
    prompt: list[int],
    output: list[int],
    chunks: list[int],
    told: list[int],
    guessed: bool,
) -> None:
    at_once = keys_of(geometry, interval, prompt, output, ONE_CHUNK, (40,), guessed=False)
    late = keys_of(geometry, interval, prompt, output, chunks, told, guessed=guessed)
    assert late == at_once


@pytest.mark.parametrize(
    ("window", "ends", "expected"),
    [
        (24, (24, 36), [[], [1, 2]]),
        (48, (40, 68), [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]]),
    ],
)
def test_law_07_blocks_of_a_kept_position_get_their_keys_when_it_is_reached(
    window: int, ends: tuple[int, int], expected: list[list[int]]
) -> None:
    """Not when the step ends that wrote them, though the position's last block still has no key;
    nor when a kept position before it is reached.
    """
    geometry = cases.geometry(cases.full("a", 8), cases.window("d", window, 8, draft=1))
    manager = Manager(geometry, slabs=100, retention=Sparse(32))
    request = manager.open(range(ends[-1]), max_tokens=128)
    manager.lookup(request)
    steps = []
    for upto in ends:
        steps.append(manager.begin_step())
        manager.allocate(request, upto - manager.info(request).committed)
        manager.commit(request, upto)
    found = []
    for step in steps:
        manager.end_step(step)
        keys = manager.group_digests(request)[1]
        found.append([b for b, key in enumerate(keys) if manager.find_key(1, key.tobytes()) >= 0])
    assert found == expected
