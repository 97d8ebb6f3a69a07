"""The same prompts, in the same order, on three engines; then on a fourth, in a process of its own.

    recompute    small device pool, no tier: what was evicted is computed again
    offload      the same small pool, below it host memory over a disk: what was evicted is restored
    everything   a device pool that holds all sessions: the best there can be
    restarted    the small pool of a new process, below it the disk that `offload` left

Turns of all sessions alternate: the first turn of each, then the second of each, and so on. Each is
played on one engine after the other, as the only request and with no transfer in flight: a time to
first token is that of lookup, load, and prefill of what was not found, and a machine that is busy
for a while is so for all. At the end `offload` is closed, and every session has one turn more: in a
new process that has nothing but the folder of the disk, and recomputed here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.demo.restart import Restart, SecondProcess
from kvcache.bench.demo.script import DemoSettings, Kit, Script
from kvcache.bench.demo.turn import Turn
from kvcache.bench.pools import STATES_PER_TURN, pages_for, slabs_for
from kvcache.connectors.base import Connector
from kvcache.connectors.chain import ChainConnector
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.disk import DiskConnector
from kvcache.connectors.driver import Offload
from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.request import Finished, Reason, Token
from kvcache.engine.runner import TorchRunner
from kvcache.retention import Sparse

MODES = ("recompute", "offload", "everything")
"""The first one, which reuses least, is the reference of the outputs."""
RESTARTED = "restarted"

TOKEN_BUDGET = 512
SMALL_STATE_PAGES = 6
DRAIN_SECONDS = 60.0


@dataclass(slots=True)
class Played:
    """All turns of one mode."""

    mode: str
    device_bytes: int
    host_bytes: int
    turns: list[Turn] = field(default_factory=list)
    seconds: float = 0.0
    """Spent on the turns, stores of finished ones included."""
    host_used_bytes: int = 0
    disk_bytes: int = 0
    """Of the pages that were on disk when it was opened."""


class Sizes(NamedTuple):
    """Memory of one mode."""

    slabs: int
    """Of the device's arena."""
    tier_pages: list[int] | None
    """Of each group, in host memory and on disk; None: no tier."""


def size_pools(settings: DemoSettings, geometry: Geometry, mode: str) -> Sizes:
    """Room for so many tokens of attention and the states that go with them.

    Raises:
        ConfigError: the device pool is smaller than one request.
    """
    need = settings.session_tokens_after_restart
    every = settings.sessions * need
    small = settings.device_tokens or need + need // 4
    if small < need:
        raise ConfigError(
            f"--device-tokens is {small}: a session's last turn alone has {need} tokens; raise it,"
            " or lower --prompt-tokens or --turns"
        )
    states = settings.sessions * settings.turns * STATES_PER_TURN

    if mode == "everything":
        pages = pages_for(geometry, max(every + need, small), states + SMALL_STATE_PAGES)
        return Sizes(slabs_for(geometry, pages), None)
    host = None
    if mode in {"offload", RESTARTED}:
        host = pages_for(geometry, settings.host_tokens or every + need, states)
    return Sizes(slabs_for(geometry, pages_for(geometry, small, SMALL_STATE_PAGES)), host)


