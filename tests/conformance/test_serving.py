"""Prompts that vLLM has forgotten come back from the tier: the right bytes, in every kind of model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conformance.stack import Stack, chunked, expected_outputs, full, state, window

PROMPT = [i * 7 % 199 for i in range(150)]

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, many layers": {"layers": 3},
    "full, blocks first": {"layers": 3, "blocks_first": True},
    "full, window": {"specs": [full(), window()]},
    "full, two windows, blocks first": {
        "specs": [full(), window(), window(64)],
        "layers": 2,
        "blocks_first": True,
    },
    "full, chunked": {"specs": [full(), chunked()]},
    "full, state": {"specs": [full(), state()], "blocks": 60},
    "full, state, sparse": {"specs": [full(), state()], "retention": 64, "blocks": 60},
    "full, state, fine": {"specs": [full(64), state(64, 16384)], "match_unit": 16},
    "full, window, state": {"specs": [full(), window(), state()], "blocks": 60},
    "full, window, no retention": {"specs": [full(), window()], "retention": 0},
}


def stats(stack: Stack) -> Any:
    return stack.connector._scheduler.tier.stats()


def require_whole(stack: Stack) -> None:
    """Nothing is held, and the tier's index is sound."""
    assert stack.free == stack.setup.blocks - 1
    stack.connector._scheduler.tier.check()
    assert stats(stack).pinned_pages == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forgotten_prompt_comes_back(kind: str, asynchronous: bool) -> None:
    with Stack(**KINDS[kind], asynchronous=asynchronous) as stack:
        first = stack.serve("first", PROMPT, 12)
        assert list(first.output_token_ids) == expected_outputs(first)
        assert not stack.external
        stack.forget()
        again = stack.serve("again", [*PROMPT, 7, 7, 7], 12)
        assert list(again.output_token_ids) == expected_outputs(again)
        assert sum(stack.external["again"]) >= 128
        assert stats(stack).loaded_pages > 0
        require_whole(stack)


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_goes_on_from_the_reply_before(kind: str) -> None:
    with Stack(**KINDS[kind]) as stack:
        history = list(PROMPT)
        for turn in range(4):
            stack.forget()
            request = stack.serve(f"turn {turn}", history, 40)
            assert list(request.output_token_ids) == expected_outputs(request)
            if turn:  # all but the block or two in which the history ends
                assert sum(stack.external[f"turn {turn}"]) >= len(history) - 3 - 64
            history += [*request.output_token_ids, 1, 2, 3]
        require_whole(stack)


def test_replies_are_not_stored_where_that_is_asked_for() -> None:
    extra = {"tiers": [{"connector": "cpu", "capacity_bytes": 1 << 22}], "store": "prompt"}
    with Stack(extra=extra) as stack:
        reply = stack.serve("first", PROMPT, 40)
        stack.forget()
        stack.serve("again", [*PROMPT, *reply.output_token_ids, 1], 4)
        assert sum(stack.external["again"]) == len(PROMPT) // 16 * 16
        require_whole(stack)


def test_a_step_may_wait_for_its_loads() -> None:
    extra = {"tiers": [{"connector": "cpu", "capacity_bytes": 1 << 22}], "load": "sync"}
    with Stack(extra=extra) as stack:
        stack.serve("first", PROMPT)
        stack.forget()
        request = stack.add("again", PROMPT, 4)
        stack.step()
        assert request.num_computed_tokens == len(PROMPT)  # loaded, and computed to its end
        stack.run()
        assert list(request.output_token_ids) == expected_outputs(request)
        assert stack.external["again"] == [144]
        require_whole(stack)


def test_pages_outlive_the_engine_on_a_disk(tmp_path: Path) -> None:
    extra = {
        "tiers": [
            {"connector": "cpu", "capacity_bytes": 1 << 22},
            {"connector": "disk", "folder": str(tmp_path), "capacity_bytes": 1 << 26},
        ]
    }
    for life in range(2):
        with Stack(specs=[full(), window()], extra=extra) as stack:
            request = stack.serve("first", PROMPT)
            assert list(request.output_token_ids) == expected_outputs(request)
            assert sum(stack.external.get("first", [])) == (144 if life else 0)
            assert stack.worker._tier.worker.flush(30)
            require_whole(stack)


def test_another_cache_salt_shares_nothing() -> None:
    with Stack() as stack:
        for salt in ("one", "two"):
            stack.forget()
            stack.add(salt, PROMPT, 4, cache_salt=salt)
            stack.run()
        assert not stack.external
        require_whole(stack)


def test_requests_of_one_prefix_share_a_load() -> None:
    with Stack(blocks=80) as stack:
        stack.serve("first", PROMPT)
        stack.forget()
        before = stats(stack).loaded_pages
        requests = [stack.add(f"r{i}", [*PROMPT, i], 4) for i in range(6)]
        stack.run()
        assert stats(stack).loaded_pages - before == len(PROMPT) // 16
        for request in requests:
            assert list(request.output_token_ids) == expected_outputs(request)
        require_whole(stack)


def test_a_full_device_goes_on_with_loads() -> None:
    """Requests that are preempted for others come back from the tier, and every one of them ends."""
    with Stack(blocks=24, requests=6, specs=[full(), window()]) as stack:
        prompts = [[(i * 13 + n) % 199 for i in range(90)] for n in range(8)]
        for turn in range(3):
            for n, prompt in enumerate(prompts):
                stack.add(f"{turn}/{n}", prompt, 60)
            stack.run()
        for request in stack.requests.values():
            assert list(request.output_token_ids) == expected_outputs(request)
        assert sum(request.num_preemptions for request in stack.requests.values())
        assert stats(stack).loaded_pages
        require_whole(stack)


def test_a_reset_forgets_the_tier_too() -> None:
    with Stack() as stack:
        stack.serve("first", PROMPT)
        assert stack.scheduler.reset_prefix_cache(reset_connector=True)
        stack.model.fill(0xEE)
        stack.serve("again", PROMPT)
        assert "again" not in stack.external
        stack.forget()
        stack.serve("third", PROMPT)
        assert sum(stack.external["third"]) == 144
        require_whole(stack)


def test_without_prefix_caching_nothing_is_stored() -> None:
    with Stack() as stack:
        request = stack.add("first", PROMPT, 4)
        request.skip_reading_prefix_cache = True
        stack.run()
        stack.forget()
        other = stack.add("again", PROMPT, 4)
        other.skip_reading_prefix_cache = True
        stack.run()
        assert not stack.external
        require_whole(stack)
