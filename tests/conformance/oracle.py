"""vLLM's own offload to host memory on a CPU: its connector as it is, over plain copies.

Its worker moves bytes between a GPU and host memory; here a stand-in does so at once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.stack import Setup, Stack, kv_cache_config
from vllm.distributed.kv_transfer.kv_connector.v1 import simple_cpu_offload_connector
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata


@pytest.fixture
def plain_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """`SimpleCPUOffloadConnector` runs without a GPU."""
    monkeypatch.setattr(
        simple_cpu_offload_connector, "SimpleCPUOffloadWorker", lambda *_, **__: _Copies()
    )


def oracle(setup: Setup, pages: int) -> Stack:
    """The same engine over `SimpleCPUOffloadConnector`, with so many blocks of host memory."""
    config = kv_cache_config(setup)
    block_bytes = config.kv_cache_tensors[0].size // setup.blocks
    settings = dict(vars(setup))
    settings |= {
        "connector": "SimpleCPUOffloadConnector",
        "module": None,
        "extra": {"cpu_bytes_to_use": block_bytes * pages},
    }
    return Stack(Setup(**settings))


class _Copies:
    """What the connector asks of its worker."""

    num_cpu_blocks = 0

    def __init__(self) -> None:
        self._layers: list[torch.Tensor] = []
        self._host: dict[int, list[torch.Tensor]] = {}
        self._plan: Any = None
        self._loaded: set[str] = set()
        self._stored: dict[int, int] = {}

    def register_kv_caches(self, caches: dict[str, torch.Tensor]) -> None:
        """`[blocks, bytes]` of each layer. Those of groups that overlay each other are the same."""
        places: dict[int, torch.Tensor] = {}
        for layer in caches.values():
            known = places.get(layer.data_ptr())
            if known is None or known.shape[1] < layer.shape[1]:
                places[layer.data_ptr()] = layer
        self._layers = list(places.values())

    def bind_connector_metadata(self, plan: Any) -> None:
        self._plan = plan

    def clear_connector_metadata(self) -> None:
        self._plan = None

    def handle_preemptions(self, plan: Any) -> None:
        """Nothing is in flight between two steps."""

    def start_load_kv(self) -> None:
        plan = self._plan
        for there, here in zip(plan.load_cpu_blocks, plan.load_gpu_blocks, strict=True):
            for layer, page in zip(self._layers, self._host[there], strict=True):
                layer[here] = page
        if plan.load_event >= 0:
            self._loaded |= set(plan.load_event_to_reqs.get(plan.load_event, ()))

    def wait_for_save(self) -> None:
        plan = self._plan
        for there, here in zip(plan.store_cpu_blocks, plan.store_gpu_blocks, strict=True):
            self._host[there] = [layer[here].clone() for layer in self._layers]
        if plan.store_event >= 0:
            self._stored[plan.store_event] = 1

    def get_finished(self, _: set[str]) -> tuple[set[str] | None, set[str] | None]:
        done, self._loaded = self._loaded, set()
        return None, done or None

    def build_connector_worker_meta(self) -> SimpleCPUOffloadWorkerMetadata | None:
        done, self._stored = self._stored, {}
        return SimpleCPUOffloadWorkerMetadata(done) if done else None
