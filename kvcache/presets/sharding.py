"""What one tensor-parallel rank holds: heads are dealt out, and kept whole where there are too few."""

from __future__ import annotations


def per_rank(heads: int, tp: int) -> int:
    """Heads of the rank that has most: `heads` over `tp` ranks, replicated below one head each."""
    return -(-heads // tp)
