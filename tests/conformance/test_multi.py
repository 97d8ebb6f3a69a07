"""As one of several connectors in vLLM's `MultiConnector`, beside one of its own."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.faulty import tier_with
from conformance.stack import MODULE, Stack, expected_outputs, full, state, window
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorStats,
)

from kvcache.connectors.adapters.vllm import KVCacheConnector, register
from kvcache.connectors.adapters.vllm.stats import COUNTERS, GAUGES

PROMPT = [i * 7 % 199 for i in range(150)]

OURS: dict[str, Any] = {
    "kv_connector": "KVCacheConnector",
    "kv_connector_module_path": MODULE,
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"tiers": [{"connector": "cpu", "capacity_bytes": 1 << 22}]},
}
THEIRS: dict[str, Any] = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 22},
}


def several(*children: dict[str, Any], **options: Any) -> Stack:
    return Stack(
        connector="MultiConnector", module=None, extra={"connectors": list(children)}, **options
    )


@pytest.mark.usefixtures("plain_copies")
@pytest.mark.parametrize("specs", [[full()], [full(), window()], [full(), state()]])
@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_one_of_vllms_own(specs: list[Any], ours_first: bool) -> None:
    children = [OURS, THEIRS] if ours_first else [THEIRS, OURS]
    with several(*children, specs=specs, blocks=60) as stack:
        for turn in range(4):
            request = stack.serve(f"r{turn}", [*PROMPT, *range(turn * 5)], 12)
            assert list(request.output_token_ids) == expected_outputs(request)
            assert bool(sum(stack.external.get(f"r{turn}", []))) == (turn > 0)
            stack.forget()
        ours = next(c for c in stack.connector.sub_connectors if isinstance(c, KVCacheConnector))
        tier = ours._scheduler.tier
        tier.check()
        assert bool(tier.stats().loaded_pages) == ours_first
        assert tier.stats().stored_pages >= 9
        assert tier.stats().pinned_pages == 0
        assert stack.free == stack.setup.blocks - 1


@pytest.mark.usefixtures("plain_copies")
def test_what_our_load_lost_is_computed() -> None:
    spoiled = OURS | {"kv_connector_extra_config": tier_with({"corrupt": 1.0})}
    with several(spoiled, THEIRS) as stack:
        for turn in range(3):
            request = stack.serve(f"r{turn}", PROMPT)
            assert list(request.output_token_ids) == expected_outputs(request)
            stack.forget()
        assert stack.free == stack.setup.blocks - 1


def test_two_of_ours() -> None:
    """Each has a tier of its own, also where both are set alike."""
    with several(OURS, OURS) as stack:
        first, second = stack.connector.sub_connectors
        assert first._tier is not second._tier
        assert [c._tier for c in stack.worker.sub_connectors] == [first._tier, second._tier]
        stack.serve("first", PROMPT)
        stack.forget()
        request = stack.serve("again", PROMPT)
        assert list(request.output_token_ids) == expected_outputs(request)
        assert stack.external["again"] == [144]


def test_stats_pass_through_multiconnector() -> None:
    """vLLM builds the classes of its front-end from names alone: ours is registered under its own."""
    with several(OURS, OURS) as stack:
        stack.serve("first", PROMPT)
        stack.forget()
        stack.serve("again", PROMPT)
        reports = [report for report in stack.stats if report]
        assert reports
        total = MultiConnector.build_kv_connector_stats({})
        for report in reports:
            sent = report if isinstance(report, dict) else report.to_dict()
            total = total.aggregate(MultiConnector.build_kv_connector_stats(sent))
        assert isinstance(total, MultiKVConnectorStats)
        counted = total.reduce()["KVCacheConnector"]
        assert counted["stored_pages"] == 2 * 9
        assert counted["loaded_pages"] == 9
        metrics = MultiConnector.build_prom_metrics(
            stack.config,
            {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
            ["engine"],
            {0: ["0"]},
        )
        metrics.observe(sent, 0)


def test_the_name_is_registered_once() -> None:
    register()
    register()
    made = KVConnectorFactory.get_connector_class_by_name("KVCacheConnector")
    assert made is KVCacheConnector
    assert COUNTERS.keys().isdisjoint(GAUGES)
