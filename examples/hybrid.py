"""An engine with full attention, a window and a recurrent state, all in one arena. No torch.

Each layer's entry of a token is one number. The arena is one numpy buffer; it is too small for all
requests, so that pages move, states and attention take memory from each other, and younger requests
are preempted. Run it: python examples/hybrid.py
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from kvcache import FullAttention, Geometry, Manager, RecurrentState, SlidingWindow, Sparse

BLOCK, WINDOW, CHUNK, SLABS = 16, 40, 64, 9
SYSTEM = list(range(900, 948))  # every session begins with it
# Two groups with pages of 128 bytes (16 tokens, K and V of 4 bytes each), one with states of 1,024.
geometry = Geometry(
    (
        FullAttention(
            name="full", layers=1, kv_heads=1, head_dim=1, block_tokens=BLOCK, element_bytes=4
        ),
        SlidingWindow(
            name="window",
            layers=1,
            kv_heads=1,
            head_dim=1,
            block_tokens=BLOCK,
            element_bytes=4,
            window=WINDOW,
        ),
        RecurrentState(name="state", layers=1, state_bytes_per_layer=1024),
    )
)
FULL, SPAN, STATE = range(3)

# movable: pages that stay cached may be moved, and this engine does the copies.
# journal: there is no tier, so nobody reads `take_keyed`.
manager = Manager(geometry, slabs=SLABS, retention=Sparse(), movable=True, journal=False)
arena = np.zeros(SLABS * geometry.slab_bytes, np.uint8)
# Page p of class c begins at byte p * stride_bytes[c]: every class sees the whole arena as its pages.
classes = [arena.reshape(-1, stride) for stride in geometry.stride_bytes]
full, window, state = (
    classes[geometry.class_of_group[g]][:, : spec.page_bytes].view(np.int64)
    for g, spec in enumerate(geometry.groups)
)


@dataclass(slots=True)
class Request:
    """One turn of a session."""

    handle: int
    tokens: list[int]
    until: int
    """Tokens, prompt and output together."""


class Engine:
    """Every step computes a chunk of each request, strictly by age: whoever makes room is younger."""

    def __init__(self) -> None:
        self.requests: list[Request] = []  # the oldest first
        self.counts: Counter[str] = Counter()

    def add(self, prompt: list[int], new_tokens: int) -> None:
        """Open a request; the end of the system prompt is where others will go on from."""
        until = len(prompt) + new_tokens
        handle = manager.open(prompt, max_tokens=until, boundaries=[len(SYSTEM)])
        self.requests.append(Request(handle, list(prompt), until))

    def step(self) -> list[list[int]]:
        """One batch; returns the tokens of those that ended."""
        step = manager.begin_step()
        batch = []
        for request in self.requests:
            span = self.grant(request)
            if span is None:
                break  # nobody younger is served before
            if span[0] < span[1]:
                batch.append((request, *span))
        for size_class, source, target in manager.take_moves().tolist():  # before all else
            classes[size_class][target] = classes[size_class][source]
            self.counts["pages moved"] += 1
        sampled = [self.compute(request, start, end) for request, start, end in batch]
        manager.end_step(step)
        ended = []
        for (request, _, end), token in zip(batch, sampled, strict=True):
            if end < len(request.tokens):
                continue  # a part of the prompt is still to be computed
            request.tokens.append(token)
            if len(request.tokens) < request.until:
                manager.extend(request.handle, [token])
                continue
            manager.finish(request.handle)
            self.requests.remove(request)
            ended.append(request.tokens)
        return ended

    def grant(self, request: Request) -> tuple[int, int] | None:
        """Tokens [start, end) to compute, committed; empty: others write them; None: no space."""
        handle = request.handle
        while True:
            info = manager.info(handle)
            done = info.committed
            if info.state == "waiting":  # also after a preempt: what that left may be a hit
                hit = manager.lookup(handle)
                if hit.pending_tokens > hit.hit_tokens:
                    return 0, 0  # this step writes them: wait, instead of computing the same
                done = hit.hit_tokens
            grant = manager.allocate(handle, min(CHUNK, len(request.tokens) - done))
            if grant:
                manager.commit(handle, grant.end)
                self.counts["tokens hit"] += grant.hit_tokens
                return grant.start, grant.end  # may be less than what was looked up, or asked for
            why = manager.blockage(handle)
            self.counts[f"refused ({why})"] += 1
            if why == "preempt":
                holders = [r for r in self.requests if manager.info(r.handle).state != "waiting"]
                manager.preempt(holders[-1].handle)
                continue
            if why == "restart":
                manager.preempt(handle)
            return None

    def compute(self, request: Request, start: int, end: int) -> int:
        """Write the entries of [start, end), read what the last token attends to."""
        handle, tokens = request.handle, request.tokens
        blocks = manager.block_table(handle, FULL)
        span = manager.block_table(handle, SPAN)  # -1: fell out of the window
        plan = manager.state_plan(handle, STATE)
        stops = dict(zip(plan.positions.tolist(), plan.pages.tolist(), strict=True))
        now = int(state[plan.source, 0]) if plan.source >= 0 else 0
        for position in range(start, end):
            entry = tokens[position] * 31 % 1009
            full[blocks[position // BLOCK], position % BLOCK] = entry
            window[span[position // BLOCK], position % BLOCK] = entry
            now = (now * 7 + entry) % 10_007
            if position + 1 in stops:  # a snapshot, or the working state at the end
                state[stops[position + 1]] = now
        context = full[blocks].ravel()[:end]
        first = max(0, end - WINDOW) // BLOCK
        near = window[span[first:]].ravel()[: end - first * BLOCK][-WINDOW:]
        return int(context @ np.arange(1, end + 1) + 3 * near.sum() + now) % 1000


if __name__ == "__main__":
    for group, size_class in zip(geometry.groups, geometry.class_of_group, strict=True):
        stride, k = geometry.stride_bytes[size_class], geometry.pages_per_slab[size_class]
        print(f"{group.name}: pages of {group.page_bytes} bytes, {stride} apart, {k} to a slab")
    engine = Engine()
    sessions = [[*SYSTEM, *range(100 * s, 130 * s + 20)] for s in range(4)]
    for turn in range(3):
        for history in sessions:
            engine.add(history, 20)
        while engine.requests:
            for tokens in engine.step():
                number = tokens[len(SYSTEM)] // 100
                sessions[number] = [*tokens, 7, 8, 9]
                print(
                    f"turn {turn} session {number}: {len(tokens)} tokens, the last {tokens[-20:]}"
                )
            manager.check()
    print(", ".join(f"{what}: {n}" for what, n in sorted(engine.counts.items())))
