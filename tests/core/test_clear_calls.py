"""What makes keys unfindable, and what is refused before anything is cleared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from core.managing import FULL, compute, hit, run, text

from kvcache.core.errors import ConfigError
from kvcache.core.hashing import Fingerprint
from kvcache.core.manager import Manager
from kvcache.core.records import UNLIMITED
from kvcache.retention import Sparse

PROMPT = text(9)


def filled() -> Manager:
    """Keys under no adapter, and under two of them; both have a version."""
    manager = Manager(
        FULL, slabs=UNLIMITED, retention=Sparse(), fingerprint=Fingerprint(weights_epoch=3)
    )
    manager.set_lora_version("a", "v1")
    for lora in ("", "a", "b"):
        run(manager, PROMPT, lora=lora)
    return manager


def hits(manager: Manager) -> list[int]:
    return [hit(manager, PROMPT, lora=lora) for lora in ("", "a", "b")]


def roots(manager: Manager) -> list[bytes]:
    found = []
    for lora in ("", "a", "b"):
        handle = manager.open(PROMPT, lora=lora)
        found.append(manager.digests(handle).tobytes())
        manager.abort(handle)
    return found


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "the present epoch": (lambda m: m.set_weights_epoch(3), "3 is the present one.*tiers"),
    "the present epoch by numpy": (lambda m: m.set_weights_epoch(np.int64(3)), "present one"),
    "no epoch": (lambda m: m.set_weights_epoch(None), "None: it must be a whole number"),
    "an epoch of NaN": (lambda m: m.set_weights_epoch(float("nan")), "nan: it must be a whole"),
    "an epoch of half": (lambda m: m.set_weights_epoch(4.5), "4.5"),
    "a whole float": (lambda m: m.set_weights_epoch(4.0), "whole number"),
    "an epoch of text": (lambda m: m.set_weights_epoch("4"), "whole number"),
    "a truth": (lambda m: m.set_weights_epoch(True), "whole number"),
    "an epoch below 0": (lambda m: m.set_weights_epoch(-1), "-1: it must be from 0"),
    "an epoch beyond 64 bits": (lambda m: m.set_weights_epoch(2**63), "it must be from 0"),
    "an epoch beyond all": (lambda m: m.set_weights_epoch(10**5000), "it must be from 0"),
    "the present version": (lambda m: m.set_lora_version("a", "v1"), "'v1'.*present one.*tiers"),
    "an empty version": (lambda m: m.set_lora_version("b", ""), "empty version"),
    "back to no version": (lambda m: m.set_lora_version("a", ""), "empty version"),
    "a version of the base": (lambda m: m.set_lora_version("", "v"), "set_weights_epoch"),
    "no adapter": (lambda m: m.set_lora_version(None, "v"), "lora is None"),
    "an adapter of bytes": (lambda m: m.set_lora_version(b"a", "v"), "lora is b'a'"),
    "an adapter that is a list": (lambda m: m.set_lora_version(["a"], "v"), "lora is"),
    "an adapter of no Unicode": (lambda m: m.set_lora_version("\ud800", "v"), "valid text"),
    "no version": (lambda m: m.set_lora_version("a", None), "version is None"),
    "a version of a number": (lambda m: m.set_lora_version("a", 2), "version is 2"),
    "a version of no Unicode": (lambda m: m.set_lora_version("a", "\ud800"), "valid text"),
    "a salt of bytes": (lambda m: m.clear(salt=b"s"), "salt is b's'"),
    "a salt of a number": (lambda m: m.clear(salt=0), "salt is 0"),
    "an adapter of a number": (lambda m: m.clear(lora=1), "lora is 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_has_cleared_nothing_and_changed_no_key(case: str) -> None:
    manager = filled()
    before = roots(manager)
    deed, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        deed(manager)
    assert hits(manager) == [8, 8, 8]
    assert roots(manager) == before
    assert manager.fingerprint.weights_epoch == 3
    manager.check()


def test_another_epoch_changes_every_key_and_nothing_is_found() -> None:
    manager = filled()
    before = roots(manager)
    manager.set_weights_epoch(np.int64(4))  # type: ignore[arg-type]
    assert hits(manager) == [0, 0, 0]
    assert not set(roots(manager)) & set(before)
    assert manager.fingerprint == Fingerprint(weights_epoch=4)


def test_another_version_changes_the_keys_of_its_adapter_alone() -> None:
    manager = filled()
    before = roots(manager)
    manager.set_lora_version("a", "v2")
    assert hits(manager) == [8, 0, 8]
    assert [old == new for old, new in zip(before, roots(manager), strict=True)] == [
        True,
        False,
        True,
    ]


def test_an_earlier_epoch_has_its_keys_again_and_the_device_has_forgotten_them() -> None:
    manager = filled()
    before = roots(manager)
    manager.set_weights_epoch(4)
    manager.set_weights_epoch(3)
    assert roots(manager) == before
    assert hits(manager) == [0, 0, 0]


@pytest.mark.parametrize(
    "fields",
    [
        {"weights_epoch": None},
        {"weights_epoch": 1.0},
        {"weights_epoch": -1},
        {"weights_epoch": 2**63},
        {"model": 3},
        {"model": None},
        {"kv_dtype": b"fp8"},
        {"position_scheme": "\ud800"},
        {"secret": "s"},
        {"secret": None},
    ],
)
def test_a_fingerprint_of_the_wrong_type_is_refused_when_it_is_made(fields: Any) -> None:
    with pytest.raises(ConfigError, match=f"Fingerprint.{next(iter(fields))}"):
        Fingerprint(**fields)


class Counting:
    """A library whose calls are counted by name."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._library, name)


def with_salts(salts: int) -> Manager:
    """An adapter that was used under many salts, another one under half of them."""
    manager = Manager(FULL, slabs=UNLIMITED, retention=Sparse(), journal=True)
    for salt in range(salts):
        run(manager, PROMPT, lora="a", salt=str(salt))
        if salt % 2:
            run(manager, PROMPT, lora="b", salt=str(salt))
    return manager


@pytest.mark.parametrize("retire", [False, True])
def test_an_adapter_of_many_salts_is_cleared_in_one_call(retire: bool) -> None:
    salts = 40
    manager = with_salts(salts)
    runs_on = manager.open(PROMPT, lora="a", salt="0")
    compute(manager, runs_on, len(PROMPT))
    manager._lib = counting = Counting(manager._lib)
    if retire:
        manager.set_lora_version("a", "v1")
    else:
        manager.clear(lora="a")
    assert counting.calls == {"kvc_clear_namespaces": 1}
    manager.finish(runs_on)  # leaves no keys
    assert manager.group_stats(0).keyed == salts // 2 * (len(PROMPT) // 4)
    assert [hit(manager, PROMPT, lora="b", salt=str(salt)) for salt in range(salts)] == [0, 8] * (
        salts // 2
    )
    assert {hit(manager, PROMPT, lora="a", salt=str(salt)) for salt in range(salts)} == {0}
    assert len(manager.take_keyed()) == salts // 2 * (len(PROMPT) // 4)  # those of "a" are gone too
    manager.check()


def test_clearing_what_was_never_used_does_nothing() -> None:
    manager = filled()
    manager.clear(lora="c")
    manager.clear(salt="nobody's")
    assert hits(manager) == [8, 8, 8]
