"""The reference index."""

from __future__ import annotations

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
