"""Sessions that return to a device pool too small for them, on one engine in several ways.

    unlimited    a device pool that holds every session: the reference
    host         a third of it, and host memory below
    disk         a third of it, and a folder of files below, with no host memory between
    recompute    a third of it, and nothing below
    unthrottled  as unlimited, and all sessions run together

Round by round every session asks its next turn, all at once, in an order that the seed shuffles anew
for each round and all ways alike. The engine runs as many together as the small pool holds. All ways
are given the same prompts: the reference's answers stand in every history. Within a round the ways
take turns of a few seconds of work each, so that a machine that is busy for a while is so for all;
between them an engine stands still, with no transfer in flight, and its own clock does not run.
Waiting for those transfers counts as its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.folder import temporary_folder
from kvcache.bench.medium import medium
from kvcache.bench.sessions_settings import WAYS, SessionsBench
from kvcache.bench.sessions_way import DRAFT_TOKENS, Played, Way
from kvcache.core.errors import ConfigError
from kvcache.core.manager import Manager
from kvcache.engine.engine import Engine
from kvcache.engine.model import Model
from kvcache.engine.runner import TorchRunner
from kvcache.engine.speculative import first_layers, joint_geometry
from kvcache.retention import Sparse

SLICE_SECONDS = 4.0
"""Work of one way before the next one has its turn: long beside the transfers that are waited for."""

Progress = Callable[[str], None]


def play_sessions(
    bench: SessionsBench, model: Model, progress: Progress
) -> tuple[list[list[NDArray[np.int32]]], list[Played], dict[str, Any]]:
    """All rounds in all ways: prompts of each round by session, what every way did, on what medium.

    Raises:
        ConfigError: sessions longer than the model's context, more memory or disk than there is.
    """
    if bench.session_tokens > model.context_tokens:
        raise ConfigError(
            f"a session has {bench.session_tokens} tokens at its end, the context of {model.name}"
            f" is {model.context_tokens}: lower --turns, --start-tokens or --turn-tokens"
        )
    rng = np.random.default_rng(bench.seed)
    draft = None
    if bench.draft:
        try:
            draft = Model(first_layers(model.weights, bench.draft), kv_dtype=model.kv_dtype)
            joint_geometry(model, draft, DRAFT_TOKENS)
        except ConfigError as error:
            raise ConfigError(f"--draft {bench.draft}: {error}") from error

    def said(tokens: int) -> NDArray[np.int32]:
        return rng.integers(0, model.vocab_size, tokens).astype(np.int32)

    asked = []
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder(bench.folder))
        found = medium(folder, allow_tmpfs=bench.allow_tmpfs)
        ways = []
        for name in WAYS:
            ways.append(Way(name, bench, model, draft, str(folder / name)))
            stack.callback(ways[-1].close)
        _warm_up(model)
        histories = [said(bench.start_tokens) for _ in range(bench.sessions)]
        for number in range(bench.turns):
            prompts = list(histories)
            asked.append(prompts)
            order = shuffled(bench, number)
            for way in ways:
                way.ask(prompts, order)
            _take_turns(ways, number, bench, progress)
            answers = [turn.output for turn in ways[0].end_round()]
            for way in ways[1:]:
                way.end_round()
            histories = [
                np.concatenate([prompt, np.array(answer, np.int32), said(bench.turn_tokens)])
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
    return asked, [way.played for way in ways], found


def shuffled(bench: SessionsBench, number: int) -> list[int]:
    """In which order the sessions ask in a round.

    In the same order every time, a pool that evicts by age would always lose the one that asks next.
    """
    order: list[int] = (
        np.random.default_rng([bench.seed, number]).permutation(bench.sessions).tolist()
    )
    return order


def _take_turns(ways: Sequence[Way], number: int, bench: SessionsBench, progress: Progress) -> None:
    """Every way works through the round, a slice at a time; another one begins in each round."""
    first = number % len(ways)
    order = [*ways[first:], *ways[:first]]
    while any(way.left for way in order):
        for way in order:
            if way.left:
                done = bench.sessions - way.left
                progress(
                    f"turn {number + 1} of {bench.turns}, {way.played.way}: {done} of"
                    f" {bench.sessions} sessions"
                )
                way.work(SLICE_SECONDS)


def _warm_up(model: Model) -> None:
    """Compute something, so that the first round does not pay for what torch does once."""
    slabs = model.geometry.slabs_needed(128)
    engine = Engine(
        TorchRunner(model, slabs), Manager(model.geometry, slabs=slabs, retention=Sparse())
    )
    engine.add_request(np.arange(64, dtype=np.int32), max_new_tokens=2)
    engine.run()
