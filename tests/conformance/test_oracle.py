"""Beside vLLM's own offload to host memory: the same requests, as many pages, never fewer tokens found."""

from __future__ import annotations

import random
from typing import Any

import pytest
from conformance.oracle import oracle
from conformance.stack import Setup, Stack, chunked, expected_outputs, full, state, window

TURNS = 40
MOST_TOKENS = 400

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, window": {"specs": [full(), window()]},
    "full, window, no retention": {"specs": [full(), window()], "retention": 0},
    "full, chunked": {"specs": [full(), chunked()]},
    "full, state": {"specs": [full(), state()]},
    "full, state, no retention": {"specs": [full(), state()], "retention": 0},
    "full, state, sparse": {"specs": [full(), state()], "retention": 64},
    "full, state, fine": {"specs": [full(64), state(64, 16384)], "match_unit": 16, "blocks": 30},
    "full, window, state": {"specs": [full(), window(), state()]},
}


def sessions(rng: random.Random) -> list[tuple[str, list[int], int]]:
    """Requests of six sessions that grow, and begin anew when they are long."""

    def fresh(least: int, most: int) -> list[int]:
        return [rng.randrange(200) for _ in range(rng.randrange(least, most))]

    open_ones = [fresh(20, 90) for _ in range(6)]
    requests = []
    for turn in range(TURNS):
        session = rng.choice(open_ones)
        requests.append((f"r{turn}", list(session), rng.randrange(1, 20)))
        session += fresh(1, 30)
        if len(session) > MOST_TOKENS:
            session[:] = fresh(40, 41)
    return requests


def found(stack: Stack, requests: list[tuple[str, list[int], int]]) -> dict[str, int]:
    """Of each request the tokens that were on the device or in the tier."""
    with stack:
        hits = {}
        for name, tokens, most in requests:
            request = stack.serve(name, tokens, most)
            assert list(request.output_token_ids) == expected_outputs(request)
            hits[name] = stack.local.get(name, 0) + sum(stack.external.get(name, []))
        assert stack.free == stack.setup.blocks - 1
        assert stack.external
    return hits


@pytest.mark.usefixtures("plain_copies")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_no_request_finds_less_than_over_vllms_own_tier(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    requests = sessions(rng)
    pages = rng.choice([60, 100, 200])
    setup = Setup(**KINDS[kind])
    page_bytes = max(spec.page_size_bytes for spec in setup.specs)
    setup.extra = {"tiers": [{"connector": "cpu", "capacity_bytes": page_bytes * pages}]}
    ours = found(Stack(setup), requests)
    # One of its blocks is the null block.
    theirs = found(oracle(Setup(**KINDS[kind]), pages + 1), requests)
    fewer = {name: (ours[name], theirs[name]) for name in ours if ours[name] < theirs[name]}
    assert not fewer
