# ruff: noqa: INP001  (a script, no module)
"""Draws docs/retention.svg: what policies keep of one turn, and in which order that is evicted.

Nothing is drawn from memory: the turn is played on a block manager, then another request takes the
arena page by page, and the events tell which key went when. Run it: python docs/retention_figure.py
"""

from __future__ import annotations

from pathlib import Path

from kvcache import Dense, FullAttention, Geometry, Manager, RecurrentState, SlidingWindow, Sparse
from kvcache.core.events import BlockRemoved
from kvcache.core.retain import RetentionPolicy

BLOCK, WINDOW = 128, 512
SYSTEM, PROMPT, REPLY, CHUNK = 1300, 3500, 1000, 2048
LAST = PROMPT + REPLY
# Pages of one size: the order of eviction is then one list, without whole slabs that change hands.
GEOMETRY = Geometry(
    (
        FullAttention(name="full", layers=1, kv_heads=1, head_dim=8, block_tokens=BLOCK),
        SlidingWindow(
            name="window", layers=1, kv_heads=1, head_dim=8, block_tokens=BLOCK, window=WINDOW
        ),
        RecurrentState(name="state", layers=1, state_bytes_per_layer=4096),
    )
)
SLABS = 160
Kept = dict[tuple[int, int], int]
"""Rank of eviction of each group's block, or state, that ends at a position."""


def play(policy: RetentionPolicy) -> Kept:
    """One turn: a prompt in chunks, a reply token by token; then everything is evicted."""
    manager = Manager(GEOMETRY, slabs=SLABS, retention=policy, journal=False, events=True)
    turn = manager.open(range(PROMPT), max_tokens=LAST, boundaries=[SYSTEM])
    manager.lookup(turn)
    while (done := manager.info(turn).computed) < LAST:
        step = manager.begin_step()
        grant = manager.allocate(turn, min(CHUNK, manager.info(turn).tokens - done))
        if grant is None:
            raise RuntimeError(f"{SLABS} slabs are too few for the figure: raise SLABS")
        manager.commit(turn, grant.end)
        manager.end_step(step)
        if PROMPT <= grant.end < LAST:
            manager.extend(turn, [grant.end])
    keys = {
        (group, bytes(digest)): (index + 1) * BLOCK
        for group, digests in enumerate(manager.group_digests(turn))
        for index, digest in enumerate(digests)
    }
    manager.finish(turn)
    manager.take_events()
    kept: Kept = {}
    tokens = (SLABS - 7) * BLOCK
    filler = manager.open(range(10**6, 10**6 + tokens))
    for _ in range(tokens // BLOCK):
        step = manager.begin_step()
        grant = manager.allocate(filler, BLOCK)
        if grant is None:
            raise RuntimeError("a request alone always gets space")
        manager.commit(filler, grant.end)
        manager.end_step(step)
        for event in manager.take_events():
            if isinstance(event, BlockRemoved):
                for digest in event.block_hashes:
                    position = keys.get((event.group_idx or 0, bytes(digest)))
                    if position is not None:
                        kept[event.group_idx or 0, position] = len(kept)
    return kept


# ---- drawing ------------------------------------------------------------------------------------

CELL, ROW, LEFT, GAP = 16, 14, 92, 62


PALE, DARK = (206, 226, 248), (10, 42, 84)


def colour(rank: int, most: int) -> str:
    """From pale, what goes first, to dark."""
    share = rank / max(most - 1, 1)
    parts = (round(p + (d - p) * share) for p, d in zip(PALE, DARK, strict=True))
    return "#" + "".join(f"{part:02x}" for part in parts)


def text(x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False) -> str:
    """A line of text."""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{words}</text>'


def panel(top: int, title: str, kept: Kept) -> list[str]:
    """Three rows of blocks; a state is a circle at its position."""
    lines = [text(LEFT, top - 20, title, bold=True)]
    for mark, words in ((SYSTEM, "system prompt, declared"), (PROMPT, "prompt"), (LAST, "reply")):
        x = LEFT + mark / BLOCK * CELL
        lines.append(text(x - 4, top - 6, words, anchor="end"))
        lines.append(f'<path d="M{x:g} {top - 16} V{top + 3 * ROW + 4}" stroke="#b33"/>')
    for group, spec in enumerate(GEOMETRY.groups):
        y = top + group * ROW
        lines.append(text(LEFT - 8, y + 10, spec.name, anchor="end"))
        for end in range(BLOCK, LAST + BLOCK, BLOCK):
            x, rank = LEFT + (end // BLOCK - 1) * CELL, kept.get((group, end))
            fill = "none" if rank is None else colour(rank, len(kept))
            if spec.name != "state":
                lines.append(
                    f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{ROW - 2}" fill="{fill}"'
                    ' stroke="#ddd" stroke-width="0.5"/>'
                )
            elif rank is not None:
                lines.append(f'<circle cx="{x + CELL}" cy="{y + 6}" r="6" fill="{fill}"/>')
    return lines


def draw() -> str:
    """The figure, as text."""
    policies: tuple[tuple[str, RetentionPolicy], ...] = (
        ("Sparse(): what is known to be of use", Sparse()),
        ("Sparse(1024): every 1,024 tokens as well", Sparse(1024)),
        ("Dense(): every grid point", Dense()),
    )
    width = LEFT + (LAST // BLOCK + 2) * CELL
    height = len(policies) * (3 * ROW + GAP) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">',
        '<g font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, (title, policy) in enumerate(policies):
        lines += panel(number * (3 * ROW + GAP) + 44, title, play(policy))
    lines.append(
        text(LEFT, height - 12, "Pale goes first, dark last; empty: no key. One block: 128 tokens.")
    )
    return "\n".join([*lines, "</g></svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("retention.svg").write_text(draw())
