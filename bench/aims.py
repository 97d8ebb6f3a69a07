"""What benchmarks aim at: figures of their reports that miss it, and what came out wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def missed(
    figures: Mapping[str, Any], least: Mapping[str, float], most: Mapping[str, float]
) -> list[str]:
    """A line for each figure that is too small or too large; one that was not measured has none."""
    return [
        f"{name} {figures[name]:.3f}, aim: at least {aim:g}"
        for name, aim in least.items()
        if name in figures and figures[name] < aim
    ] + [
        f"{name} {figures[name]:.3f}, aim: at most {aim:g}"
        for name, aim in most.items()
        if name in figures and figures[name] > aim
    ]


def describe(report: Mapping[str, Any]) -> list[str]:
    """The last lines for people: `failed`, and `missed` of a benchmark that has aims."""
    lines = [f"failed: {text}" for text in report.get("failed", ())]
    if "missed" in report:
        lines += [f"missed: {text}" for text in report["missed"]] or ["All aims are reached."]
    return lines


def verdict(report: Mapping[str, Any], *, require: bool) -> bool:
    """Whether a run has succeeded: nothing was wrong and, if so required, no aim was missed."""
    return not report.get("failed") and not (require and report.get("missed"))
