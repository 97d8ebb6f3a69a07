from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine.rig import generate, rig, tokens
from engine.stamp_runner import VOCAB, StampRunner, expected_output, stamp_geometry

from kvcache import (
    CapacityError,
    ConfigError,
    Dense,
    HandleError,
    InputError,
    Manager,
    Sparse,
)
from kvcache.core.retain import RetentionPolicy
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.request import Finished, Reason, Token


def test_bad_prompts_are_refused_with_the_numbers() -> None:
    with rig([8]) as r:
        add = r.engine.add_request
        with pytest.raises(InputError, match="the prompt is empty"):
            add([], max_new_tokens=1)
        with pytest.raises(InputError, match=f"from -1 to 5: .* 0 to {VOCAB - 1}"):
            add([5, -1], max_new_tokens=1)
        with pytest.raises(InputError, match=f"from 0 to {VOCAB}"):
            add([0, VOCAB], max_new_tokens=1)
        with pytest.raises(InputError, match="max_new_tokens is 0"):
            add([1], max_new_tokens=0)
        with pytest.raises(InputError, match="together 100001, the model's context is 100000"):
            add(np.zeros(99_999, np.int32), max_new_tokens=2)
        with pytest.raises(ConfigError, match="whole numbers"):
            add([0.5], max_new_tokens=1)  # type: ignore[list-item]
        assert not r.engine.busy
        assert r.manager.stats().open_requests == 0


def test_a_request_that_never_fits_is_refused_with_sizes_and_settings() -> None:
    with rig([8]) as r:
        r.engine.add_request(tokens(100, 1), max_new_tokens=28)
        with pytest.raises(
            CapacityError, match=r"129 tokens .* needs 9 slabs of 384 bytes, the arena has 8: give"
        ):
            r.engine.add_request(tokens(100, 1), max_new_tokens=29)
        r.engine.run()


def test_the_queue_is_bounded() -> None:
    with rig([8], max_waiting=2) as r:
        r.engine.add_request([1], max_new_tokens=1)
        r.engine.add_request([2], max_new_tokens=1)
        with pytest.raises(CapacityError, match="2 requests wait already"):
            r.engine.add_request([3], max_new_tokens=1)
        r.engine.run()


@pytest.mark.parametrize("name", ["max_waiting", "idle_wait_seconds", "stall_seconds"])
def test_settings_below_zero_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is -1"):
        EngineSettings(**{name: -1})


@pytest.mark.parametrize(
    "name",
    [
        "token_budget",
        "max_requests",
        "max_waiting",
        "idle_wait_seconds",
        "stall_seconds",
        "priority_seconds",
        "loads",
        "debug",
    ],
)
@pytest.mark.parametrize("value", [None, [], np.zeros(2), "x" * 100_000, object()])
def test_settings_of_a_wrong_type_are_named_in_a_short_message(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        EngineSettings(**{name: value})
    assert len(str(caught.value)) < 300


def test_parts_of_a_wrong_type_are_named() -> None:
    with rig([8], tier_pages=[8]) as r:
        for parts, message in (
            ((None, r.manager), "runner is None"),
            ((r.runner, None), "manager is None"),
            ((r.runner, r.manager, 5), "offload is 5"),
        ):
            with pytest.raises(ConfigError, match=message):
                Engine(*parts)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="settings are 7"):
            Engine(r.runner, r.manager, settings=7)  # type: ignore[arg-type]


def test_a_reload_without_a_function_changes_nothing() -> None:
    with rig([8]) as r:
        request = r.engine.add_request(tokens(20, 1), max_new_tokens=4)
        r.engine.step()
        epoch = r.manager.fingerprint.weights_epoch
        with pytest.raises(ConfigError, match="load is 0"):
            r.engine.reload(epoch + 1, 0)  # type: ignore[arg-type]
        assert r.manager.fingerprint.weights_epoch == epoch
        assert r.engine.counters.preemptions == 0
        assert r.engine.run()[request].reason is Reason.LENGTH


def test_a_manager_of_another_geometry_is_refused() -> None:
    geometry = stamp_geometry(16)
    manager = Manager(geometry, slabs=8, retention=Sparse())
    with pytest.raises(ConfigError, match="different geometries"):
        Engine(StampRunner(stamp_geometry(8), 8), manager)


def test_unknown_requests_are_refused() -> None:
    with rig([8]) as r:
        request = r.engine.add_request([1, 2], max_new_tokens=1)
        r.engine.run()
        for call in (r.engine.abort, r.engine.preempt):
            with pytest.raises(HandleError, match=f"request {request} is unknown or has ended"):
                call(request)


@pytest.mark.parametrize("request_id", [None, [], {}, "1", 1.5, np.zeros(1, np.int64)])
def test_an_id_that_is_no_whole_number_is_refused(request_id: Any) -> None:
    with rig([8]) as r:
        known = r.engine.add_request([1, 2], max_new_tokens=1)
        for call in (r.engine.abort, r.engine.preempt):
            for value in (request_id, float(known)):
                with pytest.raises(ConfigError, match="request_id is"):
                    call(value)
        assert r.engine.run()[known].reason is Reason.LENGTH


@pytest.mark.parametrize("stops", [5, None, [[1]], [0.5]])
def test_bad_stop_ids_leave_no_request_behind(stops: Any) -> None:
    with rig([20]) as r:
        with pytest.raises(ConfigError, match="stop_ids"):
            r.engine.add_request(tokens(9, 1), max_new_tokens=1, stop_ids=stops)
        assert r.manager.stats().open_requests == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan"), 1e10])
