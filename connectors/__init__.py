"""Tiers below the device: the connector contract and its implementations."""

if not __name__.startswith("kvcache."):
    raise ImportError(
        "import kvcache.connectors, not connectors: the folder is part of the kvcache package"
    )
