"""The same prompts, in the same order, on three engines.

    recompute    small device pool, no tier: what was evicted is computed again
    offload      the same small pool, host memory below it: what was evicted is restored
    everything   a device pool that holds all sessions: the best there can be

Turns of all sessions alternate: the first turn of each, then the second of each, and so on. Each is
played on one engine after the other, as the only request and with no transfer in flight: a time to
first token is that of lookup, load, and prefill of what was not found, and a machine that is busy
for a while is so for all three. At the end the last turn of all sessions is asked once more, all
together: that is continuous batching, measured by its throughput.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.demo.script import DemoSettings, Kit, Script
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.driver import Offload
from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.request import Finished, Reason, Token, Usage
from kvcache.engine.runner import TorchRunner
from kvcache.retention import Sparse

MODES = ("recompute", "offload", "everything")
"""The first one, which reuses least, is the reference of the outputs."""

TOKEN_BUDGET = 512
STATES_PER_TURN = 4
"""Recurrent states that a turn leaves at most: replay boundary, end of turn, two in progress."""
SMALL_STATE_PAGES = 6
DRAIN_SECONDS = 60.0


class Turn(NamedTuple):
    """One request and what became of it."""

    session: int
    number: int
    shared_tokens: int
    """Of the prompt: computed by the turn before. 0 for a first turn."""
    usage: Usage
    first_token_seconds: float
    output: list[int]
    gaps: list[float]
    """For each output token, by how much its logit beat the second best."""

    @property
    def recomputed_tokens(self) -> int:
        """Computed by an earlier turn, and now again."""
        return max(0, self.shared_tokens - self.usage.cached_tokens)


class Together(NamedTuple):
    """The last turn of all sessions, submitted at one time."""

    seconds: float
    """From the first submission to the last token."""
    outputs: list[list[int]]
    """By session."""


@dataclass(slots=True)
class Played:
    """All turns of one mode."""

    mode: str
    device_bytes: int
    host_bytes: int
    turns: list[Turn] = field(default_factory=list)
    seconds: float = 0.0
    """Spent on the turns one by one, stores of finished ones included."""
    host_used_bytes: int = 0
    together: Together | None = None


class Sizes(NamedTuple):
    """Memory of one mode."""

    slabs: int
    """Of the device's arena."""
    host_pages: list[int] | None
    """Of each group; None: no tier."""