def test_waits_without_a_bound_are_refused(seconds: float) -> None:
    for name in ("idle_wait_seconds", "stall_seconds"):
        with pytest.raises(ConfigError, match=name):
            EngineSettings(**{name: seconds})


def test_events_are_the_tokens_in_order_then_the_end() -> None:
    with rig([8]) as r:
        prompt = tokens(20, 1)
        request = r.engine.add_request(prompt, max_new_tokens=3)
        events = list(r.engine.stream())
        assert events[:3] == [Token(request, t) for t in expected_output(prompt, 3)]
        end = events[3]
        assert isinstance(end, Finished)
        assert end.reason is Reason.LENGTH
        assert end.usage == (20, 3, 0, 0, 0)
        assert end.timing.arrival <= end.timing.first_token <= end.timing.finish
        assert end.timing.first_token_seconds == end.timing.first_token - end.timing.arrival
        assert len(events) == 4
        assert not r.engine.busy


def test_run_gives_all_tokens_once_though_a_step_raised_after_it_had_them() -> None:
    with rig([40], tier_pages=[40]) as r:
        prompts = [tokens(20, i) for i in range(3)]
        ids = [
            r.engine.add_request(p, max_new_tokens=n)
            for p, n in zip(prompts, (6, 3, 9), strict=True)
        ]
        assert r.offload is not None
        inner = r.offload.end_of_step

        def failing() -> None:
            inner()
            raise OSError("injected")

        for _ in range(2):
            r.engine.step()
        r.offload.end_of_step = failing  # type: ignore[method-assign]
        with pytest.raises(OSError, match="injected"):
            r.engine.step()  # the second request ends in it
        r.offload.end_of_step = inner  # type: ignore[method-assign]
        results = r.engine.run()
        for request, prompt, count in zip(ids, prompts, (6, 3, 9), strict=True):
            assert results[request].reason is Reason.LENGTH
            assert results[request].tokens == expected_output(prompt, count)


def test_run_gives_what_an_aborted_request_had() -> None:
    with rig([20]) as r:
        prompt = tokens(20, 1)
        request = r.engine.add_request(prompt, max_new_tokens=9)
        for _ in range(3):
            r.engine.step()
        r.engine.abort(request)
        assert r.engine.run()[request].tokens == expected_output(prompt, 3)


def test_a_stop_id_ends_the_output_and_is_part_of_it() -> None:
    with rig([8]) as r:
        prompt = tokens(20, 1)
        wanted = expected_output(prompt, 9)
        request = r.engine.add_request(prompt, max_new_tokens=9, stop_ids=[wanted[4]])
        result = r.engine.run()[request]
        assert result.reason is Reason.STOP
        assert result.tokens == wanted[:5]


def test_the_next_turn_hits_prompt_and_output() -> None:
    with rig([20]) as r:
        prompt = tokens(40, 1)
        output = generate(r.engine, prompt, 10).tokens
        second = r.engine.add_request([*prompt, *output, *tokens(5, 2)], max_new_tokens=1)
        assert r.engine.run()[second].usage.device_tokens == 48
        assert r.engine.counters.computed_tokens == 40 + 9 + 7


def test_requests_may_be_added_while_a_stream_runs() -> None:
    with rig([20]) as r:
        r.engine.add_request(tokens(10, 1), max_new_tokens=3)
        seen, late = [], None
        for event in r.engine.stream():
            seen.append(event)
            if late is None:
                late = r.engine.add_request(tokens(10, 2), max_new_tokens=2)
        assert [e.request for e in seen if isinstance(e, Finished)][-1] == late


def test_run_gives_whole_outputs_of_requests_that_had_already_begun() -> None:
    with rig([20]) as r:
        prompt = tokens(10, 1)
        request = r.engine.add_request(prompt, max_new_tokens=6)
        for _ in range(3):
            r.engine.step()
        assert r.engine.run()[request].tokens == expected_output(prompt, 6)


CASES = [
    ((16,), [14], 0, Sparse()),
    ((16,), [200], 0, Sparse()),
    ((4, 8), [56, 28], 0, Sparse()),
    ((16,), [14, 3], 1, Sparse()),
    ((16,), [14, 6], 1, Dense()),
    ((8,), [28, 3, 4], 2, Sparse(16)),
]


@pytest.mark.parametrize("budget", [4, 17, 1000])
@pytest.mark.parametrize("tier", [None, 1, 8])
@pytest.mark.parametrize(("blocks", "pages", "states", "retention"), CASES)
def test_outputs_do_not_depend_on_pool_tier_or_budget(
    blocks: tuple[int, ...],
    pages: list[int],
    states: int,
    retention: RetentionPolicy,
    tier: int | None,
    budget: int,
) -> None:
    tier_pages = None if tier is None else [n * tier for n in pages]
    shared = tokens(90, 1)
    with rig(
        pages,
        *blocks,
        states=states,
        retention=retention,
        tier_pages=tier_pages,
        token_budget=budget,
    ) as r:
        prompts = [[*shared[: 20 * (i % 5)], *tokens(3 + 11 * i, i)] for i in range(10)]
        ids = [r.engine.add_request(p, max_new_tokens=12) for p in prompts]
        results = r.engine.run()
        for i, prompt in zip(ids, prompts, strict=True):
            assert results[i].tokens == expected_output(prompt, 12)
        assert r.held == 0


def test_an_offload_of_another_manager_is_refused() -> None:
    with rig([8], tier_pages=[8]) as r:
        other = Manager(r.manager.geometry, slabs=8, retention=Sparse())
        with pytest.raises(ConfigError, match="offload was made for another manager"):
            Engine(r.runner, other, r.offload)
