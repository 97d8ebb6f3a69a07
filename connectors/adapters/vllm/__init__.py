"""Our tiers inside vLLM.

    vllm serve MODEL --prefix-caching-hash-algo sha256_cbor --kv-transfer-config '{
      "kv_connector": "KVCacheConnector",
      "kv_connector_module_path": "kvcache.connectors.adapters.vllm",
      "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"tiers": [{"connector": "cpu", "capacity_bytes": 68719476736}]}}'

vLLM is no dependency of ours: it is imported when the connector is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.connectors.adapters.vllm.connector import KVCacheConnector as KVCacheConnector

__all__ = ["KVCacheConnector", "register"]

NAME = "KVCacheConnector"
"""Of the class, in vLLM's settings."""


def __getattr__(name: str) -> Any:
    if name == NAME:
        from kvcache.connectors.adapters.vllm.connector import KVCacheConnector  # noqa: PLC0415

        return KVCacheConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Makes the connector known to vLLM by its name. Idempotent; an entry point of vLLM's plug-ins.

    Without it vLLM finds the class by `kv_connector_module_path`, but not its stats where it is one of
    several connectors.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001
        KVConnectorFactory.register_connector(NAME, __name__, NAME)
