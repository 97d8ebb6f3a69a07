"""What a caller may ask for, pile up or mix up, and what then happens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core.managing import FULL, attention, compute, granted, hit, run, text

from kvcache import Geometry, Manager, Media, MisuseError, RecurrentState, RingBuffer, Sparse
from kvcache.core.errors import ConfigError
from kvcache.core.records import UNLIMITED

TWINS = Geometry((attention("a"), attention("b")))
"""Two groups of one size class."""


def test_a_page_is_unpinned_through_the_group_that_it_was_pinned_for() -> None:
    m = Manager(TWINS, slabs=UNLIMITED, retention=Sparse())
    run(m, text(8))
    keyed = m.take_keyed()
    of_a = keyed[keyed["group"] == 0]
    m.pin(of_a)
    with pytest.raises(MisuseError, match=r"page .* of group 1 is pinned 0 times"):
        m.unpin(1, of_a["page"])
    m.check()
    m.unpin(0, of_a["page"])
    m.check()


@pytest.mark.parametrize(
    "group",
    [
        replace(attention("draft"), lookahead_tokens=1),
        RingBuffer(name="ring", layers=1, ring_tokens=8, token_bytes=8),
    ],
)
def test_without_a_group_that_has_a_say_nothing_is_a_hit(group: object) -> None:
    m = Manager(Geometry((group,)), slabs=UNLIMITED, retention=Sparse())  # type: ignore[arg-type]
    run(m, text(40))
    assert hit(m, text(40)) == 0
    handle = m.open(text(40))
    present = [np.ones(40, np.uint8)]
    assert m.lookup(handle, present).hit_tokens == 0


def test_guesses_of_one_grant_are_bounded() -> None:
    m = Manager(FULL, slabs=UNLIMITED, retention=Sparse())
    handle = m.open(text(4), max_tokens=5000)
    m.lookup(handle)
    with pytest.raises(ConfigError, match="1025 drafts: at most 1024"):
        m.allocate(handle, 4, drafts=1025)
    granted(m.allocate(handle, 4, drafts=1024))


def test_moves_that_nobody_takes_stop_the_next_grant() -> None:
    # Many blocks fit into a slab, one state: each wants the other's slabs again and again.
    geometry = Geometry(
        (attention(), RecurrentState(name="s", layers=1, state_bytes_per_layer=4096))
    )
    assert max(geometry.pages_per_slab) > 1
    m = Manager(geometry, slabs=12, retention=Sparse(), movable=True)

    def churn() -> None:
        for n in range(4000):
            run(m, text(4 + 4 * (n * 7 % 13), 100 * n))

    with pytest.raises(MisuseError, match="moves of pages wait: take them"):
        churn()
    m.take_moves()
    run(m, text(8))


def test_a_request_with_thousands_of_declared_boundaries_ends_as_one_with_few() -> None:
    geometry = Geometry(
        (attention(), RecurrentState(name="s", layers=1, state_bytes_per_layer=128))
    )
    m = Manager(geometry, slabs=UNLIMITED, retention=Sparse())
    marks = list(range(4, 40_000, 4))
    handle = m.open(text(40_000), boundaries=marks)
    compute(m, handle, 100)
    m.finish(handle)
    m.check()
    assert hit(m, text(100)) == 96
    assert hit(m, text(53)) == 52


def test_an_image_without_a_name_would_be_every_image() -> None:
    with pytest.raises(ConfigError, match=r"Media\.identifier is empty"):
        Media(identifier="", offset_tokens=0, length_tokens=4)


def test_a_commit_while_a_load_is_open_names_the_load() -> None:
    m = Manager(FULL, slabs=UNLIMITED, retention=Sparse())
    handle = m.open(text(9))
    m.lookup(handle, [np.ones(2, np.uint8)])
    grant = granted(m.allocate(handle, 0))
    m.begin_step()
    with pytest.raises(MisuseError, match=f"waits for load {grant.load}: end it first"):
        m.commit(handle, 9)
