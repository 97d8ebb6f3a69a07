"""Sleep, wake and new weights: what is cached comes back, what is out of date never does."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from engine.rig import DRAIN_SECONDS, Gate, evict_all, generate, rig, tokens
from engine.stamp_runner import StampRunner, expected_output

from kvcache import ConfigError, Manager, MisuseError, Sparse
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.driver import Offload
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.model import Model
from kvcache.engine.request import Token
from kvcache.engine.runner import TorchRunner
from kvcache.engine.tiny import build_model

torch.set_num_threads(1)


class SleepyRunner(StampRunner):
    """After `release_memory` its pages hold what no stamp is."""

    released = 0

    def release_memory(self) -> None:
        self.arena[:] = 2**64 - 1
        self.released += 1


class Real(NamedTuple):
    engine: Engine
    manager: Manager
    runner: TorchRunner
    offload: Offload

    @property
    def held(self) -> int:
        assert self.offload.drain(DRAIN_SECONDS)
        self.manager.check()
        return sum(c.held for c in self.manager.arena_stats().classes)


@contextmanager
def real(model: Model, slabs: int = 60) -> Iterator[Real]:
    runner = TorchRunner(model, slabs)
    manager = Manager(
        model.geometry, slabs=slabs, retention=Sparse(16), fingerprint=model.fingerprint()
    )
    connector = CpuConnector(model.geometry, pages=[200] * len(model.geometry.groups))
    offload = Offload(manager, connector, runner.regions())
    settings = EngineSettings(token_budget=32, max_requests=3, debug=True, loads="always")
    try:
        yield Real(Engine(runner, manager, offload, settings=settings), manager, runner, offload)
    finally:
        offload.close()


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def alone(model: Model, prompt: Sequence[int], count: int) -> list[int]:
    runner = TorchRunner(model, 60)
    manager = Manager(model.geometry, slabs=60, retention=Sparse())
    return generate(Engine(runner, manager), prompt, count).tokens


def resident_bytes(address: int, size: int) -> int:
    """Of a span of this process's memory, what lies in RAM, by the kernel's account."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first < address + size and last > address
        elif inside and head == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


def test_what_slept_is_restored_by_lookup() -> None:
    model = build_model(1, exact=True)
    with real(model) as r:
        prompt = prompt_of(100, 1)
        output = generate(r.engine, prompt, 9).tokens
        assert r.engine.sleep()
        assert r.engine.asleep
        r.engine.wake()
        again = [*prompt, *output, *prompt_of(5, 2)]
        result = generate(r.engine, again, 6)
        assert result.tokens == alone(model, again, 6)
        assert result.usage.host_tokens == 96
        assert r.held == 0


def test_sleep_gives_the_memory_back_to_the_system() -> None:
    model = build_model(1)
    with real(model, slabs=2000) as r:
        arena = r.runner.storage.arena
        arena.fill_(1)
        span = (arena.data_ptr(), arena.numel())
        before = resident_bytes(*span)
        assert before > 0.9 * arena.numel() > 4 << 20
        assert r.engine.sleep()
        assert before - resident_bytes(*span) > 0.9 * arena.numel()
        r.engine.wake()
        assert not arena.any()


def test_requests_that_run_load_or_wait_go_on_after_a_sleep() -> None:
    gate = Gate()
    gate.open.set()
    with rig(
        [24, 6], states=1, tier_pages=[64, 16], tier={"copy": gate}, runner_type=SleepyRunner
    ) as r:
        shared = tokens(100, 1)
        generate(r.engine, shared, 1)
        evict_all(r)
        gate.open.clear()
        wanted = {}
        for prompt, count in [(tokens(40, 2), 30), (shared, 4), (tokens(90, 3), 20)]:
            request = r.engine.add_request(prompt, max_new_tokens=count)
            wanted[request] = expected_output(prompt, count)
        got: dict[int, list[int]] = {request: [] for request in wanted}

        def take() -> None:
            for event in r.engine.step():
                if isinstance(event, Token):
                    got[event.request].append(event.token)

        for _ in range(4):
            take()
        assert r.engine.scheduler.loading
        assert r.engine.scheduler.running
        assert not r.engine.sleep(0.05), "a load is in flight"
        assert not r.engine.asleep
        take()
        gate.open.set()
        assert r.engine.sleep(DRAIN_SECONDS)
        assert isinstance(r.runner, SleepyRunner)
        assert r.runner.released == 1
        assert r.held == 0
        late = r.engine.add_request(shared, max_new_tokens=3)
        wanted[late], got[late] = expected_output(shared, 3), []
        with pytest.raises(MisuseError, match="asleep: call wake"):
            r.engine.step()
        assert r.engine.sleep()
        r.engine.wake()
        while r.engine.busy:
            take()
        assert got == wanted
        assert r.engine.counters.kept_preemptions > 0
        assert r.held == 0


