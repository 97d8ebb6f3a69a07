from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import given, strategies as st
from laws import cases
from laws.drive import run
from laws.engine import Engine

from kvcache.core.hashing import Fingerprint
from kvcache.core.manager import Manager
from kvcache.core.media import Media, PromptEmbeddings
from kvcache.core.records import UNLIMITED

PROMPT = [1] * 37
"""The same tokens for everyone: only what stands beside them differs."""
FIRST_OF_MEDIA, MEDIA_TOKENS = 14, 5


@dataclass(frozen=True)
class Who:
    """What a request has beside its tokens."""

    salt: str = ""
    lora: str = ""
    image: str = ""
    at: int = FIRST_OF_MEDIA
    embedding: int = 0
    foreign: bool = False
    model: dict[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"salt": self.salt, "lora": self.lora}
        if self.image:
            item = Media(identifier=self.image, offset_tokens=self.at, length_tokens=MEDIA_TOKENS)
            options["media"] = [item]
        if self.embedding:
            values = np.full((MEDIA_TOKENS, 2), self.embedding, np.float32)
            item_values = PromptEmbeddings(offset_tokens=self.at, values=values)
            options["embeddings"] = [item_values]
        return options

    def shared(self, other: Who) -> int:
        """Tokens from the start on whose keys may be equal."""
        apart = replace(self, image="", embedding=0, at=0)
        if apart != replace(other, image="", embedding=0, at=0):
            return 0
        beside = [(w.image, w.embedding, w.at) for w in (self, other)]
        if beside[0] == beside[1]:
            return len(PROMPT)
        return min((w.at for w in (self, other) if w.image or w.embedding), default=len(PROMPT))


def compute(manager: Manager, who: Who) -> int:
    """Computes the prompt; returns its hit."""
    if who.foreign:
        unit = manager.geometry.hash_unit_tokens
        ends = range(unit, len(PROMPT) + 1, unit)
        keys = np.array([[end] * 32 for end in ends], np.uint8)
        options = {"salt": who.salt, "lora": who.lora}
        handle = manager.open_foreign(keys, prompt_tokens=len(PROMPT), **options)
    else:
        handle = manager.open(PROMPT, **who.options())
    hit = manager.lookup(handle).hit_tokens
    step = manager.begin_step()
    grant = manager.allocate(handle, len(PROMPT) - hit)
    assert grant
    manager.commit(handle, grant.end)
    manager.end_step(step)
    manager.finish(handle)
    manager.check()
    return hit


names = st.sampled_from(["", "a", "b"])
natives = st.builds(
    Who,
    salt=names,
    lora=names,
    image=st.sampled_from(["", "", "cat", "dog"]),
    at=st.integers(0, len(PROMPT) - MEDIA_TOKENS),
)
embedded = st.builds(
    Who, embedding=st.integers(1, 2), at=st.integers(0, len(PROMPT) - MEDIA_TOKENS)
)
foreigners = st.builds(Who, salt=names, lora=names, foreign=st.just(value=True))
people = st.one_of(natives, natives, embedded, foreigners)


@cases.law(150)
@given(name=cases.names, everyone=st.lists(people, min_size=2, max_size=8))
def test_law_17_a_hit_reaches_to_where_two_requests_begin_to_differ_and_no_further(
    name: str, everyone: list[Who]
) -> None:
    """Salt, adapter, kind of keys from the start; media and embeddings from where they stand."""
    geometry = cases.GEOMETRIES[name]
    manager = Manager(geometry, slabs=UNLIMITED, retention=cases.policy_of(geometry, None))
    grid = geometry.grid_tokens
    limit = (len(PROMPT) - 1) // grid * grid
    seen: list[Who] = []
    for who in everyone:
        shared = max((who.shared(other) for other in seen), default=0)
        unit = geometry.hash_unit_tokens
        expected = min(limit, shared // unit * unit // grid * grid)
        assert compute(manager, who) == expected
        seen.append(who)


@cases.law(40)
@given(name=cases.names, interval=cases.intervals)
def test_law_17_a_new_version_of_an_adapter_and_new_weights_share_nothing_with_the_old(
    name: str, interval: int | None
) -> None:
    geometry = cases.GEOMETRIES[name]
    policy = cases.policy_of(geometry, interval)
    manager = Manager(geometry, slabs=UNLIMITED, retention=policy)
    grid = geometry.grid_tokens
    again = (len(PROMPT) - 1) // grid * grid
    base, tuned = Who(), Who(lora="a")
    for who in (base, tuned):
        assert [compute(manager, who), compute(manager, who)] == [0, again]
    manager.set_lora_version("a", "2")
    assert [compute(manager, tuned), compute(manager, tuned)] == [0, again]
    assert compute(manager, base) == again
    manager.set_weights_epoch(7)
    for who in (base, tuned):
        assert [compute(manager, who), compute(manager, who)] == [0, again]


def test_law_17_each_field_of_the_fingerprint_gives_other_keys() -> None:
    geometry = cases.GEOMETRIES["hybrid"]
    fingerprints = [
        Fingerprint(),
        Fingerprint(model="m"),
        Fingerprint(weights_epoch=1),
        Fingerprint(kv_dtype="fp8"),
        Fingerprint(position_scheme="yarn"),
        Fingerprint(secret=b"x"),
    ]
    digests: set[bytes] = set()
    for fingerprint in fingerprints:
        manager = Manager(
            geometry,
            slabs=UNLIMITED,
            retention=cases.policy_of(geometry, None),
            fingerprint=fingerprint,
        )
        digests.update(bytes(row) for row in manager.digests(manager.open(PROMPT)))
    assert len(digests) == len(fingerprints) * (len(PROMPT) // geometry.hash_unit_tokens)


@cases.law(60)
@given(
    name=st.sampled_from(["two sizes", "kimi", "gemma", "deepseek", "hybrid"]),
    group=st.integers(0, 4),
    prompt=cases.texts(40, least=17),
)
def test_law_17_a_key_of_one_group_is_none_of_another(
    name: str, group: int, prompt: list[int]
) -> None:
    """Equal digests in all groups: what a tier has for one of them serves none of the others."""
    geometry = cases.GEOMETRIES[name]
    source = Engine(geometry, cases.policy_of(geometry, None))
    run(source, prompt)
    group %= len(geometry.groups)
    tier = source.resident()
    needed = source.oracle.needs(group, source.oracle.limit(len(prompt)))
    engine = Engine(geometry, cases.policy_of(geometry, None))
    request = engine.open(prompt)
    assert request
    tier[group] = set()
    walk = engine.walk(request, tier)
    assert engine.lookup(request, tier).hit_tokens == walk.hit
    if needed:
        assert walk.hit < source.oracle.limit(len(prompt))
