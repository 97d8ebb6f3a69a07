"""Two synthetic agent traces: a shared system prompt, then contexts that grow with each turn.

    session s:   [ system (shared) | first | output 0 | tool 1 | output 1 | tool 2 | ... ]
    prompt of turn t:  everything before output t          next turn: prompt + output + tool result

Every token is drawn from one `random.Random(seed)` in a fixed order (system; then, for each session,
a length and the first part; then, turn by turn and session by session, the output and the tool
result), so that a trace is the same list of tokens wherever it is made.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.core.errors import ConfigError

VOCABULARY = 150_000


class AgentRequest(NamedTuple):
    """One turn of one session. Prompts are views of one array for each session."""

    session: int
    turn: int
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class AgentTrace:
    """What to generate: sizes in tokens, the last three as means of uniform draws."""

    sessions: int
    turns: int
    system_tokens: int
    first_tokens: int
    tool_tokens: int
    output_tokens: int
    seed: int
    max_running: int
    """Requests that run at once."""

    def __post_init__(self) -> None:
        for name in ("sessions", "turns", "first_tokens", "output_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise ConfigError(f"AgentTrace.{name} is {getattr(self, name)}: at least 1")
        if min(self.system_tokens, self.tool_tokens) < 0:
            raise ConfigError("AgentTrace.system_tokens and tool_tokens: 0 or more")

    def generate(self) -> list[AgentRequest]:
        """The requests, turn by turn. O(tokens)."""
        draw = random.Random(self.seed)
        system = _tokens(draw, self.system_tokens)
        contexts = [
            [system, _tokens(draw, _length(draw, self.first_tokens, 0.5, 1.5))]
            for _ in range(self.sessions)
        ]
        outputs: list[tuple[int, int, int, NDArray[np.int32]]] = []
        for turn in range(self.turns):
            for session, context in enumerate(contexts):
                output = _tokens(draw, _length(draw, self.output_tokens, 0.5, 1.5))
                prompt_tokens = sum(map(len, context))
                outputs.append((session, turn, prompt_tokens, output))
                context.append(output)
                context.append(_tokens(draw, _length(draw, self.tool_tokens, 0.3, 1.7)))
        whole = [np.concatenate(context) for context in contexts]
        return [
            AgentRequest(session, turn, whole[session][:prompt_tokens], output)
            for session, turn, prompt_tokens, output in outputs
        ]


def _length(draw: random.Random, mean: int, low: float, high: float) -> int:
    return int(mean * draw.uniform(low, high))


def _tokens(draw: random.Random, count: int) -> NDArray[np.int32]:
    return np.array([draw.randrange(VOCABULARY) for _ in range(count)], np.int32)


def ideal_hit_tokens(requests: list[AgentRequest], *, declared: bool, grid_tokens: int) -> int:
    """Tokens that a cache without eviction can serve: whole grid units, the last token never.

    The first turn of the first session has nothing to hit. Those of the others hit the system
    prompt: all of them if it is declared; otherwise all but the second one, which is where it shows
    that the prefix is shared (a full-attention model does not need to be shown; this is the figure
    for kinds that keep few states). Later turns hit all that was computed in the turn before.
    """
    shared = _shared_tokens(requests)
    computed: dict[int, int] = {}
    hit = 0
    for seen, request in enumerate(requests):
        known = computed.get(request.session, shared if seen > (0 if declared else 1) else 0)
        hit += min(known, len(request.prompt) - 1) // grid_tokens * grid_tokens
        computed[request.session] = len(request.prompt) + len(request.output) - 1
    return hit


def _shared_tokens(requests: list[AgentRequest]) -> int:
    """The prefix that the first turns of all sessions have in common."""
    first = [r.prompt for r in requests if r.turn == 0]
    shared = min(map(len, first))
    for prompt in first[1:]:
        differ = np.flatnonzero(prompt[:shared] != first[0][:shared])
        shared = int(differ[0]) if len(differ) else shared
    return shared


TRACES = {
    "short": AgentTrace(
        sessions=12,
        turns=8,
        system_tokens=4096,
        first_tokens=2048,
        tool_tokens=1536,
        output_tokens=384,
        seed=1,
        max_running=4,
    ),
    "long": AgentTrace(
        sessions=6,
        turns=4,
        system_tokens=8192,
        first_tokens=56000,
        tool_tokens=4000,
        output_tokens=400,
        seed=2,
        max_running=2,
    ),
}
"""96 requests of up to 22 thousand tokens, four at a time; 24 of up to 89 thousand, two at a time."""
