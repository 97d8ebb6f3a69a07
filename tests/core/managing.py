"""Small managers, and one request at a time through them: for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache import FullAttention, Geometry, Manager, RecurrentState, Sparse
from kvcache.core.records import UNLIMITED, Grant
from kvcache.core.retain import RetentionPolicy


def attention(name: str = "a", block_tokens: int = 4) -> FullAttention:
    return FullAttention(name=name, layers=1, kv_heads=1, head_dim=8, block_tokens=block_tokens)


FULL = Geometry((attention(),))
HYBRID = Geometry((attention(), RecurrentState(name="s", layers=1, state_bytes_per_layer=128)))
A, S = 0, 1
"""Groups of `HYBRID`."""


def full(slabs: int = UNLIMITED) -> Manager:
    return Manager(FULL, slabs=slabs, retention=Sparse())


def hybrid(retention: RetentionPolicy | None = None, *, slabs: int = UNLIMITED) -> Manager:
    return Manager(HYBRID, slabs=slabs, retention=retention or Sparse())


def counts(m: Manager) -> tuple[int, int, int]:
    """Free, cached and held pages of an arena whose pages are of one size."""
    stats = m.arena_stats()
    (of_class,) = stats.classes
    return stats.empty + of_class.free, of_class.cached, of_class.held


def held(m: Manager) -> int:
    return counts(m)[2]


def text(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


def compute(m: Manager, handle: int, upto: int) -> None:
    """One step; looks the request up where it has no pages yet."""
    if m.info(handle).state == "waiting":
        m.lookup(handle)
        grant = m.allocate(handle, 0)
        assert grant
        assert not grant.load
    if upto > m.info(handle).committed:
        step = m.begin_step()
        assert m.allocate(handle, upto - m.info(handle).committed)
        m.commit(handle, upto)
        m.end_step(step)
    m.check()


def run(m: Manager, tokens: Sequence[int], **options: object) -> None:
    handle = m.open(tokens, **options)  # type: ignore[arg-type]
    compute(m, handle, len(tokens))
    m.finish(handle)
    m.check()


def hit(m: Manager, tokens: Sequence[int], **options: object) -> int:
    handle = m.open(tokens, **options)  # type: ignore[arg-type]
    found = m.lookup(handle).hit_tokens
    m.abort(handle)
    return found


def granted(grant: Grant | None) -> Grant:
    assert grant is not None
    return grant
