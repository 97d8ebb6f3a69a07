from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvcache.core.errors import ConfigError
from kvcache.core.retain import RetentionPlan, RetentionPolicy, TurnShape
from kvcache.retention import Dense, Sparse

EXACT = settings(derandomize=True, database=None, deadline=None, max_examples=200)

MOST_OUTPUT = 500

grids = st.sampled_from([1, 4, 16, 128])


@st.composite
def shapes(draw: st.DrawFn) -> TurnShape:
    prompt = draw(st.integers(1, 2000))
    inside = st.lists(st.integers(0, prompt), max_size=5)
    known = st.lists(
        st.integers(0, prompt + MOST_OUTPUT), max_size=5
    )  # a resumed request has output, too
    return TurnShape(prompt, draw(grids), draw(inside), draw(known))


@st.composite
def policies(draw: st.DrawFn, shape: TurnShape) -> RetentionPolicy:
    multiple = draw(st.integers(-1, 5))
    return Dense() if multiple < 0 else Sparse(multiple * shape.grid_tokens)


def all_positions(plan: RetentionPlan, shape: TurnShape) -> set[int]:
    step = plan.intervals[0]
    by_interval = range(step, shape.prompt_tokens + MOST_OUTPUT + 1, step) if step else ()
    return {*plan.positions, *by_interval}


@EXACT
@given(st.data())
def test_positions_are_ascending_unique_on_the_grid_and_inside_the_prompt(
    data: st.DataObject,
) -> None:
    shape = data.draw(shapes())
    plan = data.draw(policies(shape)).plan(shape)
    positions, most = list(plan.positions), shape.prompt_tokens + MOST_OUTPUT
    assert positions == sorted(set(positions))
    assert all(p % shape.grid_tokens == 0 and 0 < p <= most for p in positions)
    assert len(plan.declared) == len(positions)
    assert plan.intervals[0] % shape.grid_tokens == 0
    assert plan.intervals[0] >= 0


@EXACT
@given(st.data())
def test_every_policy_keeps_replay_boundary_declared_boundaries_and_junctions(
    data: st.DataObject,
) -> None:
    shape = data.draw(shapes())
    plan = data.draw(policies(shape)).plan(shape)
    grid = shape.grid_tokens
    asked = {shape.prompt_tokens - 1, *shape.boundaries, *shape.junctions}
    wanted = {p // grid * grid for p in asked} - {0}
    assert wanted <= all_positions(plan, shape)


@EXACT
@given(st.data())
def test_a_denser_policy_keeps_every_state_of_a_sparser_one(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    interval = data.draw(st.integers(1, 5)) * shape.grid_tokens
    kept = [all_positions(p.plan(shape), shape) for p in (Sparse(), Sparse(interval), Dense())]
    assert kept[0] <= kept[1] <= kept[2]


@EXACT
@given(st.data())
def test_the_same_shape_gives_the_same_plan(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    policy = data.draw(policies(shape))
    first, second = policy.plan(shape), policy.plan(shape)
    assert (first.intervals, list(first.positions), list(first.declared)) == (
        second.intervals,
        list(second.positions),
        list(second.declared),
    )


def test_sparse_zero_keeps_the_replay_boundary_alone() -> None:
    plan = Sparse().plan(TurnShape(100, 16))
    assert (plan.intervals[0], list(plan.positions), list(plan.declared)) == (0, [96], [False])


@pytest.mark.parametrize(("prompt", "expected"), [(96, [80]), (97, [96]), (16, []), (17, [16])])
def test_the_replay_boundary_leaves_the_last_token_to_recompute(
    prompt: int, expected: list[int]
) -> None:
    assert list(Sparse().plan(TurnShape(prompt, 16)).positions) == expected


def test_declared_boundaries_and_junctions_keep_their_place_when_superseded() -> None:
    plan = Sparse().plan(TurnShape(100, 16, boundaries=(40,), junctions=(64,)))
    assert dict(zip(plan.positions, plan.declared, strict=True)) == {32: True, 64: True, 96: False}


def test_a_boundary_at_the_replay_boundary_is_kept() -> None:
    plan = Sparse().plan(TurnShape(100, 16, boundaries=(99,)))
    assert dict(zip(plan.positions, plan.declared, strict=True)) == {96: True}


def test_a_boundary_at_the_end_of_the_prompt_is_a_state_of_its_own() -> None:
    assert list(Sparse().plan(TurnShape(96, 16, boundaries=(96,))).positions) == [80, 96]


def test_boundaries_may_come_in_any_order_and_twice() -> None:
    plan = Sparse(32).plan(TurnShape(100, 16, boundaries=(70, 20, 70, 3)))
    assert plan.intervals[0] == 32
    assert list(plan.positions) == [16, 64, 96]


def test_dense_is_every_grid_point() -> None:
    assert Dense().plan(TurnShape(100, 16, boundaries=(40,))) == RetentionPlan([16], [32], [True])


@pytest.mark.parametrize("interval", [-1, -16])
def test_a_negative_interval_is_refused_when_the_policy_is_made(interval: int) -> None:
    with pytest.raises(ConfigError, match=str(interval)):
        Sparse(interval)


def test_an_interval_off_the_grid_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"24.*16"):
        Sparse(24).plan(TurnShape(100, 16))


BAD_SPARSE: dict[str, tuple[dict[str, object], str]] = {
    "text": ({"interval_tokens": "x"}, "interval_tokens is 'x': it must be a whole number"),
    "NaN": ({"interval_tokens": float("nan")}, "interval_tokens is nan"),
    "infinity": ({"interval_tokens": float("inf")}, "interval_tokens is inf"),
    "a fraction": ({"interval_tokens": 16.5}, "16.5"),
    "a whole float": ({"interval_tokens": 16.0}, "whole number"),
    "a truth": ({"interval_tokens": True}, "True"),
    "nothing": ({"interval_tokens": None}, "None"),
    "beyond 64 bits": ({"interval_tokens": 2**63}, "interval_tokens"),
    "more than is possible": ({"interval_tokens": 2**47 + 16}, "from 0 to 140737488355328"),
    "below 0": ({"interval_tokens": -16}, "from 0 to"),
    "a list of groups": ({"group_intervals": [16]}, "group_intervals is .16.: give a mapping"),
    "no groups": ({"group_intervals": None}, "group_intervals is None"),
    "a group's text": ({"group_intervals": {"a": "16"}}, "group_intervals.'a'. is '16'"),
    "a group's NaN": ({"group_intervals": {"a": float("nan")}}, "group_intervals.'a'. is nan"),
    "a group below 0": ({"group_intervals": {"a": -16}}, "-16"),
    "a group's number": ({"group_intervals": {3: 16}}, "a group is 3"),
}


@pytest.mark.parametrize("case", BAD_SPARSE)
def test_intervals_that_are_no_whole_numbers_are_refused_when_the_policy_is_made(case: str) -> None:
    fields, message = BAD_SPARSE[case]
    with pytest.raises(ConfigError, match=message):
        Sparse(**fields)  # type: ignore[arg-type]


def test_an_interval_of_numpy_is_a_whole_number() -> None:
    assert Sparse(np.int64(32)).plan(TurnShape(100, 16)).intervals == [32]  # type: ignore[arg-type]
