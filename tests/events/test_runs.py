"""From the manager's reports to events: runs, parents, labels, and how long ones are cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvcache.core.errors import InvariantError
from kvcache.core.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ClearedRun,
    EventBatch,
    GroupLabel,
    Labels,
    MediaSpan,
    NamespaceLabel,
    ReferenceIndex,
    RemovedRun,
    RequestLabel,
    Run,
    StoredRun,
    decode_batch,
    encode_batch,
    encode_batches,
    to_events,
)
from kvcache.core.events.decode import MAX_PAYLOAD_BYTES
from kvcache.core.events.labels import extra_keys
from kvcache.core.events.pieces import MAX_STORED_HASHES, MAX_STORED_TOKENS, pieces
from kvcache.core.events.runs import MAX_REMOVED_HASHES

BLOCK = 4
LABELS = Labels(
    groups=(GroupLabel(BLOCK, "full_attention"), GroupLabel(2, "sliding_window", 6)),
    namespaces={1: NamespaceLabel("adapter", "salt"), 2: NamespaceLabel(foreign=b"n" * 32)},
    requests={7: RequestLabel("session", (MediaSpan("image", 3, 6),))},
)


def key(i: int) -> bytes:
    return i.to_bytes(32, "big")


def keys(ids: Sequence[int]) -> np.ndarray:
    return np.frombuffer(b"".join(map(key, ids)), np.uint8).reshape(-1, 32)


def numbered(n: int) -> np.ndarray:
    """`n` keys that differ."""
    made = np.zeros((n, 32), np.uint8)
    made[:, :8] = np.arange(n, dtype=np.uint64)[:, None].view(np.uint8)
    return made


def run(
    first: int, n: int, *, group: int = 0, handle: int = 0, ns: int = 0, base: int = 1000
) -> StoredRun:
    """Blocks `first` to `first + n - 1` of a request whose block i has key base + i."""
    block = LABELS.groups[group].block_tokens
    tokens = np.arange(first * block, (first + n) * block, dtype=np.int32)
    parent = key(base + first - 1) if first else None
    ends = block * np.arange(first + 1, first + n + 1)
    return StoredRun(
        group, handle, ns, parent, keys(range(base + first, base + first + n)), ends, tokens
    )


# ---- runs ----------------------------------------------------------------------------------------


def test_a_run_becomes_one_event_with_its_tokens_and_parent() -> None:
    (event,) = to_events([run(2, 3)], LABELS)
    assert event == BlockStored(
        block_hashes=(key(1002), key(1003), key(1004)),
        parent_block_hash=key(1001),
        token_ids=tuple(range(8, 20)),
        block_size=BLOCK,
        medium="GPU",
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def test_runs_that_continue_each_other_become_one_event() -> None:
    assert to_events([run(0, 2), run(2, 1), run(3, 4)], LABELS) == to_events([run(0, 7)], LABELS)


@pytest.mark.parametrize(
    "second",
    [
        run(3, 1),  # a masked block lies between
        run(2, 1, handle=1),
        run(2, 1, ns=1),
        run(2, 1, base=5000),  # same place, other prefix
        run(2, 1)._replace(tokens=np.empty(0, np.int32)),
    ],
)
def test_runs_that_do_not_continue_stay_apart(second: StoredRun) -> None:
    events = to_events([run(0, 2), second], LABELS)
    assert [e.block_hashes for e in events if isinstance(e, BlockStored)] == [
        (key(1000), key(1001)),
        tuple(k.tobytes() for k in second.keys),
    ]
    assert isinstance(last := events[1], BlockStored)
    assert last.parent_block_hash == second.parent


def test_empty_runs_send_nothing() -> None:
    empty = run(0, 1)._replace(keys=keys([]), ends=np.empty(0, np.int64))
    assert to_events([empty, RemovedRun(0, 0, keys([]))], LABELS) == []
    assert len(to_events([run(0, 1), empty, run(1, 1)], LABELS)) == 1


def test_removals_in_a_row_are_grouped_by_group_and_namespace() -> None:
    runs = [
        RemovedRun(0, 0, keys([1])),
        RemovedRun(1, 0, keys([2])),
        RemovedRun(0, 0, keys([3, 4])),
        RemovedRun(0, 2, keys([5])),
    ]
    assert to_events(runs, LABELS, medium="CPU") == [
        BlockRemoved(block_hashes=(key(1), key(3), key(4)), medium="CPU", group_idx=0),
        BlockRemoved(block_hashes=(key(2),), medium="CPU", group_idx=1),
        BlockRemoved(block_hashes=(key(5),), medium="CPU", group_idx=0, namespace=b"n" * 32),
    ]


def test_order_of_stores_removals_and_clears_is_kept() -> None:
    runs: list[Run] = [
        RemovedRun(0, 0, keys([1])),
        run(0, 1),
        RemovedRun(0, 0, keys([1000])),
        run(0, 1),
        ClearedRun(),
        run(0, 1),
    ]
    kinds = [type(e) for e in to_events(runs, LABELS)]
    assert kinds == [
        BlockRemoved,
        BlockStored,
        BlockRemoved,
        BlockStored,
        AllBlocksCleared,
        BlockStored,
    ]


def test_a_great_many_removals_are_cut_into_events() -> None:
    n = MAX_REMOVED_HASHES + 1
    events = to_events([RemovedRun(0, 0, np.zeros((n, 32), np.uint8))], LABELS)
    assert [len(e.block_hashes) for e in events if isinstance(e, BlockRemoved)] == [n - 1, 1]


def test_a_long_run_is_cut_and_each_piece_follows_the_one_before() -> None:
    n = MAX_STORED_TOKENS // BLOCK
    extras = run(0, 2 * n + 3, handle=7, ns=1)._replace(keys=numbered(2 * n + 3))
    events = to_events([extras], LABELS)
    assert all(isinstance(e, BlockStored) for e in events)
    most = min(n, MAX_STORED_HASHES)
    whole = 2 * n + 3
    assert [len(e.block_hashes) for e in events] == [
        most if at + most <= whole else whole - at for at in range(0, whole, most)
    ]
    before: bytes | None = None
    at = 0
    for event in events:
        assert event.parent_block_hash == before
        assert event.token_ids[0] == at
        assert len(event.token_ids) == len(event.block_hashes) * BLOCK
        assert event.extra_keys is not None
        assert len(event.extra_keys) == len(event.block_hashes)
        before, at = event.block_hashes[-1], at + len(event.token_ids)
    assert events[0].extra_keys[0] == ("adapter", ("image", 3), "salt")
    assert set(events[1].extra_keys) == {("adapter",)}
    assert at == whole * BLOCK


def test_a_run_without_tokens_is_cut_by_its_keys() -> None:
    n = MAX_STORED_HASHES + 1
    foreign = run(0, n, ns=2)._replace(keys=numbered(n), tokens=np.empty(0, np.int32))
    assert [len(e.block_hashes) for e in to_events([foreign], LABELS)] == [n - 1, 1]


def test_an_event_whose_tokens_are_not_its_blocks_is_left_whole() -> None:
    n = MAX_STORED_HASHES + 1
    mangled = BlockStored(
        block_hashes=(b"k" * 32,) * n, parent_block_hash=None, token_ids=(1,) * 7, block_size=1
    )
    assert list(pieces(mangled)) == [mangled]


def test_a_prompt_of_millions_of_tokens_fits_what_a_decoder_takes() -> None:
    tokens, block = 2_500_000, 16
    event = BlockStored(
        block_hashes=tuple(n.to_bytes(32, "big") for n in range(tokens // block)),
        parent_block_hash=None,
        token_ids=(2**31 - 1,) * tokens,
        block_size=block,
    )
    batch = EventBatch(ts=0.0, events=(event,))
    assert len(encode_batch(batch)) > MAX_PAYLOAD_BYTES
    payloads = list(encode_batches(batch, 2**20))
    assert max(map(len, payloads)) < 2**20
    found = [e for payload in payloads for e in decode_batch(payload).events]
    assert sum((e.block_hashes for e in found), ()) == event.block_hashes
    assert sum(len(e.token_ids) for e in found) == tokens


@pytest.mark.parametrize(
    "bad",
    [
        run(0, 2)._replace(ends=np.array([4, 12])),
        run(0, 2)._replace(ends=np.array([4])),
        run(0, 2)._replace(tokens=np.zeros(7, np.int32)),
        run(0, 2)._replace(parent=key(1)),
        run(1, 2)._replace(parent=None),
        run(0, 2)._replace(keys=np.zeros((2, 31), np.uint8)),
    ],
)
def test_a_run_that_breaks_its_contract_is_an_invariant_error(bad: StoredRun) -> None:
    with pytest.raises(InvariantError):
        to_events([bad], LABELS)


@st.composite
def reports(draw: st.DrawFn) -> list[Run]:
    """Blocks of a few requests get keys once, in runs with holes, and lose some of them."""
    made: list[Run] = []
    for handle in range(draw(st.integers(1, 3))):
        at = 0
        for _ in range(draw(st.integers(0, 6))):
            at += draw(st.integers(0, 2))
            n = draw(st.integers(1, 4))
            made.append(run(at, n, handle=handle, base=1000 * (handle + 1)))
            at += n
    for r in list(made):
        if draw(st.booleans()):
            gone = RemovedRun(0, 0, r.keys[: draw(st.integers(1, len(r.keys)))])
            at = next(i for i, other in enumerate(made) if other is r)
            made.insert(draw(st.integers(at + 1, len(made))), gone)
    return made


@given(reports())
def test_events_carry_exactly_the_keys_tokens_and_parents_of_the_runs(made: list[Run]) -> None:
    events = to_events(made, LABELS)
    index = ReferenceIndex()
    index.apply(events)
    want: set[bytes] = set()
    for r in made:
        ids = {k.tobytes() for k in r.keys}
        want = want | ids if isinstance(r, StoredRun) else want - ids
    assert index.keys(0) == want
    assert (index.repeated_stores, index.unknown_removals) == (0, 0)
    for event in events:
        assert event.block_hashes
        if isinstance(event, BlockStored):
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
            first = int.from_bytes(event.block_hashes[0], "big") % 1000
            numbers = [int.from_bytes(h, "big") % 1000 for h in event.block_hashes]
            assert numbers == list(range(first, first + len(numbers)))
            assert event.token_ids[0] == first * BLOCK
            parent = event.parent_block_hash
            assert (parent is None) == (first == 0)
            assert parent is None or int.from_bytes(parent, "big") % 1000 == first - 1


# ---- labels --------------------------------------------------------------------------------------


def test_labels_of_group_namespace_and_request_are_in_the_event() -> None:
    (event,) = to_events([run(0, 3, handle=7, ns=1)], LABELS)
    assert isinstance(event, BlockStored)
    assert (event.lora_name, event.lora_id, event.session_id) == ("adapter", None, "session")
    assert event.extra_keys == (
        ("adapter", ("image", 3), "salt"),
        ("adapter", ("image", -1)),
        ("adapter", ("image", -5)),
    )
    (event,) = to_events([run(0, 1, group=1)], LABELS)
    assert isinstance(event, BlockStored)
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("sliding_window", 6)


def test_salt_is_in_the_first_block_alone_and_no_extras_are_none() -> None:
    salted = Labels(groups=LABELS.groups, namespaces={3: NamespaceLabel(salt="s")})
    first, later = to_events([run(0, 2, ns=3), run(4, 1, ns=3)], salted)
    assert isinstance(first, BlockStored)
    assert isinstance(later, BlockStored)
    assert first.extra_keys == (("s",), None)
    assert later.extra_keys is None


def test_foreign_keys_carry_their_namespace_and_need_no_tokens() -> None:
    (event,) = to_events([run(1, 2, ns=2)._replace(tokens=np.empty(0, np.int32))], LABELS)
    assert isinstance(event, BlockStored)
    assert (event.namespace, event.token_ids) == (b"n" * 32, ())
    assert len(event.block_hashes) == 2


def naive_extra_keys(
    start: int, blocks: int, size: int, namespace: NamespaceLabel, media: Sequence[MediaSpan]
) -> tuple[tuple[object, ...] | None, ...] | None:
    """Each block asks each item whether it overlaps."""
    entries = []
    for first in range(start, start + blocks * size, size):
        entry: list[object] = [namespace.lora_name] if namespace.lora_name else []
        for name, offset, length in media:
            if set(range(offset, offset + length)) & set(range(first, first + size)):
                entry.append((name, offset - first))
        if namespace.salt and not first:
            entry.append(namespace.salt)
        entries.append(tuple(entry) or None)
    return tuple(entries) if any(entries) else None


@given(
    gaps=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 11)), max_size=12),
    start=st.integers(0, 12),
    blocks=st.integers(1, 12),
    size=st.sampled_from([1, 2, 4]),
    namespace=st.builds(
        NamespaceLabel,
        lora_name=st.sampled_from([None, "adapter"]),
        salt=st.sampled_from(["", "s"]),
    ),
)
def test_each_block_names_the_media_in_it(
    gaps: list[tuple[int, int]], start: int, blocks: int, size: int, namespace: NamespaceLabel
) -> None:
    """Whatever the items' lengths, and wherever in the prompt the run begins."""
    media, at = [], 0
    for i, (gap, length) in enumerate(gaps):
        media.append(MediaSpan(f"item {i}", at + gap, length))
        at += gap + length
    request = RequestLabel(None, tuple(media))
    found = extra_keys(start * size, blocks, size, namespace, request)
    assert found == naive_extra_keys(start * size, blocks, size, namespace, media)


class Asked(MediaSpan):
    """A span that counts how often it is looked at."""

    looks = 0

    @property
    def offset_tokens(self) -> int:  # type: ignore[override]
        Asked.looks += 1
        return self[1]


def test_the_media_of_other_blocks_are_not_gone_through() -> None:
    items = 4096
    media = tuple(Asked(f"item {i}", 8 * i, 4) for i in range(items))
    request = RequestLabel(None, media)
    for start in (0, 8 * items // 2, 8 * (items - 64)):
        Asked.looks = 0
        found = extra_keys(start, 128, BLOCK, NamespaceLabel(), request)
        assert found
        assert sum(entry is not None for entry in found) == 64
        assert Asked.looks <= 5 * (128 + 64)