def test_an_abort_while_asleep_is_told_after_waking() -> None:
    with rig([12], runner_type=SleepyRunner) as r:
        request = r.engine.add_request(tokens(40, 1), max_new_tokens=9)
        r.engine.step()
        assert r.engine.sleep()
        r.engine.abort(request)
        r.engine.wake()
        (event,) = r.engine.step()
        assert event.request == request
        assert not r.engine.busy
        assert r.held == 0


def test_a_runner_that_keeps_its_memory_cannot_sleep() -> None:
    with rig([12]) as r, pytest.raises(MisuseError, match="release_memory"):
        r.engine.sleep()


def test_nothing_of_old_weights_is_a_hit_in_device_or_tier() -> None:
    old, new = build_model(1, exact=True), build_model(2, exact=True)
    with real(old) as r:
        prompt = prompt_of(100, 1)
        first = generate(r.engine, prompt, 9).tokens
        assert r.offload.drain(DRAIN_SECONDS)
        r.engine.reload(1, lambda: r.runner.set_model(new))
        result = generate(r.engine, prompt, 9)
        assert result.usage.cached_tokens == 0
        assert result.tokens == alone(new, prompt, 9) != first
        again = generate(r.engine, prompt, 9)
        assert again.usage.device_tokens == 96
        assert r.offload.drain(DRAIN_SECONDS)
        r.manager.clear()
        assert generate(r.engine, prompt, 9).usage.host_tokens == 96
        r.engine.reload(
            0, lambda: r.runner.set_model(old)
        )  # the first weights again: so is its tier
        back = generate(r.engine, prompt, 9)
        assert back.tokens == first
        assert back.usage.host_tokens == 96
        assert r.held == 0


def test_requests_that_are_open_go_on_with_the_new_weights_alone() -> None:
    """Prompt and output so far, with the new weights, as if they had been sent to them."""
    old, new = build_model(1, exact=True), build_model(2, exact=True)
    with real(old) as r:
        prompts = [prompt_of(60, i) for i in range(4)]
        ids = [r.engine.add_request(p, max_new_tokens=12) for p in prompts]
        for _ in range(8):
            r.engine.step()
        so_far = {i: list(q.output) for i, q in r.engine._requests.items()}
        assert 0 < len(so_far[ids[0]]) < 12
        r.engine.reload(7, lambda: r.runner.set_model(new))
        results = r.engine.run()
        for prompt, i in zip(prompts, ids, strict=True):
            before = so_far[i]
            rest = alone(new, [*prompt, *before], 12 - len(before))
            assert results[i].tokens == [*before, *rest]
        assert r.held == 0
        follow = generate(r.engine, prompts[0], 1)
        assert follow.usage.cached_tokens == 0, "they leave no keys"


def test_a_load_in_flight_brings_nothing_to_new_weights() -> None:
    gate = Gate()
    gate.open.set()
    with rig([24], tier_pages=[64], tier={"copy": gate}) as r:
        prompt = tokens(100, 1)
        generate(r.engine, prompt, 1)
        evict_all(r)
        gate.open.clear()
        ids = [r.engine.add_request(prompt, max_new_tokens=2) for _ in range(3)]
        r.engine.step()
        assert list(r.engine.scheduler.loading) == ids[:1]
        r.engine.reload(1, lambda: None)
        results = r.engine.run()
        for i in ids:
            assert results[i].tokens == expected_output(prompt, 2)
            assert results[i].usage.cached_tokens == 0
        gate.open.set()
        assert r.held == 0
        assert generate(r.engine, prompt, 1).usage.cached_tokens == 0


def test_an_epoch_that_is_the_present_one_is_refused() -> None:
    with rig([12]) as r:
        with pytest.raises(ConfigError, match="epoch 0 is the present one"):
            r.engine.reload(0, lambda: None)
        assert generate(r.engine, tokens(20, 1), 2).tokens == expected_output(tokens(20, 1), 2)


def test_other_groups_are_not_loaded_into_a_runner() -> None:
    runner = TorchRunner(build_model(1), 10)
    with pytest.raises(ConfigError, match="other groups or another vocabulary"):
        runner.set_model(build_model(1, window=32))
