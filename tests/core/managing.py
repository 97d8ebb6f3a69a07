"""Small managers, and one request at a time through them: for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from kvcache import FullAttention, Geometry, Manager, RecurrentState, Sparse
from kvcache.core.records import UNLIMITED, Grant
from kvcache.core.retain import RetentionPolicy

M = TypeVar("M", bound=Manager)


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


def picture(m: Manager, handles: Sequence[int]) -> list[Any]:
    """All that can be read of a manager and these requests."""
    seen: list[Any] = [m.stats(), m.arena_stats()]
    for g, rule in enumerate(m.geometry.rules):
        seen.append(m.group_stats(g))
        for h in handles:
            if rule.kind == "state":
                plan = m.state_plan(h, g)
                seen.append((plan.source, plan.positions.tolist(), plan.pages.tolist()))
            else:
                seen.append(m.block_table(h, g).tolist())
    for h in handles:
        seen += [m.info(h), m.blockage(h), m.digests(h).tobytes()]
    return seen


class Equal(Generic[M]):
    """Two managers that are asked for the same, in two ways."""

    def __init__(self, *managers: M) -> None:
        self.managers = managers
        self.handles: list[int] = []

    def both(self, call: Callable[[M], Any]) -> Any:
        """The same call on either; the answer must be the same."""
        answers = [call(m) for m in self.managers]
        assert answers[0] == answers[1]
        return answers[0]

    def compare(self) -> None:
        self.both(lambda m: picture(m, self.handles))
        self.both(lambda m: [repr(event) for event in m.take_events()])
        self.both(lambda m: m.take_keyed().tobytes())
        for m in self.managers:
            m.check()
