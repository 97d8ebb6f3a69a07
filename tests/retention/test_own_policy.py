"""A policy of the user's own, written with public names alone; and answers that are none."""

from __future__ import annotations

from typing import Any

import pytest

import kvcache
from kvcache import (
    ConfigError,
    Dense,
    FullAttention,
    Geometry,
    Manager,
    RecurrentState,
    RetentionPlan,
    RetentionPolicy,
    Sparse,
    TurnShape,
    retention,
)

GEOMETRY = Geometry(
    (
        FullAttention(name="attention", layers=1, kv_heads=1, head_dim=8, block_tokens=4),
        RecurrentState(name="state", layers=1, state_bytes_per_layer=64),
    )
)


class EveryMessage:
    """Keeps the end of each message, and nothing else: the example of docs/retention.md."""

    def plan(self, shape: TurnShape) -> RetentionPlan:
        grid = shape.grid_tokens
        ends = sorted({b // grid * grid for b in shape.boundaries} - {0})
        return RetentionPlan([0] * len(shape.groups), ends, [True] * len(ends))


def serve(manager: Manager, tokens: list[int], **options: Any) -> None:
    handle = manager.open(tokens, **options)
    manager.lookup(handle)
    step = manager.begin_step()
    grant = manager.allocate(handle, len(tokens))
    assert grant is not None
    manager.commit(handle, grant.end)
    manager.end_step(step)
    manager.finish(handle)


def hit(manager: Manager, tokens: list[int]) -> int:
    handle = manager.open(tokens)
    found = manager.lookup(handle).hit_tokens
    manager.abort(handle)
    return found


def test_the_names_are_the_same_in_both_public_places() -> None:
    for name in ("Dense", "RetentionPlan", "RetentionPolicy", "Sparse", "TurnShape"):
        assert getattr(kvcache, name) is getattr(retention, name)
        assert name in kvcache.__all__
        assert name in retention.__all__


def test_a_policy_of_ones_own_decides_what_is_kept() -> None:
    policy: RetentionPolicy = EveryMessage()
    manager = Manager(GEOMETRY, slabs=64, retention=policy)
    serve(manager, [*range(18)], boundaries=[9, 13])
    for parts_at, expected in ((9, 8), (11, 8), (13, 12), (15, 12), (17, 16)):
        assert hit(manager, [*range(parts_at), 99, 98, 97]) == expected
    manager.check()


@pytest.mark.parametrize(
    "policy", [None, 0, "dense", Sparse, Dense, EveryMessage, object(), lambda shape: None]
)
def test_what_is_no_policy_is_refused_when_the_manager_is_made(policy: Any) -> None:
    with pytest.raises(ConfigError, match=r"retention is .*such as Sparse\(\)"):
        Manager(GEOMETRY, slabs=64, retention=policy)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        ([0, 0], [], []),
        RetentionPlan(None, (), ()),  # type: ignore[arg-type]
        RetentionPlan((0, 0), 4, (True,)),  # type: ignore[arg-type]
        RetentionPlan((0, 0), ("4",), (True,)),  # type: ignore[arg-type]
        RetentionPlan((0, 0), (float("nan"),), (True,)),  # type: ignore[arg-type]
        RetentionPlan((0.0, 0.0), (), ()),  # type: ignore[arg-type]
        RetentionPlan((0,), (), ()),
    ],
)
def test_an_answer_that_is_no_plan_is_refused_and_names_the_policy(answer: Any) -> None:
    class Answers:
        def plan(self, shape: TurnShape) -> Any:
            return answer if shape.prompt_tokens == 9 else RetentionPlan((0, 0), (), ())

    class AlwaysAnswers:
        def plan(self, shape: TurnShape) -> Any:
            return answer

    with pytest.raises(ConfigError, match=r"AlwaysAnswers\.plan"):
        Manager(GEOMETRY, slabs=64, retention=AlwaysAnswers())
    manager = Manager(GEOMETRY, slabs=64, retention=Answers())
    with pytest.raises(ConfigError, match=r"Answers\.plan"):
        manager.open([*range(9)], salt="new")
    assert (manager.stats().open_requests, manager.namespaces) == (0, [])


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Sparse(102), r"interval of 102 tokens: not a multiple of the hit grid of 4 tokens"),
        (Sparse(0, {"state": 6}), r"interval of 6 tokens: not a multiple of the hit grid"),
        (Sparse(0, {"kda": 8}), r"group_intervals names \['kda'\]: the groups are \["),
    ],
)
def test_a_policy_that_does_not_fit_the_geometry_is_refused_when_the_manager_is_made(
    policy: Sparse, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Manager(GEOMETRY, slabs=64, retention=policy)
