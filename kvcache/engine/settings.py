"""What an engine is told once: its limits, and how it chooses."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.core.errors import ConfigError
from kvcache.engine.costs import Loads

MAX_WAIT_SECONDS = 86_400.0


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Limits of one engine."""

    token_budget: int = 512
    """Most tokens computed in one step."""
    max_requests: int = 16
    """Most requests that run or load at one time."""
    max_waiting: int = 4096
    """Most requests that wait for their turn; more are refused."""
    idle_wait_seconds: float = 0.002
    """How long one step waits for transfers or pages when it has nothing to compute."""
    stall_seconds: float = 60.0
    """After so long without any progress, and without a load in flight, the oldest request is given up."""
    priority_seconds: float = 60.0
    """A request goes before one of the next lower priority that came up to so much earlier."""
    loads: str = "auto"
    """What only a tier holds: `always` load it, `never`, or `auto`: unless computing is cheaper."""
    debug: bool = False
    """Recount the manager's invariants after each step. O(pages) per step."""

    def __post_init__(self) -> None:
        if self.loads not in [each.value for each in Loads]:
            raise ConfigError(
                f"loads is {self.loads!r}: choose from {', '.join(each.value for each in Loads)}"
            )
        if self.max_waiting < 1:
            raise ConfigError(f"max_waiting is {self.max_waiting}: it must be above 0")
        for name in ("idle_wait_seconds", "stall_seconds", "priority_seconds"):
            if not 0 < getattr(self, name) <= MAX_WAIT_SECONDS:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}: it must be above 0 and at most"
                    f" {MAX_WAIT_SECONDS}"
                )
