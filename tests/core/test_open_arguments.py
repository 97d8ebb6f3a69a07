"""What `open` and the constructor refuse: by name, at once, and nothing is left behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from core.managing import FULL, HYBRID, hit, hybrid, run, text

from kvcache.core.errors import ConfigError, KVCacheError, MisuseError
from kvcache.core.events import BlockStored
from kvcache.core.manager import Manager
from kvcache.core.media import Media, PromptEmbeddings
from kvcache.core.records import UNLIMITED
from kvcache.core.retain import RetentionPlan, TurnShape
from kvcache.retention import Sparse

Call = Callable[[Any], Any]
NAN = float("nan")
KEYS = np.zeros((2, 32), np.uint8)


def image(**fields: Any) -> Media:
    return Media(**{"identifier": "cat", "offset_tokens": 0, "length_tokens": 2, **fields})


def embedded(**fields: Any) -> PromptEmbeddings:
    return PromptEmbeddings(**{"offset_tokens": 0, "values": np.ones((2, 2)), **fields})


OPEN: dict[str, tuple[Call, str]] = {
    "session of a number": (lambda m: m.open([1], session=3), "session is 3"),
    "session of bytes": (lambda m: m.open([1], session=b"s"), "session is b's'"),
    "session of nothing": (lambda m: m.open([1], session=None), "session is None"),
    "session of no Unicode": (lambda m: m.open([1], session="\ud800"), "session is"),
    "salt of nothing": (lambda m: m.open([1], salt=None), "salt is None"),
    "salt of bytes": (lambda m: m.open([1], salt=b""), "salt is b''"),
    "adapter of nothing": (lambda m: m.open([1], lora=None), "lora is None"),
    "adapter of a list": (lambda m: m.open([1], lora=["a"]), "lora is .'a'."),
    "tokens of nothing": (
        lambda m: m.open(None),
        "tokens is None: give a list or an array of whole",
    ),
    "tokens of text": (
        lambda m: m.open("abc"),
        "tokens is 'abc': give a list or an array of whole",
    ),
    "tokens of a generator": (
        lambda m: m.open(t for t in (1, 2)),
        "tokens is <generator .*: give a list or an array of whole numbers .int32.",
    ),
    "tokens of NaN": (lambda m: m.open([NAN]), "tokens"),
    "no tokens": (lambda m: m.open([]), "the prompt has 0 tokens"),
    "max_tokens of text": (lambda m: m.open([1], max_tokens="9"), "max_tokens is '9'"),
    "max_tokens of NaN": (lambda m: m.open([1], max_tokens=NAN), "max_tokens is nan"),
    "max_tokens of 1.5": (lambda m: m.open([1], max_tokens=np.float32(1.5)), "max_tokens is"),
    "max_tokens of 3/2": (lambda m: m.open([1], max_tokens=Fraction(3, 2)), "max_tokens is"),
    "boundaries of nothing": (
        lambda m: m.open([1], boundaries=None),
        "boundaries is None: give a list",
    ),
    "boundaries of a number": (
        lambda m: m.open([1], boundaries=64),
        "boundaries is 64: give a list or an array of whole numbers .int64.",
    ),
    "boundaries of text": (lambda m: m.open([1], boundaries="1"), "boundaries"),
    "boundary of text": (lambda m: m.open([1], boundaries=["1"]), "boundaries"),
    "boundary of NaN": (lambda m: m.open([1], boundaries=[NAN]), "boundaries"),
    "boundary of nothing": (lambda m: m.open([1], boundaries=[None]), "boundaries"),
    "boundary below": (lambda m: m.open([1], boundaries=[-1]), "inside the prompt"),
    "boundary beyond 64 bits": (lambda m: m.open([1], boundaries=[2**70]), "boundaries"),
    "media of a number": (lambda m: m.open([1], media=5), "media is 5"),
    "media of nothing": (lambda m: m.open([1], media=None), "media is None"),
    "media of text": (lambda m: m.open([1], media="cat"), "media has 'c'"),
    "an item of nothing": (lambda m: m.open([1], media=[None]), "media has None"),
    "an item alone": (lambda m: m.open([1, 2], media=image()), "media is Media"),
    "embeddings of an array": (lambda m: m.open([1], embeddings=np.ones((1, 2))), "embeddings has"),
    "embeddings of nothing": (lambda m: m.open([1], embeddings=None), "embeddings is None"),
    "ragged embeddings": (
        lambda m: m.open([1, 2], embeddings=[embedded(values=[[1], [2, 3]])]),
        "cannot be made an array",
    ),
    "embeddings of no width": (
        lambda m: m.open([1, 2], embeddings=[embedded(values=np.ones((2, 0)))]),
        r"embeddings\[0\]\.values has shape \(2, 0\)",
    ),
    "embeddings of objects": (
        lambda m: m.open([1, 2], embeddings=[embedded(values=[[object()]])]),
        r"embeddings\[0\]\.values is of type object",
    ),
    "no tokens, but an image": (lambda m: m.open([], media=[image()]), "the prompt has 0 tokens"),
    "foreign salt": (lambda m: m.open_foreign(KEYS, prompt_tokens=8, salt=None), "salt is None"),
    "foreign adapter": (lambda m: m.open_foreign(KEYS, prompt_tokens=8, lora=1), "lora is 1"),
    "foreign session": (lambda m: m.open_foreign(KEYS, prompt_tokens=8, session=1), "session is 1"),
    "foreign length": (lambda m: m.open_foreign(KEYS, prompt_tokens=NAN), "prompt_tokens is nan"),
    "foreign text length": (lambda m: m.open_foreign(KEYS, prompt_tokens="8"), "prompt_tokens"),
    "foreign length of 0": (lambda m: m.open_foreign(KEYS[:0], prompt_tokens=0), "has 0 tokens"),
    "foreign boundary": (
        lambda m: m.open_foreign(KEYS, prompt_tokens=8, boundaries=["1"]),
        "boundaries",
    ),
    "foreign keys of nothing": (lambda m: m.open_foreign(None, prompt_tokens=8), "digests"),
    "foreign keys, ragged": (lambda m: m.open_foreign([[1], [2, 3]], prompt_tokens=8), "digests"),
}


@pytest.mark.parametrize("case", OPEN)
def test_a_refused_open_names_the_argument_and_leaves_nothing_behind(case: str) -> None:
    manager = Manager(FULL, slabs=40, retention=Sparse(), events=True)
    call, message = OPEN[case]
    with pytest.raises(ConfigError, match=message):
        call(manager)
    assert manager.stats().open_requests == 0
    assert manager.namespaces == []
    assert (manager._shapes, manager._labels, manager._closed) == ({}, {}, type(manager._closed)())
    manager.check()


class OffTheGrid:
    """A policy that the core refuses."""

    def plan(self, shape: TurnShape) -> RetentionPlan:
        return RetentionPlan([0] * len(shape.groups), [3], [True])


REFUSED_BELOW: dict[str, Call] = {
    "more than the arena": lambda m: m.open(text(9), max_tokens=9000, salt="new"),
    "less than the prompt": lambda m: m.open(text(9), max_tokens=5, salt="new"),
    "media beyond": lambda m: m.open(text(9), media=[image(offset_tokens=8)], salt="new"),
    "too few keys": lambda m: m.open_foreign(KEYS, prompt_tokens=99, salt="new"),
    "plan off the grid": lambda m: m.open(text(9), salt="off"),
}


@pytest.mark.parametrize("case", REFUSED_BELOW)
def test_what_the_core_refuses_leaves_nothing_behind_either(case: str) -> None:
    manager = Manager(FULL, slabs=40, retention=Sparse(), events=True)
    run(manager, text(9), salt="old")
    before = (manager.stats(), list(manager.namespaces), dict(manager._namespaces.labels))
    if case == "plan off the grid":
        manager.retention = OffTheGrid()
    for _ in range(2):
        with pytest.raises(KVCacheError):
            REFUSED_BELOW[case](manager)
    manager.retention = Sparse()
    assert (manager.stats(), manager.namespaces, manager._namespaces.labels) == before
    assert hit(manager, text(9), salt="old") == 8
    run(manager, text(9), salt="new")
    assert hit(manager, text(9), salt="new") == 8
    manager.check()


def test_a_refused_open_takes_no_number_from_a_root_in_use() -> None:
    manager = Manager(FULL, slabs=40, retention=Sparse())
    run(manager, text(9), salt="old")
    with pytest.raises(KVCacheError):
        manager.open(text(9), max_tokens=5, salt="old")
    assert len(manager.namespaces) == 1
    assert hit(manager, text(9), salt="old") == 8


NOT_WHOLE: list[Any] = [NAN, float("inf"), 1.5, 1.0, "1", None, True, np.float32(1), Decimal("1.5")]


@pytest.mark.parametrize("value", NOT_WHOLE)
def test_places_in_a_prompt_are_whole_numbers(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"Media\.offset_tokens is .* whole number"):
        image(offset_tokens=value)
    with pytest.raises(ConfigError, match=r"Media\.length_tokens is .* whole number"):
        image(length_tokens=value)
    with pytest.raises(ConfigError, match=r"PromptEmbeddings\.offset_tokens is .* whole number"):
        embedded(offset_tokens=value)


@pytest.mark.parametrize("identifier", [None, 3, b"cat", "\ud800"])
def test_an_identifier_is_a_text(identifier: Any) -> None:
    with pytest.raises(ConfigError, match=r"Media\.identifier is .* a (valid text|text \(str\))"):
        image(identifier=identifier)


def test_places_of_numpy_are_ints_in_events_too() -> None:
    item = image(offset_tokens=np.int64(1), length_tokens=np.uint8(2))
    assert (type(item.offset_tokens), type(item.length_tokens)) == (int, int)
    assert type(embedded(offset_tokens=np.int32(3)).offset_tokens) is int


COUNTS: dict[str, Callable[[Manager, int, Any], Any]] = {
    "allocate": lambda m, h, n: m.allocate(h, n),
    "drafts": lambda m, h, n: m.allocate(h, 1, drafts=n),
    "need": lambda m, h, n: m.need(h, n),
    "need of drafts": lambda m, h, n: m.need(h, 1, drafts=n),
    "commit": lambda m, h, n: m.commit(h, n),
    "stops from": lambda m, h, n: m.stops(h, n, 4),
    "stops to": lambda m, h, n: m.stops(h, 0, n),
    "extend_foreign": lambda m, h, n: m.extend_foreign(h, n),
}


@pytest.mark.parametrize("value", NOT_WHOLE)
@pytest.mark.parametrize("call", COUNTS)
def test_counts_are_never_cut_to_whole_numbers(call: str, value: Any) -> None:
    manager = hybrid()
    handle = manager.open(text(9), max_tokens=12)
    manager.lookup(handle)
    assert manager.allocate(handle, 9)
    manager.begin_step()
    before = manager.info(handle)
    with pytest.raises(ConfigError, match="whole number"):
        COUNTS[call](manager, handle, value)
    assert manager.info(handle) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"geometry": None}, "geometry is None"),
        ({"geometry": HYBRID.groups}, "geometry is .*: give a Geometry"),
        ({"fingerprint": "model"}, "fingerprint is 'model'"),
        ({"fingerprint": b""}, "fingerprint is b''"),
        ({"fingerprint": {"model": "m"}}, "fingerprint is {'model': 'm'}"),
        ({"max_open_steps": None}, "max_open_steps is None"),
        ({"max_open_steps": 1.5}, "max_open_steps is 1.5"),
        ({"max_open_steps": 0}, "max_open_steps is 0"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"slabs": 1.5}, "slabs is 1.5"),
        ({"slabs": None}, "slabs is None"),
    ],
)
def test_settings_of_the_wrong_type_are_named(settings: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"slabs": 40, "retention": Sparse(), **settings}
    with pytest.raises(ConfigError, match=message):
        Manager(given.pop("geometry", HYBRID), **given)


def test_what_is_looked_for_has_32_bytes() -> None:
    manager = hybrid()
    for wrong in (None, 5, "x" * 32, bytes(31)):
        with pytest.raises(ConfigError, match="digest"):
            manager.find_key(0, wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="namespace"):
            manager.find_key(0, bytes(32), namespace=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("present", [5, [None, None], [[0.5], [1]], "ab", [[1]]])
def test_presence_that_is_no_list_of_byte_arrays_is_refused(present: Any) -> None:
    manager = hybrid()
    handle = manager.open(text(9))
    with pytest.raises(ConfigError, match="present"):
        manager.lookup(handle, present)


def test_the_length_of_an_item_is_part_of_the_keys_that_it_covers() -> None:
    """Equal tokens, one identifier, one place: a shorter image is another image."""
    manager = Manager(FULL, slabs=UNLIMITED, retention=Sparse(), events=True)
    tokens = [*range(4), 7, 7, 7, 7, *range(8, 13)]

    def keys(length: int) -> list[bytes]:
        item = image(offset_tokens=4, length_tokens=length)
        handle = manager.open(tokens, media=[item])
        found = [row.tobytes() for row in manager.digests(handle)]
        manager.abort(handle)
        return found

    three, four = keys(3), keys(4)
    assert three[0] == four[0]
    assert three[1] != four[1]
    assert three[2] != four[2]
    assert keys(4) == four


def stored_by(manager: Manager, handle: int) -> BlockStored:
    """The event of a prompt of nine tokens that is computed."""
    step = manager.begin_step()
    assert manager.allocate(handle, 9)
    manager.commit(handle, 9)
    manager.end_step(step)
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    return stored


def test_events_tell_the_identifier_as_it_was_given() -> None:
    manager = Manager(FULL, slabs=UNLIMITED, retention=Sparse(), events=True)
    item = image(offset_tokens=np.int64(2), length_tokens=2)
    handle = manager.open(text(9), media=(item for _ in range(1)))  # type: ignore[arg-type]
    assert stored_by(manager, handle).extra_keys == ((("cat", 2),), None)


def test_events_tell_of_media_in_the_order_of_the_prompt() -> None:
    manager = Manager(FULL, slabs=UNLIMITED, retention=Sparse(), events=True)
    items = [image(offset_tokens=offset, length_tokens=1) for offset in (7, 1, 4, 3)]
    handle = manager.open(text(9), media=items)
    assert stored_by(manager, handle).extra_keys == (
        (("cat", 1), ("cat", 3)),
        (("cat", 0), ("cat", 3)),
    )


# ---- features that are off -------------------------------------------------------------------------


def test_events_of_a_manager_that_keeps_none_are_misuse_and_name_the_setting() -> None:
    manager = hybrid()
    assert not manager.reports_events
    for call in (manager.take_events, manager.take_runs):
        with pytest.raises(MisuseError, match="events=True"):
            call()
    assert Manager(FULL, slabs=8, retention=Sparse(), events=True).take_events() == []


def test_moves_may_be_asked_for_always_since_nothing_moves() -> None:
    assert len(hybrid().take_moves()) == 0


def test_a_medium_is_a_text() -> None:
    manager = Manager(FULL, slabs=8, retention=Sparse(), events=True)
    with pytest.raises(KVCacheError, match="medium is 5"):
        manager.take_events(medium=5)  # type: ignore[arg-type]


def test_a_prompt_refused_for_its_length_can_be_opened_shorter() -> None:
    manager = Manager(FULL, slabs=3, retention=Sparse())
    with pytest.raises(KVCacheError, match="needs"):
        manager.open(text(40), salt="long")
    assert hit(manager, text(9), salt="long") == 0
    assert manager.stats().open_requests == 0


# ---- places in a prompt ----------------------------------------------------------------------------

NINE = text(9)
FAR = image(offset_tokens=7, length_tokens=2)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (
            {"media": [FAR, image(offset_tokens=8)]},
            (
                "media[1] covers 2 tokens from offset_tokens 8 on: it must lie inside the prompt of 9"
                " tokens"
            ),
        ),
        (
            {"media": [image(offset_tokens=-1)]},
            (
                "media[0] covers 2 tokens from offset_tokens -1 on: it must lie inside the prompt of 9"
                " tokens"
            ),
        ),
        (
            {"media": [FAR, image(length_tokens=0)]},
            (
                "media[1] covers 0 tokens from offset_tokens 0 on: an item inside the prompt of 9 tokens must"
                " cover one token at least"
            ),
        ),
        (
            {"media": [image(length_tokens=-3)]},
            "media[0] covers -3 tokens from offset_tokens 0 on: an item inside",
        ),
        (
            {"media": [image(offset_tokens=2**63 - 1, length_tokens=2**63 - 1)]},
            "it must lie inside the prompt of 9 tokens",
        ),
        (
            {"media": [image(offset_tokens=3), image(length_tokens=4)]},
            (
                "media[0] covers 2 tokens from offset_tokens 3 on, media[1] goes on to token 4 of the"
                " prompt of 9 tokens: items must not overlap"
            ),
        ),
        (  # in units of 4: an item of its own for each
            {"embeddings": [embedded(), embedded(offset_tokens=3, values=np.ones((7, 2)))]},
            (
                "embeddings[1] covers 7 tokens from offset_tokens 3 on: it must lie inside the prompt of 9"
                " tokens"
            ),
        ),
        (
            {"embeddings": [embedded(offset_tokens=-2)]},
            "embeddings[0] covers 2 tokens from offset_tokens -2 on: it must lie inside",
        ),
        (
            {"media": [FAR], "embeddings": [embedded(values=np.ones((8, 2)))]},
            (
                "media[0] covers 2 tokens from offset_tokens 7 on, embeddings[0] goes on to token 8 of the"
                " prompt of 9 tokens: items must not overlap"
            ),
        ),
    ],
)
def test_an_item_that_cannot_stand_where_it_says_is_named_as_it_was_given(
    items: dict[str, Any], message: str
) -> None:
    manager = Manager(FULL, slabs=40, retention=Sparse())
    with pytest.raises(ConfigError, match=re.escape(message)):
        manager.open(NINE, **items)
    assert manager.stats().open_requests == 0


def test_items_may_touch_each_other_and_the_ends_in_any_order() -> None:
    manager = Manager(FULL, slabs=40, retention=Sparse())
    filled = {
        "media": [FAR, image()],
        "embeddings": [embedded(offset_tokens=2, values=np.ones((5, 2)))],
    }
    run(manager, NINE, **filled)
    assert hit(manager, NINE, **filled) == 8
    assert hit(manager, NINE) == 0


# ---- flags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["yes", 2, 1, 0, None, 1.0, []])
@pytest.mark.parametrize("name", ["movable", "journal", "events"])
def test_a_flag_of_the_manager_is_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is .*: it must be True or False"):
        Manager(FULL, slabs=4, retention=Sparse(), **{name: value})
    assert Manager(FULL, slabs=4, retention=Sparse(), **{name: np.True_})
