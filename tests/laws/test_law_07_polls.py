"""Law 7 for requests that wait: how often one is looked up, and beside which chunks of another, leaves no trace in what it keeps."""

from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases

from kvcache import UNLIMITED, FullAttention, Geometry, Manager, RecurrentState, Sparse
from kvcache.core.values import whole

GRID = 4


def hybrid(slabs: int = UNLIMITED) -> Manager:
    geometry = Geometry(
        (
            FullAttention(name="full", layers=1, kv_heads=1, head_dim=64, block_tokens=GRID),
            RecurrentState(name="state", layers=1, state_bytes_per_layer=2048),
        )
    )
    return Manager(geometry, slabs=slabs, retention=Sparse(), seed=0)


def compute(m: Manager, handle: int, upto: int, chunk: int, *, polled: int = 0) -> None:
    """From its hit on; `polled` is looked up in every step."""
    at = m.lookup(handle).hit_tokens
    while at < upto:
        step = m.begin_step()
        grant = m.allocate(handle, min(chunk, upto - at))
        assert grant is not None
        m.commit(handle, grant.end)
        if polled:
            m.lookup(polled)
        m.end_step(step)
        if polled:
            m.lookup(polled)
        at = grant.end


def states(m: Manager) -> set[int]:
    """Positions whose states got a key since the last call."""
    rows = m.take_keyed()
    return {whole(end, "end") for end in rows["end"][rows["group"] == 1]}


@cases.law(60)
@given(
    shared=st.integers(1, 60),
    rest=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    chunk=st.integers(1, 40),
)
def test_law_07_a_request_that_waits_keeps_one_junction(
    shared: int, rest: tuple[int, int], chunk: int
) -> None:
    prefix = list(range(shared))
    kept = []
    for polled in (True, False):
        m = hybrid()
        first = m.open([*prefix, *range(1000, 1000 + rest[0])])
        second = m.open([*prefix, *range(2000, 2000 + rest[1])])
        compute(m, first, shared + rest[0], chunk, polled=second if polled else 0)
        m.finish(first)
        states(m)
        compute(m, second, shared + rest[1], 16)
        m.finish(second)
        kept.append(states(m))
    assert kept[0] == kept[1]


def test_law_07_a_junction_follows_a_prefix_that_is_evicted_block_by_block() -> None:
    m = hybrid(slabs=35)
    text = list(range(100, 180))
    first = m.open([*text, 1])
    compute(m, first, 81, 81)
    m.finish(first)
    second = m.open([*text[:77], *range(5)])
    junctions = [m.lookup(second).junction]
    filler = m.open(list(range(1000, 1240)))
    compute(m, filler, 4, 4)
    for at in range(8, 240, GRID):
        step = m.begin_step()
        grant = m.allocate(filler, GRID)
        if grant is None:
            break
        m.commit(filler, at)
        m.end_step(step)
        junctions.append(m.lookup(second).junction)
    assert len(set(junctions)) > 5, junctions
    m.abort(filler)
    last = m.lookup(second)
    stops = m.stops(second, last.hit_tokens, 82)
    assert stops == sorted({last.junction, 80} - {0}), "one junction, and the replay boundary"


def test_law_07_a_junction_in_the_reply_of_a_resumed_request_is_kept() -> None:
    m = hybrid()
    text = list(range(24))
    first = m.open(text[:8], max_tokens=40)
    compute(m, first, 8, 8)
    m.extend(first, text[8:])
    m.preempt(first)
    other = m.open([*text, *range(100, 108)])
    compute(m, other, 32, 32)
    m.finish(other)
    hit = m.lookup(first)
    assert (hit.hit_tokens, hit.junction) == (8, 20)
    assert 20 in m.stops(first, 8, 24)
    compute(m, first, 24, 16)
    m.finish(first)
    third = m.open([*text[:22], 7, 7, 7])
    assert m.lookup(third).hit_tokens == 20


def test_law_07_what_an_earlier_run_noticed_is_kept_after_a_preempt() -> None:
    m = hybrid()
    text = list(range(60))
    first = m.open([*text[:12], *range(500, 530)])
    compute(m, first, 42, 64)
    m.finish(first)
    second = m.open([*text, 1, 2])
    assert m.lookup(second).junction == 12
    compute_blindly(m, second, 4)
    m.preempt(second)
    third = m.open([*text[:40], *range(600, 620)])
    compute_blindly(m, third, 60)
    m.finish(third)
    hit = m.lookup(second)
    assert (hit.hit_tokens, hit.junction) == (4, 40)
    assert {12, 40} <= set(m.stops(second, 4, 62))


def test_law_07_an_allocate_that_is_refused_hides_no_state_that_came_before_it() -> None:
    m = hybrid(slabs=32)
    compute(m, m.open(list(range(1000, 1100))), 100, 100)
    text = list(range(100, 140))
    first = m.open(text)
    compute(m, first, 40, 40)
    m.finish(first)
    waiting = m.open([*text[:30], 1, 2, 3, 4], max_tokens=200)
    assert m.lookup(waiting)[:4] == (0, 0, 0, 28)
    compute(m, m.open([*text[:30], 5, 6, 7, 8]), 34, 34)  # keeps the state of the junction
    assert m.allocate(waiting, 190) is None
    assert m.lookup(waiting)[:4] == (28, 28, 28, 0)


def compute_blindly(m: Manager, handle: int, upto: int) -> None:
    """In one chunk, without a lookup by its owner: junctions are not noticed."""
    step = m.begin_step()
    grant = m.allocate(handle, upto)
    assert grant
    m.commit(handle, grant.end)
    m.end_step(step)