class Player:
    """One mode's engine. `close` it. `folder`: of the disk, where the mode has one."""

    def __init__(self, mode: str, settings: DemoSettings, kit: Kit, folder: Path) -> None:
        geometry = kit.model.geometry
        slabs, pages = size_pools(settings, geometry, mode)
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
        self._host: Connector | None = None
        self.played = Played(mode, slabs * geometry.slab_bytes, 0)
        if pages is not None:
            tier = self._tier(mode, kit, pages, folder)
            self._offload = Offload(manager, tier, self._runner.regions())
        self._engine = Engine(
            self._runner,
            manager,
            self._offload,
            settings=EngineSettings(token_budget=TOKEN_BUDGET),
        )

    def _tier(self, mode: str, kit: Kit, pages: list[int], folder: Path) -> Connector:
        geometry = kit.model.geometry
        try:
            self._host = None if mode == RESTARTED else CpuConnector(geometry, pages=pages)
            disk = DiskConnector(
                geometry,
                folder=folder,
                fingerprint=kit.model.fingerprint(),
                layout="whole",
                pages=pages,
            )
        except ConfigError as error:
            raise ConfigError(f"--host-tokens or --sessions is too large: {error}") from error
        self.played.disk_bytes = disk.scheduler.stats().used_bytes
        if self._host is None:
            return disk
        self.played.host_bytes = geometry.pool_bytes(pages)
        return ChainConnector(self._host, disk)

    def play(self, prompt: NDArray[np.int32], session: int, number: int, shared: int) -> Turn:
        """`ask`, and it counts among the turns that were played."""
        begun = time.perf_counter()
        turn = self.ask(prompt, session, number, shared)
        self.played.seconds += time.perf_counter() - begun
        self.played.turns.append(turn)
        return turn

    def ask(
        self, prompt: Sequence[int] | NDArray[np.int32], session: int, number: int, shared: int
    ) -> Turn:
        """One turn to its end; what it left is stored."""
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
        return Turn(
            session, number, shared, end.usage, end.timing.first_token_seconds, output, gaps
        )

    def _settle(self) -> None:
        """Store what the last request left."""
        if self._offload is not None and not self._offload.drain(DRAIN_SECONDS):
            raise ConfigError(f"the disk did not take its pages in {DRAIN_SECONDS:g} s")
        if self._host is not None:
            self.played.host_used_bytes = self._host.scheduler.stats().used_bytes

    def close(self) -> None:
        """End transfers, free the host pool. The disk keeps what it has."""
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
    folder: Path,
    *,
    begins: Callable[[str], None],
    ended: Callable[[Sequence[Turn]], None],
) -> tuple[list[Played], Restart | None]:
    """All turns of all sessions, round by round, in every mode; then one more after the restart.

    None: there was none.

    Args:
        folder: of the disk; new.
        begins: told what is played next.
        ended: told of each turn, with one entry for each mode.
    """
    with ExitStack() as stack:
        players = [Player(mode, settings, kit, folder) for mode in MODES]
        for player in players:
            stack.callback(player.close)
        histories = list(script.openings)
        for number in range(settings.turns):
            for session in range(settings.sessions):
                shared = _say_more(histories, session, number, script)
                turns = []
                for player in players:
                    begins(f"turn {number + 1} session {session + 1}: {player.played.mode}")
                    turns.append(player.play(histories[session], session, number, shared))
                _hear_answer(histories, session, turns[0])
                ended(turns)
        restart = None
        if settings.restart:
            players[1].close()
            begins("a new process opens the disk")
            with SecondProcess(settings, kit, folder) as second:
                recomputed: list[Turn] = []
                for session in range(settings.sessions):
                    shared = _say_more(histories, session, settings.turns, script)
                    begins(f"turn {settings.turns + 1} session {session + 1}: both")
                    asked = histories[session], session, settings.turns, shared
                    recomputed.append(players[0].ask(*asked))
                    ended([recomputed[-1], second.ask(*asked)])
                restart = second.end(recomputed)
    return [player.played for player in players], restart


def _say_more(histories: list[NDArray[np.int32]], session: int, number: int, script: Script) -> int:
    """The user's next message, if it is not the first. How many tokens were computed before."""
    if not number:
        return 0
    # The last token of an answer is never computed by the turn that gave it.
    shared = len(histories[session]) - 1
    said = script.follow_ups[session][number - 1]
    histories[session] = np.concatenate([histories[session], said])
    return shared


def _hear_answer(histories: list[NDArray[np.int32]], session: int, turn: Turn) -> None:
    """The reference's answer in every history: all modes see the same prompts."""
    answer = np.array(turn.output, np.int32)
    histories[session] = np.concatenate([histories[session], answer])


def warm_up(kit: Kit) -> None:
    """Compute something, so that the first turn does not pay for what torch does once."""
    geometry = kit.model.geometry
    slabs = geometry.slabs_needed(256)
    manager = Manager(geometry, slabs=slabs, retention=Sparse())
    engine = Engine(TorchRunner(kit.model, slabs), manager)
    engine.add_request(np.arange(64, dtype=np.int32), max_new_tokens=2)
    engine.run()
