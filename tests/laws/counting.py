"""How much the law tests did: calls that change or query a manager, by name."""

from __future__ import annotations

from collections import Counter

operations: Counter[str] = Counter()
seen: Counter[str] = Counter()
"""What came about: the laws prove little where these stay at 0."""


def count(name: str) -> None:
    operations[name] += 1