def size_pools(settings: DemoSettings, geometry: Geometry, mode: str) -> Sizes:
    """Room for so many tokens of attention and the states that go with them.

    Raises:
        ConfigError: the device pool is smaller than one request.
    """
    need = settings.session_tokens
    every = settings.sessions * need
    small = settings.device_tokens or need + need // 4
    if small < need:
        raise ConfigError(
            f"--device-tokens is {small}: a session's last turn alone has {need} tokens; raise it,"
            " or lower --prompt-tokens or --turns"
        )
    states = settings.sessions * settings.turns * STATES_PER_TURN

    def pages(tokens: int, state_pages: int) -> list[int]:
        return [
            state_pages if rules.kind == "state" else -(-tokens // rules.block_tokens)
            for rules in geometry.rules
        ]

    if mode == "everything":
        return Sizes(
            _slabs(geometry, pages(max(every + need, small), states + SMALL_STATE_PAGES)), None
        )
    host = pages(settings.host_tokens or every + need, states) if mode == "offload" else None
    return Sizes(_slabs(geometry, pages(small, SMALL_STATE_PAGES)), host)


def _slabs(geometry: Geometry, pages: Sequence[int]) -> int:
    """Slabs that so many pages of each group fill; memory moves between the groups later."""
    of_class = [0] * len(geometry.pages_per_slab)
    for count, c in zip(pages, geometry.class_of_group, strict=True):
        of_class[c] += count
    return sum(-(-n // k) for n, k in zip(of_class, geometry.pages_per_slab, strict=True))


class Player:
    """One mode's engine. `close` it."""

    def __init__(self, mode: str, settings: DemoSettings, kit: Kit) -> None:
        geometry = kit.model.geometry
        slabs, host = size_pools(settings, geometry, mode)
        self._output_tokens = settings.output_tokens
        try:
            self._runner = TorchRunner(kit.model, slabs)
        except ConfigError as error:
            raise ConfigError(f"--device-tokens or --sessions is too large: {error}") from error
        manager = Manager(
            geometry,
            slabs=slabs,
            movable=True,
            retention=Sparse(),
            fingerprint=kit.model.fingerprint(),
            seed=settings.seed,
        )
        self._offload: Offload | None = None
        if host is not None:
            try:
                connector = CpuConnector(geometry, pages=host, seed=settings.seed)
            except ConfigError as error:
                raise ConfigError(f"--host-tokens or --sessions is too large: {error}") from error
            self._offload = Offload(manager, connector, self._runner.regions())
        self._engine = Engine(
            self._runner,
            manager,
            self._offload,
            settings=EngineSettings(token_budget=TOKEN_BUDGET),
        )
        host_bytes = geometry.pool_bytes(host) if host is not None else 0
        self.played = Played(mode, slabs * geometry.slab_bytes, host_bytes)

    def ask(self, prompt: NDArray[np.int32], session: int, number: int, shared: int) -> Turn:
        """Play one turn to its end, and store what it left."""
        begun = time.perf_counter()
        self._engine.add_request(prompt, max_new_tokens=self._output_tokens)
        output: list[int] = []
        gaps: list[float] = []
        for event in self._engine.stream():
            if isinstance(event, Token):
                output.append(event.token)
                gaps.append(float(self._runner.last_gaps[0]))  # the batch has no other chunk
            else:
                end: Finished = event
        _require_whole(session, end.reason)
        self._settle()
        self.played.seconds += time.perf_counter() - begun
        turn = Turn(
            session, number, shared, end.usage, end.timing.first_token_seconds, output, gaps
        )
        self.played.turns.append(turn)
        return turn

    def ask_together(self, prompts: Sequence[NDArray[np.int32]]) -> None:
        """Play one turn of each session, all submitted before the first step."""
        begun = time.perf_counter()
        ids = [self._engine.add_request(p, max_new_tokens=self._output_tokens) for p in prompts]
        results = self._engine.run()
        seconds = time.perf_counter() - begun
        for session, request in enumerate(ids):
            _require_whole(session, results[request].reason)
        self.played.together = Together(seconds, [results[i].tokens for i in ids])
        self._settle()

    def _settle(self) -> None:
        """Store what the last request left."""
        if self._offload is not None:
            self._offload.drain(DRAIN_SECONDS)
            self.played.host_used_bytes = self._offload.stats().used_bytes

    def close(self) -> None:
        """End transfers, free the host pool."""
        if self._offload is not None:
            self._offload.close()


def _require_whole(session: int, reason: Reason) -> None:
    if reason is not Reason.LENGTH:
        raise ConfigError(
            f"session {session + 1} could not go on ({reason.value}): raise --device-tokens"
        )


def play_turns(
    settings: DemoSettings,
    kit: Kit,
    script: Script,
    *,
    begins: Callable[[str], None],
    ended: Callable[[Sequence[Turn]], None],
) -> list[Played]:
    """All turns of all sessions, round by round, then the last ones together, in every mode.

    Args:
        begins: told what is played next.
        ended: told of each turn, with one entry for each mode.
    """
    with ExitStack() as stack:
        players = [Player(mode, settings, kit) for mode in MODES]
        for player in players:
            stack.callback(player.close)
        histories = list(script.openings)
        prompts = list(histories)
        for number in range(settings.turns):
            for session in range(settings.sessions):
                shared = 0
                if number:
                    # The last token of an answer is never computed by the turn that gave it.
                    shared = len(histories[session]) - 1
                    said = script.follow_ups[session][number - 1]
                    histories[session] = np.concatenate([histories[session], said])
                prompts[session] = histories[session]
                turns = []
                for player in players:
                    begins(f"turn {number + 1} session {session + 1}: {player.played.mode}")
                    turns.append(player.ask(prompts[session], session, number, shared))
                # The reference's answer in every history: all modes see the same prompts.
                answer = np.array(turns[0].output, np.int32)
                histories[session] = np.concatenate([histories[session], answer])
                ended(turns)
        for player in players:
            begins(f"all sessions together: {player.played.mode}")
            player.ask_together(prompts)
    return [player.played for player in players]


def warm_up(kit: Kit) -> None:
    """Compute something, so that the first turn does not pay for what torch does once."""
    geometry = kit.model.geometry
    slabs = geometry.slabs_needed(256)
    manager = Manager(geometry, slabs=slabs, retention=Sparse())
    engine = Engine(TorchRunner(kit.model, slabs), manager)
    engine.add_request(np.arange(64, dtype=np.int32), max_new_tokens=2)
    engine.run()
