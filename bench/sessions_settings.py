"""What the sessions of `kvcache bench engine` are: how many, how long, and in which ways they run."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.core.errors import ConfigError

WAYS = ("unlimited", "host", "disk", "recompute", "unthrottled")
"""The first one is the reference of outputs and of throughput."""
WHOLE = ("unlimited", "unthrottled")
"""Their device pool holds every session."""
MOST = {"sessions": 256, "turns": 256, "pool_share": 64}
"""More make no sense, or no end."""


@dataclass(frozen=True, kw_only=True)
class SessionsBench:
    """What is played. Counts in tokens."""

    sessions: int = 12
    turns: int = 6
    start_tokens: int = 1024
    """Prompt of a session's first turn."""
    turn_tokens: int = 128
    """What a user adds in each further turn."""
    output_tokens: int = 64
    """Of each turn, greedy."""
    pool_share: int = 3
    """All sessions at their ends take so many times the small device pool."""
    budget_tokens: int = 512
    """Most tokens computed in one step."""
    folder: str | None = None
    """Of the disk tier; None: a temporary one."""
    allow_tmpfs: bool = False
    """It may be in memory."""
    draft: int = 0
    """So many of the model's own first layers guess tokens; 0: nobody does."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "sessions", "turns", "start_tokens", "turn_tokens", "output_tokens", "pool_share",
            "budget_tokens",
        ):  # fmt: skip
            value, most = getattr(self, name), MOST.get(name, 10**6)
            if not 1 <= value <= most:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {value}: it must be 1 to {most:,}"
                )
        if self.budget_tokens < self.sessions:
            raise ConfigError(
                f"--sessions is {self.sessions}: a step has {self.budget_tokens} tokens, and all of"
                " them may run at a time"
            )

    @property
    def session_tokens(self) -> int:
        """Of one session at its end, the last answer in it."""
        return self.start_tokens + self.turns * self.output_tokens + (
            (self.turns - 1) * self.turn_tokens
        )  # fmt: skip

    @property
    def working_set_tokens(self) -> int:
        """Of all sessions at their ends."""
        return self.sessions * self.session_tokens

    @property
    def running(self) -> int:
        """Requests that run at a time, but in `unthrottled`: what the small pool holds."""
        return max(1, self.sessions // self.pool_share)

    @property
    def pool_tokens(self) -> int:
        """Of the small device pool: one session at least."""
        return max(self.session_tokens, -(-self.working_set_tokens // self.pool_share))
