"""Who shares a prefix with whom, as history goes on: what others do makes no difference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st
from laws import cases
from laws.counting import OTHER, count, seen

from kvcache import Geometry
from kvcache.core.hashing import Fingerprint, hash_chain, root_digest
from kvcache.core.manager import Manager
from kvcache.core.media import PromptEmbeddings
from kvcache.core.namespaces import KEPT_NAMESPACES
from kvcache.core.records import UNLIMITED
from kvcache.retention import Dense, Sparse


class Who(NamedTuple):
    """What a request says of itself beside its tokens."""

    salt: str
    lora: str
    foreign: bool


EVERYBODY = [Who(*who) for who in itertools.product(["", "a", "b"], ["", "x"], [False, True])]


def manager_of(geometry: Geometry, slabs: int = UNLIMITED, **options: object) -> Manager:
    return Manager(geometry, slabs=slabs, retention=Sparse(), **options)  # type: ignore[arg-type]


def open_as(m: Manager, who: Who, text: Sequence[int]) -> int:
    """Foreign keys are the digests that native requests without salt and adapter have."""
    if not who.foreign:
        return m.open(text, salt=who.salt, lora=who.lora)
    unit = m.geometry.hash_unit_tokens
    digests = hash_chain(
        root_digest(Fingerprint(), hash_unit_tokens=unit), np.array(text, np.int32), unit
    )
    return m.open_foreign(digests, prompt_tokens=len(text), salt=who.salt, lora=who.lora)


def compute(m: Manager, handle: int, upto: int) -> None:
    """Steps up to so many tokens; a waiting request starts from its hit."""
    count("compute")
    if m.info(handle).state == "waiting":
        m.lookup(handle)
        assert m.allocate(handle, 0) is not None
    while (at := m.info(handle).committed) < upto:
        step = m.begin_step()
        grant = m.allocate(handle, upto - at)
        assert grant is not None
        m.commit(handle, grant.end)
        m.end_step(step)


def serve(m: Manager, text: Sequence[int], **options: object) -> None:
    handle = m.open(text, **options)  # type: ignore[arg-type]
    compute(m, handle, len(text))
    m.finish(handle)


def look(m: Manager, handle: int) -> int:
    found = m.lookup(handle).hit_tokens
    m.abort(handle)
    return found


def hit(m: Manager, text: Sequence[int], **options: object) -> int:
    return look(m, m.open(text, **options))  # type: ignore[arg-type]


def hit_most(m: Manager, tokens: int) -> int:
    """What is found of a prompt where everything is there."""
    return (tokens - 1) // m.geometry.grid_tokens * m.geometry.grid_tokens


# ---- salt, adapter, foreign keys, clearing


class Shared:
    """One manager for everybody, and one for each of them alone."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.together = manager_of(geometry)
        self.alone = {who: manager_of(geometry) for who in EVERYBODY}
        self.running: list[tuple[Who, int, int | None, int]] = []
        """Who, handle in `together`, handle in `alone` (None: cleared since), tokens."""

    def start(self, who: Who, text: Sequence[int]) -> None:
        both = (self.together, self.alone[who])
        handles = [open_as(m, who, text) for m in both]
        for m, handle in zip(both, handles, strict=True):
            compute(m, handle, max(m.lookup(handle).hit_tokens, len(text) // 2))
        self.running.append((who, handles[0], handles[1], len(text)))

    def end(self) -> None:
        who, handle, alone, tokens = self.running.pop(0)
        compute(self.together, handle, tokens)
        self.together.finish(handle)
        if alone is not None:
            compute(self.alone[who], alone, tokens)
            self.alone[who].finish(alone)

    def serve(self, who: Who, text: Sequence[int]) -> None:
        self.start(who, text)
        self.running.insert(0, self.running.pop())
        self.end()

    def clear(self, salt: str | None, lora: str | None) -> None:
        self.together.clear(salt=salt, lora=lora)
        self.forget(salt, lora)

    def forget(self, salt: str | None, lora: str | None) -> None:
        """Those are as new. What they have running leaves no keys."""
        gone = {w for w in EVERYBODY if salt in (None, w.salt) and lora in (None, w.lora)}
        self.alone.update({who: manager_of(self.geometry) for who in gone})
        self.running = [
            (who, handle, None if who in gone else alone, tokens)
            for who, handle, alone, tokens in self.running
        ]

    def compare(self, texts: Sequence[Sequence[int]]) -> None:
        self.together.check()
        for who in EVERYBODY:
            for text in texts:
                found = look(self.together, open_as(self.together, who, text))
                alone = self.alone[who]
                assert found == look(alone, open_as(alone, who, text)), f"{who} is not alone"
                seen["hit", OTHER] += found > 0
        for g in range(len(self.geometry.groups)):
            alone_keys = sum(m.group_stats(g).keyed for m in self.alone.values())
            assert self.together.group_stats(g).keyed == alone_keys


whos = st.sampled_from(EVERYBODY)
text = cases.texts(30, least=5)
deeds = st.one_of(
    st.tuples(st.just("serve"), whos, text),
    st.tuples(st.just("start"), whos, text),
    st.just(("end",)),
    st.tuples(st.just("clear"), st.sampled_from([None, "", "a"]), st.sampled_from([None, "", "x"])),
    st.just(("version",)),
    st.just(("epoch",)),
)


@cases.law(80)
@given(name=cases.names, history=st.lists(deeds, min_size=2, max_size=8))
def test_law_17_what_others_do_under_another_salt_adapter_or_kind_of_key_makes_no_difference(
    name: str, history: list[tuple]
) -> None:
    shared = Shared(cases.GEOMETRIES[name])
    texts = [deed[2] for deed in history if deed[0] in ("serve", "start")]
    for i, (what, *arguments) in enumerate(history):
        if what == "version":
            shared.together.set_lora_version("x", f"v{i}")
            shared.forget(None, "x")
        elif what == "epoch":
            shared.together.set_weights_epoch(i + 1)  # 0 is the present one
            shared.forget(None, None)
        elif what != "end" or shared.running:
            getattr(shared, what)(*arguments)
        shared.compare(texts)
    while shared.running:
        shared.end()
    shared.compare(texts)


@cases.law(40)
@given(name=cases.names, prompt=cases.texts(40, least=14))
def test_law_17_cleared_while_running_a_request_leaves_keys_again_once_it_starts_anew(
    name: str, prompt: list[int]
) -> None:
    m = manager_of(cases.GEOMETRIES[name])
    handles = [m.open(prompt, salt=salt) for salt in ("a", "b")]
    for handle in handles:
        compute(m, handle, len(prompt) // 2)
    m.clear(salt="a")
    for handle in handles:
        compute(m, handle, len(prompt))
        m.preempt(handle)
    whole = hit_most(m, len(prompt))
    assert hit(m, prompt, salt="a") == 0
    assert hit(m, prompt, salt="b") == whole
    for handle in handles:
        compute(m, handle, len(prompt))
        m.finish(handle)
    assert hit(m, prompt, salt="a") == whole


@pytest.mark.parametrize("what", ["weights", "adapter"])
@pytest.mark.parametrize("name", ["full", "hybrid", "gpt-oss"])
def test_law_17_what_was_opened_under_old_weights_finds_and_leaves_no_keys_in_tiers_either(
    name: str, what: str
) -> None:
    """A tier may hold the old weights' keys still, and serve others who have these weights."""
    m = manager_of(cases.GEOMETRIES[name])
    prompt = list(range(40))
    waiting, running, base = (m.open(prompt, lora=lora) for lora in ("x", "x", ""))
    compute(m, running, 20)
    m.take_keyed()
    if what == "weights":
        m.set_weights_epoch(1)
    else:
        m.set_lora_version("x", "2")
    everything = [np.ones(len(rows), np.uint8) for rows in m.group_digests(waiting)]
    compute(m, running, 40)
    m.preempt(running)
    for handle in (waiting, running):
        assert m.lookup(handle, everything).hit_tokens == 0
        compute(m, handle, 40)
        m.finish(handle)
    assert len(m.take_keyed()) == 0
    assert m.lookup(base, everything).hit_tokens == (0 if what == "weights" else hit_most(m, 40))
    assert sum(m.group_stats(g).keyed for g in range(len(m.geometry.groups))) == 0


# ---- embeddings


@pytest.mark.parametrize("name", cases.GEOMETRIES)
def test_law_17_prompt_embeddings_share_what_is_equal_in_their_heads(name: str) -> None:
    geometry = cases.GEOMETRIES[name]
    m = Manager(geometry, slabs=UNLIMITED, retention=Dense())
    prompt, values = [0] * 40, np.arange(60, dtype=np.float32).reshape(30, 2)

    def found(values: np.ndarray, offset: int = 5) -> int:
        return hit(m, prompt, embeddings=[PromptEmbeddings(offset_tokens=offset, values=values)])

    def floor(tokens: int) -> int:
        unit, grid = geometry.hash_unit_tokens, geometry.grid_tokens
        return tokens // unit * unit // grid * grid

    serve(m, prompt, embeddings=[PromptEmbeddings(offset_tokens=5, values=values)])
    assert found(values) == found(values.copy(order="F")) == floor(39)
    changed = values.copy()
    changed[20, 1] += 1
    assert found(changed) == floor(25)
    assert found(values[:20]) == floor(25)
    for other in (values.view(np.int32), values.astype(np.float64), values.reshape(15, 4)):
        assert found(other) == floor(5)
    assert found(values, offset=6) == floor(5)
    assert hit(m, prompt) == floor(5)


# ---- numbers of namespaces


def test_law_17_thousands_of_salts_take_no_more_and_more_room() -> None:
    """The pool holds keys of a few at a time; their numbers are used again, their keys are not."""
    geometry = cases.GEOMETRIES["hybrid"]
    m = manager_of(geometry, slabs=geometry.slabs_needed(20) + 8, events=True)
    prompt = list(range(20))
    waiting = m.open(prompt, salt="waiting")
    for i in range(3 * KEPT_NAMESPACES):
        serve(m, prompt, salt=f"{i}")
        m.take_events()
        if i % 10 == 0:
            assert hit(m, prompt, salt=f"{i}") > 0
            assert hit(m, prompt, salt=f"{i - 200}") == 0
    assert len(m.namespaces) <= KEPT_NAMESPACES
    assert m.lookup(waiting).hit_tokens == 0
    compute(m, waiting, 20)
    m.finish(waiting)
    assert hit(m, prompt, salt="waiting") > 0
    m.check()


def test_law_17_numbers_in_use_are_not_given_away() -> None:
    """Where all of them are in use there are more: open requests of so many salts."""
    m = manager_of(cases.GEOMETRIES["full"])
    prompt = list(range(9))
    opened = [m.open(prompt, salt=f"{i}") for i in range(KEPT_NAMESPACES + 50)]
    assert len(m.namespaces) == len(opened)
    for handle in opened[::10]:
        compute(m, handle, 9)
        m.finish(handle)
    for i in range(0, len(opened), 10):
        assert hit(m, prompt, salt=f"{i}") == 8
        assert hit(m, prompt, salt=f"{i + 1}") == 0


@pytest.mark.parametrize("change", ["weights", "adapter"])
def test_law_17_a_hit_of_before_the_change_is_not_loaded(change: str) -> None:
    """Looked up, then retired, then granted: the device has no key, so nothing else tells."""
    geometry = cases.GEOMETRIES["full"]
    manager = Manager(geometry, slabs=UNLIMITED, retention=Sparse())
    handle = manager.open(list(range(13)), lora="a")
    present = [np.ones(13 // b, np.uint8) for b in geometry.block_tokens]
    assert manager.lookup(handle, present).hit_tokens == 12
    if change == "weights":
        manager.set_weights_epoch(1)
    else:
        manager.set_lora_version("a", "2")
    grant = manager.allocate(handle, 13)
    assert grant
    assert (grant.hit_tokens, grant.load) == (0, 0)
