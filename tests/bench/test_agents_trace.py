"""The agent traces: fixed lists of tokens, and what an infinite cache hits on them."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kvcache.bench.agents_trace import TRACES, AgentRequest, AgentTrace, ideal_hit_tokens
from kvcache.core.errors import ConfigError

SMALL = AgentTrace(
    sessions=4,
    turns=3,
    system_tokens=40,
    first_tokens=30,
    tool_tokens=20,
    output_tokens=10,
    seed=5,
    max_running=2,
)

PINNED = {
    "short": (
        (96, 1_200_695, 34_473),
        "69e739f255c7331e8f7072c174dbbdd27cb2798a013f8472491873a8c6845c36",
    ),
    "long": (
        (24, 1_400_261, 9_042),
        "a0c8745024af7115b049685ac217c3ea522a199abaa74dd58b5a616da339e3f0",
    ),
}
"""Requests, prompt and output tokens, and SHA-256 of all of them: equal on every machine."""


@pytest.mark.parametrize("name", PINNED)
def test_a_trace_is_the_same_list_of_tokens_everywhere(name: str) -> None:
    requests = TRACES[name].generate()
    digest = hashlib.sha256()
    for request in requests:
        digest.update(request.prompt.astype("<i4").tobytes())
        digest.update(request.output.astype("<i4").tobytes())
    counts = (
        len(requests),
        sum(len(r.prompt) for r in requests),
        sum(len(r.output) for r in requests),
    )
    assert (counts, digest.hexdigest()) == PINNED[name]


def test_a_prompt_begins_with_the_turn_before_it() -> None:
    before: dict[int, AgentRequest] = {}
    for request in SMALL.generate():
        if request.turn:
            last = before[request.session]
            known = np.concatenate([last.prompt, last.output])
            assert (request.prompt[: len(known)] == known).all()
        before[request.session] = request
    assert len(before) == SMALL.sessions


def test_the_system_prompt_is_all_that_sessions_share() -> None:
    first = [r.prompt for r in SMALL.generate() if r.turn == 0]
    for prompt in first[1:]:
        assert (prompt[: SMALL.system_tokens] == first[0][: SMALL.system_tokens]).all()
        assert prompt[SMALL.system_tokens] != first[0][SMALL.system_tokens]


@pytest.mark.parametrize("grid", [1, 8, 16])
def test_the_ideal_is_that_of_a_cache_that_keeps_every_prefix(grid: int) -> None:
    requests = SMALL.generate()
    keys: set[bytes] = set()
    hit = 0
    for request in requests:
        ends = range(grid, len(request.prompt), grid)
        hit += max((end for end in ends if request.prompt[:end].tobytes() in keys), default=0)
        computed = np.concatenate([request.prompt, request.output])[:-1]
        keys |= {computed[:end].tobytes() for end in range(grid, len(computed) + 1, grid)}
    assert ideal_hit_tokens(requests, declared=True, grid_tokens=grid) == hit


def test_undeclared_costs_one_sighting_of_the_system_prompt() -> None:
    requests = SMALL.generate()
    declared = ideal_hit_tokens(requests, declared=True, grid_tokens=8)
    assert declared - ideal_hit_tokens(requests, declared=False, grid_tokens=8) == 40


@pytest.mark.parametrize("field", ["sessions", "turns", "first_tokens", "output_tokens"])
def test_a_trace_of_nothing_is_refused(field: str) -> None:
    sizes = {
        "sessions": 1,
        "turns": 1,
        "system_tokens": 0,
        "first_tokens": 1,
        "tool_tokens": 0,
        "output_tokens": 1,
        "seed": 0,
        "max_running": 1,
    }
    with pytest.raises(ConfigError, match=field):
        AgentTrace(**{**sizes, field: 0})
