"""vLLM's block manager and hashing under a stopwatch: one measurement for each question.

Run by `kvcache bench hash|manager --peer vllm` under a Python that has vLLM. A question is one JSON
object a line, `{"do": NAME, ...}`, and so is its answer; the end of stdin ends the program. The names
are the public methods of `Work`, their fields the arguments; `kvcache.bench.manager_work` has the
same ones for our side, with what each of them measures.

Tokens come from a file of little-endian int32 (`{"do": "tokens", "path": PATH}`); a prompt is
`count` tokens of it from `first` on. Seconds are those of the process on its CPUs. The heap is frozen
whenever a pool was made, as vLLM's engine does after its start.
"""

from __future__ import annotations

import array
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from kvcache.bench.peers.measuring import Clock, answer_questions, freeze, resident_bytes
    from kvcache.bench.peers.vllm_pool import Pool, Vllm
else:  # run as a program
    from measuring import Clock, answer_questions, freeze, resident_bytes
    from vllm_pool import Pool, Vllm

TOKEN_BYTES = 4
STEP_TOKENS = 8192
"""What the manager takes a step's token budget to be."""

Groups = list[dict[str, Any]]


class Work:
    """What can be measured. One pool at a time; `open_pool`, `open_batch` and others replace it."""

    def __init__(self, vllm: Vllm) -> None:
        self.vllm = vllm
        self._tokens = Path()
        self._pool: Any = None
        self._batch: list[Any] = []
        self._names = 0

    def tokens(self, path: str) -> dict[str, Any]:
        """The file that prompts come from; answers with the environment."""
        self._tokens = Path(path)
        return self.vllm.environment()

    # ---- hashing -------------------------------------------------------------------------------

    def hash(self, first: int, count: int, block_tokens: int, algorithm: str) -> dict[str, Any]:
        """Hashes of all full blocks, as a request gets them."""
        function = self.vllm.hash_function(algorithm)
        self.vllm.init_hash(function)
        hasher = self.vllm.block_hasher(block_tokens, function)
        request = self.vllm.new_request("hash", self._prompt(first, count), None)
        with Clock() as clock:
            hashes = hasher(request)
        return {"seconds": clock.seconds, "blocks": len(hashes)}

    # ---- a pool of one group -------------------------------------------------------------------

    def build(self, groups: Groups, blocks: int) -> dict[str, Any]:
        """Seconds to make a pool."""
        self._drop()
        with Clock() as clock:
            pool = self._new_pool(groups, blocks, None)
        del pool
        return {"seconds": clock.seconds}

    def open_pool(self, groups: Groups, blocks: int) -> dict[str, Any]:
        """Make the pool that the next five use."""
        self._drop()
        self._pool = self._new_pool(groups, blocks, None)
        freeze()
        return {}

    def prefill(self, first: int, count: int) -> dict[str, Any]:
        """A prompt from its arrival to its end, computed in one step."""
        before, prompt = self._keys, self._prompt(first, count)
        with Clock() as opening:
            request = self._request(prompt)
        with Clock() as allocating:
            self._step(request, count)
        keys = self._keys
        with Clock() as freeing:
            self._finish(request)
        return {
            "open_seconds": opening.seconds,
            "allocate_seconds": allocating.seconds,
            "free_seconds": freeing.seconds,
            "evicted": before + count // self._pool.unit - keys,
        }

    def lookup(self, first: int, count: int) -> dict[str, Any]:
        """A new request, and its first lookup."""
        prompt = self._prompt(first, count)
        with Clock() as opening:
            request = self._request(prompt)
        with Clock() as looking:
            _, hit_tokens, _ = self._pool.manager.get_computed_blocks(request)
        return {
            "open_seconds": opening.seconds,
            "lookup_seconds": looking.seconds,
            "hit_tokens": hit_tokens,
        }

    def churn(self, first: int, count: int, requests: int) -> dict[str, Any]:
        """Shuffle the pool: requests that grow in turns by one to four blocks each."""
        batch = [self._request(self._prompt(first + i * count, count)) for i in range(requests)]
        left, turn = list(batch), 0
        while left:
            self._pool.manager.new_step_starts()
            for i, request in enumerate(left):
                blocks = 1 + (5 * turn + 3 * i) % 4
                tokens = min(blocks * self._pool.unit, count - request.num_computed_tokens)
                self._allocate(request, tokens)
                request.num_computed_tokens += tokens
            self._pool.drain()
            left = [request for request in left if request.num_computed_tokens < count]
            turn += 1
        for i in range(requests):
            self._finish(batch[97 * i % requests])
        return {}

    def blocked(
        self, first: int, count: int, holders: list[tuple[int, int]], repeats: int
    ) -> dict[str, Any]:
        """Lookups of a request for which there is no space, a step of another one before each."""
        manager, holding = self._pool.manager, []
        for start, tokens in holders:
            holding.append(self._request(self._prompt(start, tokens)))
            self._step(holding[-1], tokens)
        request, running = self._request(self._prompt(first, count)), holding[-1]
        blocks, hit_tokens, _ = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, count - hit_tokens, hit_tokens, blocks) is not None:
            raise RuntimeError("the request that should be blocked found space")
        seconds = []
        for tokens in [1] * repeats + [self._pool.unit] * repeats:
            running.append_output_token_ids([0] * tokens)
            self._step(running, tokens)
            with Clock() as clock:
                _, hit_tokens, _ = manager.get_computed_blocks(request)
            seconds.append(clock.seconds)
        for held in holding:
            self._finish(held)
        return {
            "seconds": seconds[:repeats],
            "evicting_seconds": seconds[repeats:],
            "hit_tokens": hit_tokens,
        }

    # ---- other geometries ----------------------------------------------------------------------

    def chunked(
        self, groups: Groups, blocks: int, first: int, count: int, chunk: int
    ) -> dict[str, Any]:
        """Seconds to look up a prompt, and to compute it in chunks, in a pool of its own."""
        self._drop()
        pool = self._pool = self._new_pool(groups, blocks, 0, step_tokens=chunk)
        freeze()
        request = self._request(self._prompt(first, count))
        with Clock() as clock:
            pool.manager.get_computed_blocks(request)
            while request.num_computed_tokens < count:
                left = min(chunk, count - request.num_computed_tokens)
                self._step(request, pool.chunk(request, left))
        return {"seconds": clock.seconds}

    def open_batch(
        self, groups: Groups, blocks: int, prompts: list[tuple[int, int]]
    ) -> dict[str, Any]:
        """The pool of a batch that decodes, and its requests: each is computed but for one token."""
        self._drop()
        pool = self._pool = self._new_pool(groups, blocks, 0)
        freeze()
        for first, count in prompts:
            request = self._request(self._prompt(first, count))
            while request.num_computed_tokens < count:
                left = count - request.num_computed_tokens
                self._step(request, pool.chunk(request, left))
            request.append_output_token_ids(0)
            self._batch.append(request)
        return {}

    def decode(self, steps: int) -> dict[str, Any]:
        """Seconds of so many decode steps of the batch."""
        manager = self._pool.manager
        with Clock() as clock:
            for _ in range(steps):
                manager.new_step_starts()
                for request in self._batch:
                    if manager.allocate_slots(request, 1) is None:
                        raise RuntimeError("no space for a decode step")
                self._pool.drain()
                for request in self._batch:
                    request.num_computed_tokens += 1
                    request.append_output_token_ids(0)
        return {"seconds": clock.seconds}

    # ---- memory --------------------------------------------------------------------------------

    def memory(self, groups: Groups, blocks: int, prompts: list[tuple[int, int]]) -> dict[str, Any]:
        """Bytes that a pool takes, in a process that has measured nothing before."""
        texts = [self._prompt(first, count) for first, count in prompts]
        start = resident_bytes()
        self._pool = self._new_pool(groups, blocks, None)
        built = resident_bytes()
        requests = [self._request(text) for text in texts]
        opened = resident_bytes()
        for request in requests:
            self._step(request, request.num_tokens)
        held, keys = resident_bytes(), self._keys
        for request in requests:
            self._finish(request)
        del requests, request
        return {
            "pool": built - start,
            "records": opened - built,
            "keys_and_tables": held - opened,
            "closed": resident_bytes() - start,
            "keys": keys,
        }

    # ---- parts ---------------------------------------------------------------------------------

    def _prompt(self, first: int, count: int) -> list[int]:
        tokens = array.array("i")
        with self._tokens.open("rb") as file:
            file.seek(TOKEN_BYTES * first)
            tokens.fromfile(file, count)
        if sys.byteorder == "big":
            tokens.byteswap()
        return tokens.tolist()

    def _new_pool(
        self, groups: Groups, blocks: int, interval: int | None, step_tokens: int = STEP_TOKENS
    ) -> Pool:
        """One more block than asked for: vLLM keeps one as its null block."""
        return Pool(self.vllm, groups, blocks + 1, interval, step_tokens)

    def _drop(self) -> None:
        self._pool, self._batch = None, []
        gc.unfreeze()
        gc.collect()

    def _request(self, prompt: list[int]) -> Any:
        self._names += 1
        return self._pool.request(str(self._names), prompt)

    def _allocate(self, request: Any, tokens: int) -> None:
        if self._pool.manager.allocate_slots(request, tokens) is None:
            raise RuntimeError(
                f"no space for {tokens} tokens: {self._pool.free_blocks} blocks free"
            )

    def _step(self, request: Any, tokens: int) -> None:
        self._pool.manager.new_step_starts()
        self._allocate(request, tokens)
        self._pool.drain()
        request.num_computed_tokens += tokens

    def _finish(self, request: Any) -> None:
        request.status = self.vllm.status.FINISHED_STOPPED
        self._pool.manager.free(request)

    @property
    def _keys(self) -> int:
        return len(self._pool.manager.block_pool.cached_block_hash_to_block)


def main() -> None:
    """Answer questions until there are none."""
    answer_questions(Work(Vllm()))


if __name__ == "__main__":
    main()
