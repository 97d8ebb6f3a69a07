"""The check at the end of a session of all laws: that it fails where the laws did too little."""

from __future__ import annotations

from collections import Counter

from laws.counting import ANYWHERE, CALLS, EVERYWHERE, OPERATIONS, shortfalls

GEOMETRIES = {"a": {"full", "span", "kept in part"}, "b": {"full", "draft"}}


def enough() -> tuple[Counter[str], Counter[tuple[str, str]]]:
    operations = Counter(dict.fromkeys(CALLS, OPERATIONS // len(CALLS) + 1))
    seen = Counter({(what, "a"): 1 for what in ANYWHERE})
    seen += Counter({(what, name): 1 for what in EVERYWHERE for name in GEOMETRIES})
    seen += Counter({("junction", "a"): 1, ("hole", "b"): 1})
    return operations, seen


def lacks(operations: Counter[str], seen: Counter[tuple[str, str]], scale: int = 1) -> list[str]:
    return shortfalls(operations, seen, GEOMETRIES, scale=scale)


def test_nothing_lacks_where_everything_came_about() -> None:
    assert lacks(*enough()) == []


def test_too_few_operations_are_told_and_more_are_wanted_at_a_larger_scale() -> None:
    operations, seen = enough()
    total = operations.total()
    assert lacks(operations, seen, 10) == [f"{total} operations of at least 2000000"]
    operations["open"] -= total - OPERATIONS + 1
    assert lacks(operations, seen) == ["199999 operations of at least 200000"]


def test_a_call_that_was_never_made_is_told() -> None:
    operations, seen = enough()
    operations["lookup"] += operations.pop("pin")
    assert lacks(operations, seen) == ["no call of pin"]


def test_what_never_came_about_is_told_with_its_geometry() -> None:
    for what, where, text in (
        ("moved page", "a", "never: moved page"),
        ("evicted key", "b", "never in 'b': evicted key"),
        ("junction", "a", "never in 'a': junction"),
        ("hole", "b", "never in 'b': hole"),
    ):
        operations, seen = enough()
        seen[what, where] = 0
        assert lacks(operations, seen) == [text]
