"""Constructed misses, each with its cause, the bounds of what was lost, and the evidence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from core.managing import FULL, HYBRID, compute, full, hybrid, text
from explain.explained import explain, look_up, only, regions, serve

from kvcache import Geometry, Manager, SlidingWindow, Sparse
from kvcache.core.errors import HandleError, MisuseError
from kvcache.core.explanation import (
    Evicted,
    KeyDiffers,
    KeyField,
    LastBlock,
    NoState,
    NotStored,
    Pending,
    TokensDiffer,
)
from kvcache.core.media import Media, PromptEmbeddings
from kvcache.core.namespaces import KEPT_NAMESPACES
from kvcache.core.records import UNLIMITED


def keys(*numbers: int) -> np.ndarray[Any, Any]:
    rows = np.zeros((len(numbers), 32), np.uint8)
    rows[:, 0] = numbers
    return rows


# ---- the last block --------------------------------------------------------------------------------


def test_a_cold_prompt_is_new_content_and_its_last_unit_is_the_last_block() -> None:
    m = full()
    found = explain(m, text(12))
    assert regions(found) == [("not_stored", 0, 8), ("last_block", 8, 12)]
    assert found.losses[0].evidence == NotStored("new", None, m.history_tokens)
    assert found.losses[1].evidence == LastBlock(4)


def test_a_resend_loses_the_last_block_alone() -> None:
    m = full()
    serve(m, text(13))
    found = explain(m, text(13))
    assert (found.hit_tokens, regions(found)) == (12, [("last_block", 12, 13)])


# ---- no state --------------------------------------------------------------------------------------


def test_without_a_state_full_attention_goes_on_alone() -> None:
    m = hybrid()
    serve(m, text(30))
    found = explain(m, [*text(20), *text(8, 500)])
    assert regions(found)[:2] == [("no_state", 0, 20), ("tokens_differ", 20, 24)]
    assert found.losses[0].evidence == NoState("s", 0, 20)
    assert "declare a boundary" in str(found)


def test_the_nearest_kept_state_is_where_the_hit_ends() -> None:
    m = hybrid(Sparse(8))
    serve(m, text(30))
    found = explain(m, [*text(22), *text(8, 500)])
    assert found.hit_tokens == 16
    assert only(found, "no_state")[1:4] == (16, 20, NoState("s", 16, 20))


def test_without_full_attention_what_another_request_computed_had_no_window() -> None:
    window = SlidingWindow(name="w", layers=1, kv_heads=1, head_dim=8, block_tokens=4, window=8)
    m = Manager(Geometry((window,)), slabs=UNLIMITED, retention=Sparse())
    other = serve(m, text(40))
    found = explain(m, [*text(20), *text(10, 500)])
    loss = only(found, "no_state")
    assert (loss.start, loss.end, loss.told) == (0, 20, "not_stored")
    assert isinstance(loss.evidence, NoState)
    assert loss.evidence.other is not None
    assert loss.evidence.other.handle == other


# ---- evicted -----------------------------------------------------------------------------------------


def test_an_eviction_is_told_with_who_took_the_pages_and_how_much_went_since() -> None:
    m = full(8)
    serve(m, text(20), session="morning")
    serve(m, text(12, 100), session="noon")
    taker = serve(m, text(16, 200), session="evening")
    found = explain(m, text(24))
    assert regions(found)[0][0] == "evicted"
    loss = found.losses[0]
    evidence = loss.evidence
    assert isinstance(evidence, Evicted)
    assert (evidence.group, evidence.position) == ("a", loss.start)
    assert evidence.by is not None
    assert (evidence.by.handle, evidence.by.session) == (taker, "evening")
    assert evidence.seconds_ago is not None
    assert 0 <= evidence.seconds_ago < 60
    assert evidence.pages_since == m.arena_stats().evictions
    assert evidence.bytes_since == evidence.pages_since * FULL.slab_bytes
    assert "for request" in str(found)


def test_pages_are_counted_from_the_eviction_on() -> None:
    m = full(8)
    serve(m, text(12))
    first = serve(m, text(28, 100))
    before = m.arena_stats().evictions
    assert before > 0
    serve(m, text(28, 200))
    serve(m, text(28, 300))
    evidence = only(explain(m, text(12)), "evicted").evidence
    assert isinstance(evidence, Evicted)
    assert evidence.by is not None
    assert evidence.by.handle in {first, first + (1 << 32)}
    assert evidence.pages_since == m.arena_stats().evictions - (
        0 if evidence.by.handle == first else before
    )


def test_an_evicted_state_is_told_with_its_position() -> None:
    m = hybrid(slabs=12)
    serve(m, text(16))
    while m.group_stats(1).evictions == 0:
        serve(m, text(16, 1000 * (1 + m.arena_stats().evictions)))
    found = explain(m, text(17))
    evidence = only(found, "evicted").evidence
    assert isinstance(evidence, Evicted)
    assert (evidence.group, evidence.position) == ("s", 16)
    assert evidence.remembered


def test_what_the_table_of_evicted_keys_forgot_is_known_from_the_request_that_computed_it() -> None:
    m = Manager(FULL, slabs=1024, retention=Sparse(), history_tokens=10**8)
    other = serve(m, text(33), session="old")
    for i in range(1, 120):
        handle = m.open(text(4000, 10_000 * i))
        step = m.begin_step()
        assert m.allocate(handle, 4000)
        m.commit(handle, 4000)
        m.end_step(step)
        m.finish(handle)
    found = explain(m, text(33))
    loss = found.losses[0]
    assert (loss.cause, loss.start, loss.end, loss.told) == ("evicted", 0, 32, "not_stored")
    evidence = loss.evidence
    assert isinstance(evidence, Evicted)
    assert not evidence.remembered
    assert evidence.other is not None
    assert (evidence.other.handle, evidence.other.session) == (other, "old")
    assert "more was evicted since" in str(found)


def test_a_number_of_a_namespace_that_has_another_root_now_has_nothing_evicted() -> None:
    m = Manager(FULL, slabs=4, retention=Sparse(), journal=False)
    handle = m.open_foreign(keys(1, 2), prompt_tokens=8, salt="first")
    compute(m, handle, 8)
    m.finish(handle)
    number = next(n for n, e in enumerate(m._namespaces.entries) if e.salt == "first")
    serve(m, text(16))
    assert m._namespace_use(number) == 0
    for i in range(2 * KEPT_NAMESPACES + 8):
        m.abort(m.open_foreign(keys(9), prompt_tokens=4, salt=str(i)))
    entries = m._namespaces.entries
    assert entries[number].salt != "first"
    again = m.open_foreign(keys(1, 2), prompt_tokens=9, salt=entries[number].salt)
    found = look_up(m, again)
    assert regions(found) == [("not_stored", 0, 8), ("last_block", 8, 9)]


# ---- pending -----------------------------------------------------------------------------------------


def test_what_an_open_step_writes_is_pending_with_its_writer() -> None:
    m = full()
    writer = m.open(text(20), session="twin")
    m.lookup(writer)
    step = m.begin_step()
    assert m.allocate(writer, 20)
    m.commit(writer, 20)
    handle = m.open(text(20))
    found = look_up(m, handle)
    assert regions(found) == [("pending", 0, 16), ("last_block", 16, 20)]
    evidence = found.losses[0].evidence
    assert isinstance(evidence, Pending)
    assert (evidence.step, evidence.load) == (step, 0)
    assert evidence.writer is not None
    assert (evidence.writer.handle, evidence.writer.session) == (writer, "twin")
    m.end_step(step)
    later = m.explain(handle).losses[0].evidence
    assert isinstance(later, Pending)
    assert later.step == 0
    assert "has ended the step since" in str(m.explain(handle))


def test_what_a_load_fills_is_pending_with_the_load() -> None:
    m = full()
    loader = m.open(text(20))
    assert m.lookup(loader, [np.ones(4, np.uint8)]).hit_tokens == 16
    grant = m.allocate(loader, 0)
    assert grant
    handle = m.open(text(20))
    found = look_up(m, handle)
    assert regions(found)[0] == ("pending", 0, 16)
    evidence = found.losses[0].evidence
    assert isinstance(evidence, Pending)
    assert evidence.load == grant.load > 0
    assert evidence.writer is not None
    assert evidence.writer.handle == loader


# ---- never stored ------------------------------------------------------------------------------------


def test_an_aborted_request_leaves_what_it_did_not_compute() -> None:
    m = full()
    other = m.open(text(24))
    compute(m, other, 8)
    m.abort(other)
    found = explain(m, text(24))
    assert (found.hit_tokens, regions(found)[0]) == (8, ("not_stored", 8, 20))
    evidence = found.losses[0].evidence
    assert isinstance(evidence, NotStored)
    assert evidence.why == "aborted"
    assert evidence.other is not None
    assert (evidence.other.handle, evidence.other.computed) == (other, 8)


def test_a_request_that_ended_early_computed_no_more() -> None:
    m = full()
    other = m.open(text(24))
    compute(m, other, 12)
    m.finish(other)
    evidence = only(explain(m, text(24)), "not_stored").evidence
    assert isinstance(evidence, NotStored)
    assert (evidence.why, evidence.other and evidence.other.computed) == ("ended", 12)


@pytest.mark.parametrize("computed", [0, 8])
def test_an_open_request_had_not_computed_it_when_this_one_was_looked_up(computed: int) -> None:
    """Also if it has, by the time that somebody asks."""
    m = full()
    other = m.open(text(24))
    if computed:
        compute(m, other, computed)
    handle = m.open(text(24))
    assert regions(look_up(m, handle))[0] == ("not_stored", computed, 20)
    compute(m, other, 24)
    m.finish(other)
    loss = m.explain(handle).losses[0]
    assert isinstance(loss.evidence, NotStored)
    assert (loss.start, loss.end, loss.evidence.why) == (computed, 20, "uncomputed")


def test_a_request_that_came_later_explains_nothing() -> None:
    m = full()
    serve(m, text(10))
    handle = m.open(text(24))
    before = look_up(m, handle)
    assert regions(before)[0] == ("not_stored", 8, 20)
    serve(m, [*text(14), *text(10, 500)])
    assert [(loss.cause, loss.evidence) for loss in m.explain(handle).losses] == [
        (loss.cause, loss.evidence) for loss in before.losses
    ]


def test_a_clear_drops_keys() -> None:
    m = full()
    serve(m, text(24), salt="x")
    m.clear(salt="x")
    found = explain(m, text(24), salt="x")
    evidence = only(found, "not_stored").evidence
    assert isinstance(evidence, NotStored)
    assert evidence.why == "cleared"


@pytest.mark.parametrize("evicted", [False, True])
def test_a_second_clear_changes_no_explanation(evicted: bool) -> None:
    m = full(8)
    while evicted and not m.arena_stats().evictions:
        serve(m, text(24), salt="others")
        serve(m, text(24), salt="more of them")
    serve(m, text(24))
    m.clear()
    handle = m.open(text(24))
    before = look_up(m, handle)
    evidence = only(before, "not_stored").evidence
    assert isinstance(evidence, NotStored)
    assert evidence.why == "cleared"
    m.clear(salt="")
    assert regions(m.explain(handle)) == regions(before)
    again = only(look_up(m, handle), "not_stored").evidence
    assert isinstance(again, NotStored)
    assert again.why == "cleared"


def test_a_root_out_of_use_finds_nothing() -> None:
    m = full()
    serve(m, text(24))
    handle = m.open(text(24))
    m.set_weights_epoch(1)
    evidence = only(look_up(m, handle), "not_stored").evidence
    assert isinstance(evidence, NotStored)
    assert evidence.why == "retired"


def test_without_a_history_only_open_requests_are_compared() -> None:
    m = Manager(FULL, slabs=UNLIMITED, retention=Sparse(), history_tokens=0)
    serve(m, text(24))
    found = explain(m, [*text(9), *text(12, 300)])
    assert regions(found)[0] == ("not_stored", 8, 20)
    assert found.losses[0].evidence == NotStored("new", None, 0)
    assert "history_tokens" in str(found)
    m.open(text(24))
    assert regions(explain(m, [*text(9), *text(12, 300)]))[0] == ("tokens_differ", 8, 20)


# ---- tokens differ -----------------------------------------------------------------------------------


def test_the_first_token_that_differs_is_shown_with_its_neighbours() -> None:
    m = full()
    other = serve(m, text(24), session="monday")
    found = explain(m, [*text(10), 77, 78, *text(16, 300)])
    assert regions(found) == [
        ("tokens_differ", 8, 24),
        ("last_block", 24, 28),
    ]
    evidence = found.losses[0].evidence
    assert isinstance(evidence, TokensDiffer)
    assert evidence.position == 10
    assert evidence.before == tuple(range(2, 10))
    assert evidence.own == (77, 78, *range(300, 306))
    assert evidence.others == tuple(range(10, 18))
    assert (evidence.other.handle, evidence.other.session) == (other, "monday")
    spelled = found.text(lambda tokens: "".join(chr(97 + t % 26) for t in tokens))
    assert "after 'cdefghij' comes" in spelled


def test_beyond_the_others_end_the_content_is_new() -> None:
    m = full()
    serve(m, text(18))
    found = explain(m, [*text(6), *text(30, 300)])
    assert regions(found)[:2] == [("tokens_differ", 4, 16), ("not_stored", 16, 32)]


def test_the_request_with_most_in_common_is_the_one() -> None:
    m = full()
    serve(m, text(24))
    near = serve(m, [*text(14), *text(20, 200)])
    serve(m, [*text(9), *text(20, 400)])
    evidence = only(explain(m, [*text(15), *text(20, 500)]), "tokens_differ").evidence
    assert isinstance(evidence, TokensDiffer)
    assert evidence.position == 15
    assert evidence.other.handle != near


@pytest.mark.parametrize("closed", [0, 1, 2, 3])
def test_of_several_with_as_much_in_common_the_newest_is_named(closed: int) -> None:
    """Of those that let go of what they had computed, if there are any."""
    m = full()
    same = [*text(14), *text(20, 200)]
    handles = [m.open(same) for _ in range(3)]
    for handle in handles:
        compute(m, handle, len(same))
    for handle in handles[:closed]:
        m.finish(handle)
    evidence = only(explain(m, [*text(15), *text(20, 500)]), "tokens_differ").evidence
    assert isinstance(evidence, TokensDiffer)
    assert evidence.other.handle == handles[closed - 1]


def test_one_request_is_named_for_one_difference() -> None:
    """An open one and a closed one that differ at the same place: both parts of the loss name one."""
    m = full()
    serve(m, [*text(16), *text(32, 200)])
    newer = m.open([*text(16), *text(32, 300)])
    compute(m, newer, 16)
    found = explain(m, [*text(16), *text(32, 500)])
    named = {loss.evidence.other.handle for loss in found.losses if hasattr(loss.evidence, "other")}
    assert len(named) == 1


def test_foreign_keys_tell_the_first_block_that_differs() -> None:
    m = full()
    handle = m.open_foreign(keys(1, 2, 3, 4), prompt_tokens=16, session="trace")
    compute(m, handle, 16)
    m.finish(handle)
    found = look_up(m, m.open_foreign(keys(1, 2, 8, 9), prompt_tokens=17))
    assert regions(found) == [("tokens_differ", 8, 16), ("last_block", 16, 17)]
    evidence = found.losses[0].evidence
    assert isinstance(evidence, TokensDiffer)
    assert (evidence.position, evidence.own, evidence.other.session) == (8, (), "trace")


def test_a_conversation_is_remembered_by_its_last_turn() -> None:
    m = Manager(FULL, slabs=UNLIMITED, retention=Sparse(), history_tokens=100)
    other = serve(m, text(24, 7000), session="another")
    conversation = text(20)
    for turn in range(1, 5):
        last = serve(m, conversation, session="chat")
        conversation = [*conversation, *text(16, 100 * turn)]
    found = look_up(m, m.open([*conversation[:30], 5, 6, 7, 8], session="third"))
    evidence = only(found, "tokens_differ").evidence
    assert isinstance(evidence, TokensDiffer)
    assert (evidence.other.handle, evidence.other.tokens) == (last, 68)
    found = look_up(m, m.open([*text(5, 7000), *text(9)]))
    assert only(found, "tokens_differ").evidence.other.handle == other  # type: ignore[union-attr]


# ---- keys differ -------------------------------------------------------------------------------------


def reload_adapter(m: Manager) -> dict[str, Any]:
    m.set_lora_version("poet", "v2")
    return {"lora": "poet"}


def train_on(m: Manager) -> dict[str, Any]:
    m.set_weights_epoch(7)
    return {"lora": "poet"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda _: {"lora": "poet", "salt": "b"}, KeyField("salt", "b", "")),
        (lambda _: {"lora": "clerk"}, KeyField("lora", "clerk", "poet")),
        (reload_adapter, KeyField("lora_version", "v2", "")),
        (train_on, KeyField("weights_epoch", "7", "0")),
    ],
    ids=["salt", "lora", "lora version", "weights"],
)
def test_equal_tokens_under_another_root_name_what_differs(
    change: Callable[[Manager], dict[str, Any]], field: KeyField
) -> None:
    m = full()
    other = serve(m, text(24), lora="poet")
    found = explain(m, [*text(18), *text(10, 300)], **change(m))
    assert regions(found)[:2] == [("key_differs", 0, 16), ("not_stored", 16, 24)]
    evidence = found.losses[0].evidence
    assert isinstance(evidence, KeyDiffers)
    assert (evidence.fields, evidence.position) == ((field,), -1)
    assert evidence.other.handle == other
    assert found.losses[0].told == "not_stored"


def test_foreign_keys_under_another_salt_are_other_keys() -> None:
    m = full()
    handle = m.open_foreign(keys(1, 2, 3), prompt_tokens=12, salt="a")
    compute(m, handle, 12)
    m.finish(handle)
    found = look_up(m, m.open_foreign(keys(1, 2, 3), prompt_tokens=13, salt="b"))
    assert regions(found)[0] == ("key_differs", 0, 12)


def test_a_salt_is_not_put_into_words() -> None:
    m = full()
    serve(m, text(24), salt="tenant-secret-a")
    found = explain(m, text(24), salt="tenant-secret-b")
    assert "the salt differ" in str(found)
    assert "tenant-secret" not in str(found)


@pytest.mark.parametrize("kind", ["media", "embeddings"])
def test_another_image_is_another_key_from_its_place_on(kind: str) -> None:
    def attached(value: int) -> dict[str, Any]:
        if kind == "media":
            image = Media(identifier=f"image {value}", offset_tokens=9, length_tokens=3)
            return {"media": [image]}
        rows = np.full((3, 2), value, np.float32)
        return {"embeddings": [PromptEmbeddings(offset_tokens=9, values=rows)]}

    m = full()
    other = serve(m, text(24), **attached(1))
    found = explain(m, text(24), **attached(2))
    assert (found.hit_tokens, regions(found)[0]) == (8, ("key_differs", 8, 20))
    evidence = found.losses[0].evidence
    assert isinstance(evidence, KeyDiffers)
    assert (evidence.fields[0].name, evidence.position, evidence.other.handle) == (
        "media",
        9,
        other,
    )


def test_other_tokens_from_an_image_on_are_other_tokens() -> None:
    image = Media(identifier="image", offset_tokens=9, length_tokens=3)
    m = full()
    other = serve(m, text(24), media=[image])
    found = explain(m, [*text(9), *range(900, 915)])
    assert regions(found)[0] == ("tokens_differ", 8, 20)
    evidence = found.losses[0].evidence
    assert isinstance(evidence, TokensDiffer)
    assert (evidence.position, evidence.own[0], evidence.other.handle) == (9, 900, other)


def test_another_image_explains_as_far_as_the_tokens_are_equal() -> None:
    def image(name: str) -> list[Media]:
        return [Media(identifier=name, offset_tokens=9, length_tokens=3)]

    m = full()
    serve(m, text(24), media=image("one"))
    assert regions(explain(m, text(24), media=image("two")))[0] == ("key_differs", 8, 20)
    m = full()
    serve(m, text(24), media=image("one"))
    found = explain(m, [*text(14), *range(900, 910)], media=image("two"))
    assert regions(found)[:2] == [("key_differs", 8, 16), ("tokens_differ", 16, 20)]
    evidence = found.losses[1].evidence
    assert isinstance(evidence, TokensDiffer)
    assert (evidence.position, evidence.own[0]) == (14, 900)


# ---- elsewhere ---------------------------------------------------------------------------------------


def test_what_another_place_holds_comes_first() -> None:
    m = hybrid()
    serve(m, text(30))
    handle = m.open([*text(20), *text(12, 500)])
    held = [np.array([1, 1, 1, 1, 1, 1], np.uint8), np.array([0, 0, 0, 0, 0, 1], np.uint8)]
    found = look_up(m, handle, elsewhere=held)
    assert regions(found)[:2] == [("elsewhere", 0, 20), ("elsewhere", 20, 24)]
    assert [loss.told for loss in found.losses[:2]] == ["no_state", "not_stored"]
    held[1][:] = 0
    assert regions(m.explain(handle, elsewhere=held)) == regions(m.explain(handle))


# ---- when it may be asked ----------------------------------------------------------------------------


def test_a_request_that_runs_is_explained_as_it_was_looked_up() -> None:
    m = full(16)
    serve(m, text(24))
    handle = m.open([*text(10), *text(20, 300)])
    before = look_up(m, handle)
    compute(m, handle, 30)
    after = m.explain(handle)
    assert regions(after) == regions(before)
    evidence = after.losses[0].evidence
    assert isinstance(evidence, TokensDiffer)
    assert evidence.position == 10


def test_before_a_lookup_and_after_the_end_there_is_nothing_to_explain() -> None:
    m = Manager(HYBRID, slabs=UNLIMITED, retention=Sparse())
    handle = m.open(text(9))
    with pytest.raises(MisuseError, match="not looked up yet"):
        m.explain(handle)
    m.abort(handle)
    with pytest.raises(HandleError):
        m.explain(handle)
