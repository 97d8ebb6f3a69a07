"""What an operator may set, and what is refused: with the numbers, and what to change."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import torch
from conformance import stack as stack_module
from conformance.stack import HASH, Stack, full, state, window
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kvcache.connectors.adapters.vllm.connector import KVCacheConnector, require_version
from kvcache.core.errors import ConfigError

CPU: dict[str, Any] = {"connector": "cpu", "capacity_bytes": 1 << 22}
PROMPT = [i * 7 % 199 for i in range(150)]


@pytest.mark.parametrize("version", ["0.32.1", "0.34.0", "1.0", "0.330.0"])
def test_another_vllm_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"vLLM {version}.*0\.33\.x"):
        require_version(version)


@pytest.mark.parametrize("version", ["0.33.0", "0.33.1", "0.33.0+cpu", "0.33.0rc1"])
def test_this_vllm_is_not(version: str) -> None:
    require_version(version)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({}, "tiers"),
        ({"tiers": []}, "give a list of tiers"),
        ({"tiers": "cpu"}, "give a list of tiers"),
        ({"tiers": [CPU], "cpu_bytes_to_use": 5}, "'cpu_bytes_to_use'"),
        ({"tiers": [{"capacity_bytes": 1 << 22}]}, 'needs a "connector"'),
        ({"tiers": [CPU | {"connector": 3}]}, "connector"),
        (
            {"tiers": [CPU | {"connector": "nothing"}]},
            "'nothing' is not known: there are cpu, disk",
        ),
        ({"tiers": [CPU | {"connector": "no.such.module:Tier"}]}, "cannot be imported"),
        ({"tiers": [CPU | {"connector": "builtins:dict"}]}, "takes a geometry first"),
        ({"tiers": [CPU | {"capacity": 5}]}, "'capacity'"),
        ({"tiers": [CPU | {"capacity_bytes": -1}]}, "capacity_bytes"),
        ({"tiers": [CPU | {"capacity_bytes": "much"}]}, "capacity_bytes"),
        ({"tiers": [CPU], "store": "some"}, "'all' or 'prompt'"),
        ({"tiers": [CPU], "load": 1}, "'async' or 'sync'"),
        ({"tiers": [CPU], "weights_epoch": -1}, "weights_epoch"),
        ({"tiers": [{"connector": "disk", "capacity_bytes": 1 << 22}]}, "lacks 'folder'"),
    ],
)
def test_a_wrong_setting_is_named(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Stack(extra=extra)


def test_loads_that_a_step_waits_for_are_for_full_attention_alone() -> None:
    extra = {"tiers": [CPU], "load": "sync"}
    for specs in ([full(), window()], [full(), state()], [window()]):
        with pytest.raises(ConfigError, match='leave "load" out'):
            Stack(extra=extra, specs=specs)
    with pytest.raises(ConfigError, match="--no-async-scheduling"):
        Stack(extra=extra, asynchronous=True)


def test_a_tier_that_outlives_the_process_needs_hashes_that_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    assert HASH == "sha256_cbor"
    monkeypatch.setattr(stack_module, "HASH", "sha256")
    disk = {"connector": "disk", "folder": str(tmp_path), "capacity_bytes": 1 << 22}
    with pytest.raises(ConfigError, match="--prefix-caching-hash-algo sha256_cbor"):
        Stack(extra={"tiers": [CPU, disk]})
    with Stack(extra={"tiers": [CPU]}) as stack:
        stack.serve("first", PROMPT)
        stack.forget()
        stack.serve("again", PROMPT)
        assert stack.external["again"] == [144]


def test_latent_attention() -> None:
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
    with Stack(specs=[latent]) as stack:
        stack.serve("first", PROMPT)
        stack.forget()
        stack.serve("again", PROMPT)
        assert stack.external["again"] == [144]


def test_weights_of_another_epoch_share_nothing(tmp_path: Any) -> None:
    disk = {"connector": "disk", "folder": str(tmp_path), "capacity_bytes": 1 << 26}
    found = []
    for epoch in (0, 1, 0):
        with Stack(extra={"tiers": [disk], "weights_epoch": epoch}) as stack:
            stack.serve("first", PROMPT)
            found.append(sum(stack.external.get("first", [])))
            assert stack.tiers[0].worker.flush(30)
    assert found == [0, 0, 144]


def test_it_is_a_cache_and_says_so() -> None:
    with Stack() as stack:
        assert not stack.connector.requires_kv_delivery
        assert not KVCacheConnector.supports_sleep_mode(None)
        stack.serve("first", PROMPT)
        stack.forget()
        request = stack.add("again", PROMPT, 4)
        stack.step()
        sources = stack.connector.get_external_cache_hit_sources(request, 144)
        assert [(source.name, count) for source, count in sources.items()] == [("HOST", 144)]
        stack.run()


def test_vllm_finds_it_by_its_plug_ins(require: Any) -> None:
    """In a process of its own: registered by name, without the module's path."""
    points = metadata.entry_points(group="vllm.general_plugins")
    if "kvcache" not in points.names:
        require("vllm", "kvcache is not installed here: `make conformance` does it")
    code = (
        "from vllm.plugins import load_general_plugins; load_general_plugins();"
        "from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector;"
        "made = MultiConnector.build_kv_connector_stats("
        "    {'KVCacheConnector': {'counters': {'stored_pages': 3}, 'gauges': {}}});"
        "print(made.reduce())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    assert "'stored_pages': 3" in done.stdout
