"""KV-cache management and offload for LLM serving.

Names are imported on first use, so that `import kvcache` loads neither numpy nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_LAZY = {
    "ArenaStats": "kvcache.core.records",
    "CapacityError": "kvcache.core.errors",
    "ChainConnector": "kvcache.connectors.chain",
    "ChunkedLocal": "kvcache.core.specs",
    "ClassStats": "kvcache.core.records",
    "Compressed": "kvcache.core.specs",
    "ConfigError": "kvcache.core.errors",
    "CpuConnector": "kvcache.connectors.cpu",
    "CrossAttention": "kvcache.core.specs",
    "Dense": "kvcache.retention",
    "DiskConnector": "kvcache.connectors.disk",
    "SharedConnector": "kvcache.connectors.shared",
    "Explanation": "kvcache.core.explanation",
    "Fingerprint": "kvcache.core.hashing",
    "FullAttention": "kvcache.core.specs",
    "Geometry": "kvcache.core.layout",
    "Grant": "kvcache.core.records",
    "GroupRules": "kvcache.core.specs",
    "GroupStats": "kvcache.core.records",
    "HandleError": "kvcache.core.errors",
    "Hit": "kvcache.core.records",
    "IndexedAttention": "kvcache.core.specs",
    "InputError": "kvcache.core.errors",
    "InvariantError": "kvcache.core.errors",
    "KVCacheError": "kvcache.core.errors",
    "LatentAttention": "kvcache.core.specs",
    "LatentWindow": "kvcache.core.specs",
    "Loss": "kvcache.core.explanation",
    "Manager": "kvcache.core.manager",
    "ManagerStats": "kvcache.core.records",
    "Media": "kvcache.core.media",
    "MissingPackageError": "kvcache.core.errors",
    "MisuseError": "kvcache.core.errors",
    "NativeError": "kvcache.core.errors",
    "Offload": "kvcache.connectors.driver",
    "PageRegion": "kvcache.connectors.base",
    "PoolingState": "kvcache.core.specs",
    "PromptEmbeddings": "kvcache.core.media",
    "RecurrentState": "kvcache.core.specs",
    "RequestInfo": "kvcache.core.records",
    "RetentionPlan": "kvcache.retention",
    "RetentionPolicy": "kvcache.retention",
    "RingBuffer": "kvcache.core.specs",
    "SlidingWindow": "kvcache.core.specs",
    "Sparse": "kvcache.retention",
    "StatePlan": "kvcache.core.records",
    "TurnShape": "kvcache.retention",
    "UNLIMITED": "kvcache.core.records",
    "arena_regions": "kvcache.connectors.arena_regions",
}

__all__ = ["__version__", *sorted(_LAZY)]  # noqa: PLE0604

if TYPE_CHECKING:
    from kvcache.connectors.arena_regions import arena_regions as arena_regions
    from kvcache.connectors.base import PageRegion as PageRegion
    from kvcache.connectors.chain import ChainConnector as ChainConnector
    from kvcache.connectors.cpu import CpuConnector as CpuConnector
    from kvcache.connectors.disk import DiskConnector as DiskConnector
    from kvcache.connectors.driver import Offload as Offload
    from kvcache.connectors.shared import SharedConnector as SharedConnector
    from kvcache.core.errors import (
        CapacityError as CapacityError,
        ConfigError as ConfigError,
        HandleError as HandleError,
        InputError as InputError,
        InvariantError as InvariantError,
        KVCacheError as KVCacheError,
        MissingPackageError as MissingPackageError,
        MisuseError as MisuseError,
        NativeError as NativeError,
    )
    from kvcache.core.explanation import Explanation as Explanation, Loss as Loss
    from kvcache.core.hashing import Fingerprint as Fingerprint
    from kvcache.core.layout import Geometry as Geometry
    from kvcache.core.manager import Manager as Manager
    from kvcache.core.media import Media as Media, PromptEmbeddings as PromptEmbeddings
    from kvcache.core.records import (
        UNLIMITED as UNLIMITED,
        ArenaStats as ArenaStats,
        ClassStats as ClassStats,
        Grant as Grant,
        GroupStats as GroupStats,
        Hit as Hit,
        ManagerStats as ManagerStats,
        RequestInfo as RequestInfo,
        StatePlan as StatePlan,
    )
    from kvcache.core.specs import (
        ChunkedLocal as ChunkedLocal,
        Compressed as Compressed,
        CrossAttention as CrossAttention,
        FullAttention as FullAttention,
        GroupRules as GroupRules,
        IndexedAttention as IndexedAttention,
        LatentAttention as LatentAttention,
        LatentWindow as LatentWindow,
        PoolingState as PoolingState,
        RecurrentState as RecurrentState,
        RingBuffer as RingBuffer,
        SlidingWindow as SlidingWindow,
    )
    from kvcache.retention import (
        Dense as Dense,
        RetentionPlan as RetentionPlan,
        RetentionPolicy as RetentionPolicy,
        Sparse as Sparse,
        TurnShape as TurnShape,
    )


def __getattr__(name: str) -> object:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'kvcache' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
