"""KV events: who holds which key, told in vLLM's wire format.

`publisher` and `subscriber` need pyzmq (the extra `events`) and are imported by their own names.
"""

from kvcache.core.events.decode import Decoder, WireError, decode_batch
from kvcache.core.events.encode import encode_batch, encode_batches, encode_event
from kvcache.core.events.index import ReferenceIndex, Shelf
from kvcache.core.events.labels import (
    GroupLabel,
    Labels,
    MediaSpan,
    NamespaceLabel,
    RequestLabel,
)
from kvcache.core.events.records import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    with_int_hashes,
    without_salts,
)
from kvcache.core.events.runs import ClearedRun, RemovedRun, Run, StoredRun, to_events

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_GPU",
    "MEDIUM_STORAGE",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "ClearedRun",
    "Decoder",
    "Event",
    "EventBatch",
    "GroupLabel",
    "Labels",
    "MediaSpan",
    "NamespaceLabel",
    "ReferenceIndex",
    "RemovedRun",
    "RequestLabel",
    "Run",
    "Shelf",
    "StoredRun",
    "WireError",
    "decode_batch",
    "encode_batch",
    "encode_batches",
    "encode_event",
    "to_events",
    "with_int_hashes",
    "without_salts",
]
