"""A foreign engine in a few lines: its own memory, its own "attention", kvcache for the rest.

KV of a token is one number; "attention" sums the context's numbers, each times its position. Pages
are plain numpy arrays: 8 on the device, 64 in host memory. One request runs at a time, so lookups
and loads stand outside of steps (hybrid.py has batches). Run it: python examples/embed.py
"""

from __future__ import annotations

import numpy as np

from kvcache import CapacityError, FullAttention, Geometry, Manager, Sparse, arena_regions
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.driver import Offload

BLOCK, PAGES = 16, 8
kv = FullAttention(name="kv", layers=1, kv_heads=1, head_dim=1, block_tokens=BLOCK, element_bytes=4)
geometry = Geometry((kv,))
memory = np.zeros((PAGES, BLOCK), np.int64)  # kv.page_bytes each: K and V, 4 bytes, 16 tokens
manager = Manager(geometry, slabs=PAGES, retention=Sparse())  # one kind of page: a slab each
regions = arena_regions(geometry, address=memory.ctypes.data, slabs=PAGES)
offload = Offload(manager, CpuConnector(geometry, pages=[64]), regions)


def compute(tokens: list[int], start: int, end: int, table: np.ndarray) -> int:
    """Write KV of [start, end), then read the whole context through the block table."""
    for position in range(start, end):
        memory[table[position // BLOCK], position % BLOCK] = tokens[position] * 31 % 1009
    context = memory[table].ravel()[:end]
    return int(context @ np.arange(1, end + 1) % 1000)


def admit(request: int, length: int) -> tuple[int, int]:
    """Give the request what device and tier have of it: tokens in all, tokens from the device."""
    for _ in range(10):  # a load that fails makes the next hit shorter
        hit = offload.lookup(request)  # None: the tier has to ask around
        grant = hit and manager.allocate(request, length - hit.hit_tokens)  # None: no space now
        if hit and grant and offload.start_load(request, grant) and not grant.load:
            return hit.hit_tokens, hit.device_tokens
        if not offload.drain(timeout_seconds=60.0):  # a real engine computes others meanwhile
            break
        if hit and (request, True) in offload.poll():
            return hit.hit_tokens, hit.device_tokens
    raise CapacityError("no pages, or no tier: a real engine waits, or preempts another request")


def generate(prompt: list[int], count: int) -> tuple[list[int], int, int]:
    """Greedy decoding of one request: its output, tokens hit in all, tokens from the device."""
    tokens = list(prompt)
    request = manager.open(tokens, max_tokens=len(tokens) + count)
    hit_tokens, device_tokens = admit(request, len(tokens))
    while len(tokens) < len(prompt) + count:
        step = manager.begin_step()
        grant = manager.allocate(request, len(tokens) - manager.info(request).committed)
        if grant is None:
            raise CapacityError("the arena is full: a real engine preempts another request")
        manager.commit(request, grant.end)
        token = compute(tokens, grant.start, grant.end, manager.block_table(request, group=0))
        manager.end_step(step)
        if grant.end == len(tokens):  # else a part of the prompt is still to be computed
            tokens.append(token)
            manager.extend(request, [token])
        offload.end_of_step()
    offload.forget(request)
    manager.finish(request)
    offload.drain(timeout_seconds=10.0)
    return tokens[len(prompt) :], hit_tokens, device_tokens


if __name__ == "__main__":
    sessions = [[100 * s + i for i in range(80)] for s in range(3)]
    for turn in range(3):
        for number, history in enumerate(sessions):
            output, hit, device = generate(history, 4)
            print(f"turn {turn} session {number}: {hit} of {len(history)} tokens cached,", end=" ")
            print(f"{hit - device} of them from host memory; output {output}")
            history += [*output, 7, 8, 9]
    offload.close()
