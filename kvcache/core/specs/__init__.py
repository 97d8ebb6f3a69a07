"""One file, one class for each kind of attention."""

from kvcache.core.specs.base import GroupRules, GroupSpec
from kvcache.core.specs.chunked_local import ChunkedLocal
from kvcache.core.specs.compressed import Compressed
from kvcache.core.specs.cross import CrossAttention
from kvcache.core.specs.full import FullAttention
from kvcache.core.specs.indexed import IndexedAttention
from kvcache.core.specs.latent import LatentAttention
from kvcache.core.specs.latent_window import LatentWindow
from kvcache.core.specs.pooling import PoolingState
from kvcache.core.specs.recurrent import RecurrentState
from kvcache.core.specs.ring import RingBuffer
from kvcache.core.specs.window import SlidingWindow

__all__ = [
    "ChunkedLocal",
    "Compressed",
    "CrossAttention",
    "FullAttention",
    "GroupRules",
    "GroupSpec",
    "IndexedAttention",
    "LatentAttention",
    "LatentWindow",
    "PoolingState",
    "RecurrentState",
    "RingBuffer",
    "SlidingWindow",
]
