"""Numbers of namespaces: how many there are, and how often it is asked whether one is in use."""

from __future__ import annotations

import random
from collections import deque

import pytest

from kvcache.core.hashing import Fingerprint
from kvcache.core.namespaces import KEPT_NAMESPACES, Namespaces


class Users:
    """Says which numbers are in use, and counts how often it was asked."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.asked = 0

    def __call__(self, number: int) -> int:
        self.asked += 1
        return number in self.numbers


def test_where_all_numbers_are_in_use_each_new_root_asks_for_four_on_average() -> None:
    users = Users()
    names = Namespaces(Fingerprint(), 16, users)
    roots = KEPT_NAMESPACES + 3000
    for salt in range(roots):
        users.numbers.add(names.number(salt=str(salt), lora="", foreign=False))
    assert users.numbers == set(range(roots))
    assert users.asked <= 4 * 3000 + 32


@pytest.mark.parametrize("in_use", [10, 1000, 2000])
@pytest.mark.parametrize("gone", ["the oldest", "any", "a new one"])
def test_numbers_are_at_most_twice_as_many_as_are_in_use(in_use: int, gone: str) -> None:
    users, draw = Users(), random.Random(0)
    names, opened = Namespaces(Fingerprint(), 16, users), deque[int]()
    far = {"the oldest": 1, "any": in_use, "a new one": 5}[gone]
    for salt in range(8 * in_use + 2 * KEPT_NAMESPACES):
        if len(opened) == in_use:
            opened.rotate(draw.randrange(far))
            users.numbers.remove(opened.popleft())
        number = names.number(salt=str(salt), lora="", foreign=False)
        assert number not in users.numbers
        users.numbers.add(number)
        opened.append(number)
    assert len(names.entries) <= max(KEPT_NAMESPACES, 2 * in_use) + 32
