"""Our block manager and hashing under a stopwatch: one measurement for each question.

    python -m kvcache.bench.manager_work

A question is one JSON object a line, `{"do": NAME, ...}`, and so is its answer; the end of stdin ends
the program. The names are the public methods of `Work`, their fields the arguments;
`bench/peers/vllm_manager.py` has the same ones for vLLM's classes.

Tokens come from a file of little-endian int32; a prompt is `count` tokens of it from `first` on.
Seconds are those of the process on its CPUs: one thread, and undisturbed by others on the machine.
"""

from __future__ import annotations

import gc
import hashlib
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.agents_presets import AgentPreset, comparison_model
from kvcache.bench.peers.measuring import Clock, answer_questions, freeze, resident_bytes
from kvcache.core import native
from kvcache.core.errors import InvariantError
from kvcache.core.hashing import hash_chain
from kvcache.core.manager import Manager
from kvcache.retention import Sparse

TOKEN_DTYPE = np.dtype("<i4")
ROOT = bytes(32)
SAMPLED = np.zeros(1, np.int32)
ROOM_TOKENS = 1024
"""By how much a request that decodes may grow."""


def hash_with_hashlib(tokens: NDArray[np.int32], block_tokens: int) -> list[bytes]:
    """A plain chain: SHA-256 of the parent and the tokens of each full block, by `hashlib`."""
    data, size = memoryview(tokens.tobytes()), tokens.itemsize * block_tokens
    parent, chain = ROOT, []
    for start in range(0, len(tokens) // block_tokens * size, size):
        link = hashlib.sha256(parent)
        link.update(data[start : start + size])
        parent = link.digest()
        chain.append(parent)
    return chain


def decode_step(
    manager: Manager,
    handles: NDArray[np.int64],
    tokens: NDArray[np.int64],
    sampled: NDArray[np.int32],
) -> None:
    """What an engine asks of the manager in one decode step: `tokens` of each request are computed.

    Afterwards each knows the next one, `sampled`.
    """
    step = manager.begin_step()
    grants = manager.allocate_many(handles, tokens, commit=True)
    if len(grants) < len(handles):
        raise InvariantError("no space for a decode step")
    manager.take_moves()
    manager.end_step(step)
    manager.extend_many(handles, sampled)


class Work:
    """What can be measured. One pool at a time; `open_pool`, `open_batch` and others replace it.

    A pool has as many bytes as `blocks` blocks of vLLM for the model `preset`.
    """

    def __init__(self) -> None:
        self._tokens: NDArray[np.int32] = np.empty(0, np.int32)
        self._pool: Any = None
        self._batch: list[int] = []

    def tokens(self, path: str) -> dict[str, Any]:
        """The file that prompts come from; answers with the environment."""
        self._tokens = np.fromfile(path, TOKEN_DTYPE).astype(np.int32, copy=False)
        ffi, lib = native.load()
        return {
            "python": sys.version.split()[0],
            "sha256": ffi.string(lib.kvc_sha256_path()).decode(),
        }

    # ---- hashing -------------------------------------------------------------------------------

    def hash(self, first: int, count: int, block_tokens: int, algorithm: str) -> dict[str, Any]:
        """Hashes of all full blocks. `algorithm`: "kvcache", or "hashlib" for a plain baseline."""
        prompt = self._prompt(first, count)
        with Clock() as clock:
            if algorithm == "hashlib":
                blocks = len(hash_with_hashlib(prompt, block_tokens))
            else:
                blocks = len(hash_chain(ROOT, prompt, block_tokens))
        return {"seconds": clock.seconds, "blocks": blocks}

    # ---- a pool of one group -------------------------------------------------------------------

    def build(self, preset: str, blocks: int) -> dict[str, Any]:
        """Seconds to make a pool."""
        self._drop()
        with Clock() as clock:
            pool = self._new_pool(preset, blocks)
        del pool
        return {"seconds": clock.seconds}

    def open_pool(self, preset: str, blocks: int) -> dict[str, Any]:
        """Make the pool that the next five use."""
        self._drop()
        self._pool = self._new_pool(preset, blocks)
        freeze()
        return {}

    def prefill(self, first: int, count: int) -> dict[str, Any]:
        """A prompt from its arrival to its end, computed in one step.

        `open`: copied and hashed. `allocate`: it gets pages, its keys become findable. `free`: it is
        finished, its pages can be had, the last ones first. `evicted`: keys that went for it.
        """
        before, prompt = self._keys, self._prompt(first, count)
        with Clock() as opening:
            handle = self._open(prompt)
        with Clock() as allocating:
            self._step(handle, count)
        keys = self._keys
        with Clock() as freeing:
            self._pool.finish(handle)
        unit = self._pool.geometry.hash_unit_tokens
        return {
            "open_seconds": opening.seconds,
            "allocate_seconds": allocating.seconds,
            "free_seconds": freeing.seconds,
            "evicted": before + count // unit - keys,
        }

    def lookup(self, first: int, count: int) -> dict[str, Any]:
        """A new request, and its first lookup."""
        prompt = self._prompt(first, count)
        with Clock() as opening:
            handle = self._open(prompt)
        with Clock() as looking:
            hit = self._pool.lookup(handle)
        self._pool.abort(handle)
        return {
            "open_seconds": opening.seconds,
            "lookup_seconds": looking.seconds,
            "hit_tokens": hit.hit_tokens,
        }

    def churn(self, first: int, count: int, requests: int) -> dict[str, Any]:
        """Shuffle the pool: requests that grow in turns by one to four blocks each.

        Request i has the prompt of `count` tokens from `first + i * count` on. They end in another
        order than they came in.
        """
        pool, unit = self._pool, self._pool.geometry.hash_unit_tokens
        batch = [self._open(self._prompt(first + i * count, count)) for i in range(requests)]
        done, left, turn = dict.fromkeys(batch, 0), list(batch), 0
        while left:
            step = pool.begin_step()
            for i, handle in enumerate(left):
                blocks = 1 + (5 * turn + 3 * i) % 4
                tokens = min(blocks * unit, count - done[handle])
                done[handle] = self._grant(handle, tokens)
            pool.end_step(step)
            left = [handle for handle in left if done[handle] < count]
            turn += 1
        for i in range(requests):
            pool.finish(batch[97 * i % requests])
        return {}

    def blocked(
        self, first: int, count: int, holders: list[tuple[int, int]], repeats: int
    ) -> dict[str, Any]:
        """Lookups of a request for which there is no space, a step of another one before each.

        Args:
            first, count: its prompt; so much of it is cached that space is short.
            holders: prompts of the requests that hold the rest of the pool; the last one goes on.
            repeats: `seconds` of so many lookups after steps that take no page; as many
                `evicting_seconds` after steps that take one and give a key, which costs the waiting
                request the last page of its hit.
        """
        pool, holding = self._pool, []
        for start, tokens in holders:
            holding.append(self._open(self._prompt(start, tokens), room=ROOM_TOKENS))
            self._step(holding[-1], tokens)
        handle = self._open(self._prompt(first, count))
        hit_tokens = pool.lookup(handle).hit_tokens
        if pool.allocate(handle, count - hit_tokens) is not None:
            raise InvariantError("the request that should be blocked found space")
        seconds = []
        for tokens in [1] * repeats + [pool.geometry.hash_unit_tokens] * repeats:
            pool.extend(holding[-1], np.zeros(tokens, np.int32))
            self._step(holding[-1], tokens)
            with Clock() as clock:
                hit_tokens = pool.lookup(handle).hit_tokens
            seconds.append(clock.seconds)
        pool.abort(handle)
        for held in holding:
            pool.finish(held)
        return {
            "seconds": seconds[:repeats],
            "evicting_seconds": seconds[repeats:],
            "hit_tokens": hit_tokens,
        }

    # ---- other geometries ----------------------------------------------------------------------

    def chunked(
        self, preset: str, blocks: int, first: int, count: int, chunk: int
    ) -> dict[str, Any]:
        """Seconds to look up a prompt, and to compute it in chunks, in a pool of its own."""
        self._drop()
        pool = self._pool = self._new_pool(preset, blocks)
        freeze()
        handle, done = self._open(self._prompt(first, count)), 0
        with Clock() as clock:
            pool.lookup(handle)
            while done < count:
                done = self._step(handle, min(chunk, count - done))
        return {"seconds": clock.seconds}

    def open_batch(
        self, preset: str, blocks: int, prompts: list[tuple[int, int]]
    ) -> dict[str, Any]:
        """The pool of a batch that decodes, and its requests: each is computed but for one token."""
        self._drop()
        self._pool = self._new_pool(preset, blocks)
        freeze()
        for first, count in prompts:
            handle = self._open(self._prompt(first, count), room=ROOM_TOKENS)
            self._step(handle, count)
            self._pool.extend(handle, SAMPLED)
            self._batch.append(handle)
        return {}

    def decode(self, steps: int) -> dict[str, Any]:
        """Seconds of so many decode steps of the batch."""
        handles = np.array(self._batch, np.int64)
        one, sampled = np.ones(len(handles), np.int64), np.zeros(len(handles), np.int32)
        with Clock() as clock:
            for _ in range(steps):
                decode_step(self._pool, handles, one, sampled)
        return {"seconds": clock.seconds}

    # ---- memory --------------------------------------------------------------------------------

    def memory(self, preset: str, blocks: int, prompts: list[tuple[int, int]]) -> dict[str, Any]:
        """Bytes that a pool takes, in a process that has measured nothing before.

        Growth of the resident memory: `pool` by making it; `records` by opening all requests, which
        copies and hashes their tokens; `keys_and_tables` when all pages are held and have keys;
        `closed`: since the beginning, once the requests are finished and everything is cached.
        """
        texts = [self._prompt(first, count) for first, count in prompts]
        start = resident_bytes()
        self._pool = self._new_pool(preset, blocks)
        built = resident_bytes()
        handles = [self._open(text) for text in texts]
        opened = resident_bytes()
        for handle, text in zip(handles, texts, strict=True):
            self._step(handle, len(text))
        held, keys = resident_bytes(), self._keys
        for handle in handles:
            self._pool.finish(handle)
        return {
            "pool": built - start,
            "records": opened - built,
            "keys_and_tables": held - opened,
            "closed": resident_bytes() - start,
            "keys": keys,
        }

    # ---- parts ---------------------------------------------------------------------------------

    def _prompt(self, first: int, count: int) -> NDArray[np.int32]:
        return self._tokens[first : first + count]

    @staticmethod
    def _new_pool(preset: str, blocks: int) -> Manager:
        model: AgentPreset = comparison_model(preset)
        geometry = model.geometry()
        slabs = geometry.slabs_in(blocks * model.block_bytes)
        return Manager(
            geometry, slabs=slabs, retention=Sparse(0), movable=True, journal=False, seed=0
        )

    def _drop(self) -> None:
        self._pool, self._batch = None, []
        gc.unfreeze()
        gc.collect()

    def _open(self, prompt: NDArray[np.int32], room: int = 0) -> int:
        handle: int = self._pool.open(prompt, max_tokens=len(prompt) + room)
        return handle

    def _grant(self, handle: int, tokens: int) -> int:
        grant = self._pool.allocate(handle, tokens)
        if grant is None or grant.end != grant.start + tokens:
            raise InvariantError(f"no space for {tokens} tokens: {self._pool.arena_stats()}")
        self._pool.commit(handle, grant.end)
        end: int = grant.end
        return end

    def _step(self, handle: int, tokens: int) -> int:
        """A step of one request; where its grant ended."""
        step = self._pool.begin_step()
        end = self._grant(handle, tokens)
        self._pool.take_moves()
        self._pool.end_step(step)
        return end

    @property
    def _keys(self) -> int:
        keys: int = self._pool.group_stats(0).keyed
        return keys


def main() -> None:
    """Answer questions until there are none."""
    answer_questions(Work())


if __name__ == "__main__":
    main()
