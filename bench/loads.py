"""Loading or computing: how long a prompt whose prefix a tier has takes to its first token.

One engine for each choice (`EngineSettings.loads`) and tier. Each computes prompts of several lengths
once, so that the tier has them and `auto` has measured a prefill; then again and again the device
forgets everything and each prompt is asked anew, by all choices in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.pools import STATES_PER_TURN, pages_for, slabs_for
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.disk import DiskConnector
from kvcache.connectors.driver import Offload
from kvcache.core.errors import InvariantError
from kvcache.core.manager import Manager
from kvcache.engine import smollm2, tiny
from kvcache.engine.costs import Loads
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.model import Model
from kvcache.engine.model_file import find_model_file
from kvcache.engine.runner import TorchRunner
from kvcache.retention import Sparse

TIERS = ("host", "disk")
PROMPT_TOKENS = (33, 129, 513)
"""Of each prompt; 16 are a page: all but the last token can be loaded."""
MOST_SLOWER = 1.1
"""What `auto` may take beside the better of always and never."""
DRAIN_SECONDS = 60.0


def load_model(name: str) -> Model:
    """`smollm2`, `tiny`, or `auto`: SmolLM2 where it is installed."""
    if name == "auto":
        name = "tiny" if find_model_file() is None else "smollm2"
    return smollm2.load_model() if name == "smollm2" else tiny.build_model()


class Choice:
    """An engine over a tier that loads always, never, or as it thinks best. `close` it."""

    def __init__(
        self,
        loads: Loads,
        tier: str,
        model: Model,
        prompts: Sequence[NDArray[np.int32]],
        folder: str,
    ) -> None:
        geometry, name = model.geometry, model.fingerprint()
        tokens = sum(len(prompt) + 16 for prompt in prompts)
        pages = pages_for(geometry, tokens, STATES_PER_TURN * len(prompts))
        slabs = slabs_for(geometry, pages)
        runner = TorchRunner(model, slabs)
        self._manager = Manager(
            geometry, slabs=slabs, movable=True, retention=Sparse(), fingerprint=name
        )
        connector = (
            CpuConnector(geometry, pages=pages)
            if tier == "host"
            else DiskConnector(
                geometry, folder=folder, fingerprint=name, layout="whole", pages=pages
            )
        )
        self._offload = Offload(self._manager, connector, runner.regions())
        settings = EngineSettings(loads=loads.value)
        self._engine = Engine(runner, self._manager, self._offload, settings=settings)

    def first_token(self, prompt: NDArray[np.int32]) -> tuple[float, int]:
        """Seconds to the first token with nothing on the device, and how much of it was loaded."""
        self._manager.clear()
        begin = time.perf_counter()
        request = self._engine.add_request(prompt, max_new_tokens=1)
        usage = self._engine.run()[request].usage
        seconds = time.perf_counter() - begin
        if not self._offload.drain(DRAIN_SECONDS):
            raise InvariantError(f"transfers did not end in {DRAIN_SECONDS:g} s")
        return seconds, usage.host_tokens

    def close(self) -> None:
        """End the tier."""
        self._offload.close()


def measure_loads(
    model: Model, tiers: Sequence[str], repeats: int, folder: Path, seed: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Medians for each tier and length, as plain values.

    Raises:
        ConfigError: less memory or disk than that takes.
    """
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, model.vocab_size, n).astype(np.int32) for n in PROMPT_TOKENS]
    rows = []
    for tier in tiers:
        with ExitStack() as stack:
            choices: dict[str, Choice] = {}
            for loads in Loads:
                place = str(folder / f"{tier}-{loads.value}")
                choices[loads.value] = Choice(loads, tier, model, prompts, place)
                stack.callback(choices[loads.value].close)
            taken = _taken(choices, prompts, repeats, progress)
        rows += [_row(tier, tokens, taken[tokens]) for tokens in PROMPT_TOKENS]
    return {"model": model.name, "repeats": repeats, "rows": rows}


Taken = dict[str, list[tuple[float, int]]]


def _taken(
    choices: dict[str, Choice],
    prompts: Sequence[NDArray[np.int32]],
    repeats: int,
    progress: Callable[[str], None],
) -> dict[int, Taken]:
    """Of each length what each choice took, the first time left out."""
    taken: dict[int, Taken] = {len(p): {name: [] for name in choices} for p in prompts}
    names = list(choices)
    for repeat in range(-1, repeats):
        for prompt in prompts:
            progress(f"a prompt of {len(prompt)} tokens, round {repeat + 1} of {repeats}")
            first = (repeat + 1) % len(names)
            for name in names[first:] + names[:first]:
                found = choices[name].first_token(prompt)
                if repeat >= 0:
                    taken[len(prompt)][name].append(found)
    return taken


def _row(tier: str, tokens: int, taken: Taken) -> dict[str, Any]:
    seconds = {name: median(s for s, _ in found) for name, found in taken.items()}
    better = min(("always", "never"), key=lambda name: seconds[name])
    pairs = zip(taken["auto"], taken[better], strict=True)
    return {
        "tier": tier,
        "prompt_tokens": tokens,
        "first_token_seconds": seconds,
        "loaded_tokens": {name: median(n for _, n in found) for name, found in taken.items()},
        "better": better,
        "auto_vs_better": median(ours / theirs for (ours, _), (theirs, _) in pairs),
    }


def missed_loads(found: dict[str, Any]) -> list[str]:
    """Where `auto` was too slow."""
    return [
        f"{row['tier']}, a prompt of {row['prompt_tokens']} tokens: auto takes"
        f" {row['auto_vs_better']:.2f} of the better of loading and computing, aim: at most"
        f" {MOST_SLOWER}"
        for row in found["rows"]
        if row["auto_vs_better"] > MOST_SLOWER
    ]


def describe_loads(found: dict[str, Any]) -> list[str]:
    """For people."""
    lines = [
        (
            f"first token of a prompt that the tier has, ms, {found['model']}, medians of"
            f" {found['repeats']} (aim: auto at most {MOST_SLOWER} of the better)"
        ),
        f"{'tier':6}{'tokens':>8}{'always':>10}{'never':>10}{'auto':>10}{'auto / better':>15}",
    ]
    for row in found["rows"]:
        ms = {name: 1e3 * seconds for name, seconds in row["first_token_seconds"].items()}
        lines.append(
            f"{row['tier']:6}{row['prompt_tokens']:8}{ms['always']:10.1f}{ms['never']:10.1f}"
            f"{ms['auto']:10.1f}{row['auto_vs_better']:15.2f}"
        )
    return lines
