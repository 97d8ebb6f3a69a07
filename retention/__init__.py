"""Which recurrent states (and windows) to keep, as policies that the core asks for positions."""

if not __name__.startswith("kvcache."):
    raise ImportError(
        "import kvcache.retention, not retention: the folder is part of the kvcache package"
    )

from kvcache.core.retain import RetentionPlan, RetentionPolicy, TurnShape
from kvcache.retention.policy import Dense, Sparse

__all__ = ["Dense", "RetentionPlan", "RetentionPolicy", "Sparse", "TurnShape"]
