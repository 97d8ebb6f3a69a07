"""One file, one class for each kind of attention."""

from kvcache.core.specs.base import GroupSpec
from kvcache.core.specs.full import FullAttention
from kvcache.core.specs.recurrent import RecurrentState

__all__ = ["FullAttention", "GroupSpec", "RecurrentState"]
