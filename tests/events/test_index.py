"""The reference index."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.core.errors import ConfigError, InputError
from kvcache.core.events import AllBlocksCleared, BlockRemoved, BlockStored, ReferenceIndex, Shelf


def stored(
    *hashes: int, group: int = 0, medium: str = "GPU", ns: bytes | None = None
) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=(),
        block_size=4,
        medium=medium,
        group_idx=group,
        namespace=ns,
    )


def removed(
    *hashes: int, group: int = 0, medium: str = "GPU", ns: bytes | None = None
) -> BlockRemoved:
    return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group, namespace=ns)


def test_groups_media_and_namespaces_are_apart() -> None:
    index = ReferenceIndex()
    index.apply([stored(1), stored(1, group=1), stored(1, medium="cpu"), stored(1, ns=b"n" * 32)])
    assert len(index) == 4
    index.apply([removed(1, medium="CPU")])
    assert index.shelves() == {Shelf(0, "GPU"), Shelf(1, "GPU"), Shelf(0, "GPU", b"n" * 32)}
    index.apply([removed(1)])
    assert index.keys(0) == frozenset()
    assert index.keys(0, namespace=b"n" * 32) == {1}


def test_cleared_clears_every_shelf() -> None:
    index = ReferenceIndex()
    index.apply([stored(1), stored(2, group=1, medium="CPU"), AllBlocksCleared(), stored(3)])
    assert index.shelves() == {Shelf(0, "GPU")}
    assert index.keys(0) == {3}


def test_copies_are_counted_only_where_wanted() -> None:
    events = [stored(1, 2), stored(1), removed(1)]
    plain, counting = ReferenceIndex(), ReferenceIndex(count_copies=True)
    plain.apply(events)
    counting.apply(events)
    assert plain.keys(0) == {2}
    assert counting.keys(0) == {1, 2}
    counting.apply([removed(1)])
    assert counting.keys(0) == {2}


def test_what_a_complete_stream_never_has_is_counted() -> None:
    index = ReferenceIndex()
    index.apply([stored(1), stored(1), removed(5), removed(1, group=3)])
    assert (index.repeated_stores, index.unknown_removals) == (1, 2)
    index.forget()
    assert len(index) == 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (5, "is no KV event"),
        (BlockStored, "is no KV event"),
        (removed(1.5), "block_hashes is"),  # type: ignore[arg-type]
        (removed(1, medium=5), "medium is 5: it must be a text or None"),  # type: ignore[arg-type]
        (removed(1, group="a"), "group_idx is 'a': it must be a number or None"),  # type: ignore[arg-type]
        (removed(1, ns="n"), "namespace is 'n': it must be bytes or None"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_event_is_refused_and_nothing_is_taken(bad: Any, message: str) -> None:
    index = ReferenceIndex()
    with pytest.raises(InputError, match=message):
        index.apply([stored(1), bad])
    assert len(index) == 0
    with pytest.raises(ConfigError, match=r"events is 5: give a list"):
        index.apply(5)  # type: ignore[arg-type]
