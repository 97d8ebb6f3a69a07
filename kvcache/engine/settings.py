"""What an engine is told once: its limits, and how it chooses."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.core.errors import ConfigError
from kvcache.core.values import finite, flag, shown, text, whole
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
        text(self.loads, "loads")
        if self.loads not in [each.value for each in Loads]:
            raise ConfigError(
                f"loads is {shown(self.loads)}: choose from {', '.join(each.value for each in Loads)}"
            )
        for name in ("token_budget", "max_requests", "max_waiting"):
            self._set(name, whole(getattr(self, name), name, least=1))
        for name in ("idle_wait_seconds", "stall_seconds", "priority_seconds"):
            seconds = finite(getattr(self, name), name)
            if not 0 < seconds <= MAX_WAIT_SECONDS:
                raise ConfigError(
                    f"{name} is {seconds}: it must be above 0 and at most {MAX_WAIT_SECONDS}"
                )
            self._set(name, seconds)
        self._set("debug", flag(self.debug, "debug"))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
