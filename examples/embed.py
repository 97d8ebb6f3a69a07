"""A foreign engine in a few lines: its own memory, its own "attention", kvcache for the rest.

KV of a token is one number; "attention" sums the context's numbers, each times its position. Pages
are plain numpy arrays: 8 on the device, 64 in host memory. Run it: python examples/embed.py
"""

from __future__ import annotations

import numpy as np

from kvcache import FullAttention, Geometry, Manager, Sparse
from kvcache.connectors.base import PageRegion
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.driver import Offload

BLOCK, PAGES = 16, 8
spec = FullAttention(
    name="kv", layers=1, kv_heads=1, head_dim=1, block_tokens=BLOCK, element_bytes=4
)
geometry = Geometry((spec,))
memory = np.zeros((PAGES, BLOCK), np.int64)  # spec.page_bytes each: K and V, 4 bytes, 16 tokens
manager = Manager(geometry, pages=[PAGES], retention=Sparse())
offload = Offload(
    manager,
    CpuConnector(geometry, pages=[64]),
    [PageRegion(memory.ctypes.data, spec.page_bytes, PAGES)],
)


def compute(tokens: list[int], start: int, end: int, table: np.ndarray) -> int:
    """Write KV of [start, end), then read the whole context through the block table."""
    for position in range(start, end):
        memory[table[position // BLOCK], position % BLOCK] = tokens[position] * 31 % 1009
    context = memory[table].ravel()[:end]
    return int(context @ np.arange(1, end + 1) % 1000)


def generate(prompt: list[int], count: int) -> tuple[list[int], int, int]:
    """Greedy decoding of one request: its output, tokens hit in all, tokens from the device."""
    tokens = list(prompt)
    request = manager.open(tokens, max_tokens=len(tokens) + count)
    while True:  # until the hit is on the device; a load that fails makes the next one shorter
        hit = offload.lookup(request)
        assert hit is not None  # None: a tier that has to ask around; look up again next step
        grant = manager.allocate(request, len(tokens) - hit.hit_tokens)
        assert grant is not None  # None: no space now; wait, or preempt another request
        started = offload.start_load(request, grant)
        assert offload.drain(timeout_seconds=60.0)  # a real engine computes others meanwhile
        if started and (not grant.load or (request, True) in offload.poll()):
            break
    while len(tokens) < len(prompt) + count:
        start = manager.info(request).committed
        grant = manager.allocate(request, len(tokens) - start)
        assert grant is not None
        step = manager.begin_step()
        manager.commit(request, grant.end)
        tokens.append(compute(tokens, start, grant.end, manager.block_table(request, 0)))
        manager.end_step(step)
        manager.extend(request, tokens[-1:])
        offload.end_of_step()
    offload.release(request)
    manager.finish(request)
    offload.drain(timeout_seconds=10.0)
    return tokens[len(prompt) :], hit.hit_tokens, hit.device_tokens


if __name__ == "__main__":
    sessions = [[100 * s + i for i in range(80)] for s in range(3)]
    for turn in range(3):
        for number, history in enumerate(sessions):
            output, hit, device = generate(history, 4)
            print(f"turn {turn} session {number}: {hit} of {len(history)} tokens cached,", end=" ")
            print(f"{hit - device} of them from host memory; output {output}")
            history += [*output, 7, 8, 9]
    offload.close()
