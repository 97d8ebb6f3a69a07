"""What an engine takes: its parts, requests, and the tokens of a runner, checked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.driver import Offload
from kvcache.core import arrays
from kvcache.core.errors import CapacityError, ConfigError, InputError, MisuseError
from kvcache.core.hashing import as_tokens
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.values import shown
from kvcache.engine.chunk import Runner
from kvcache.engine.settings import EngineSettings

MAX_PRIORITY = 1_000_000
"""And as much below 0."""


def require_parts(
    runner: Runner, manager: Manager, offload: Offload | None, settings: EngineSettings | None
) -> None:
    """Parts that fit each other, or a ConfigError that names what does not."""
    if not isinstance(manager, Manager):
        raise ConfigError(f"manager is {shown(manager)}: give a Manager")
    if offload is not None and not isinstance(offload, Offload):
        raise ConfigError(f"offload is {shown(offload)}: give an Offload, or None")
    if settings is not None and not isinstance(settings, EngineSettings):
        raise ConfigError(f"settings are {shown(settings)}: give EngineSettings")
    if not isinstance(getattr(runner, "geometry", None), Geometry):
        raise ConfigError(
            f"runner is {shown(runner)}: give a runner, such as TorchRunner(model, slabs)"
        )
    if runner.geometry != manager.geometry:
        raise ConfigError("the runner and the manager were built for different geometries")
    if offload is not None and offload.manager is not manager:
        raise ConfigError("the offload was made for another manager: give both the same one")


def validated(
    prompt: Sequence[int] | NDArray[np.integer],
    max_new_tokens: int,
    runner: Runner,
    manager: Manager,
) -> NDArray[np.int32]:
    """The prompt as an array, if the model and the arena can take it with its output.

    Raises:
        InputError: an empty prompt, a token id out of range, more tokens than the context.
        CapacityError: it can never fit in the arena.
    """
    tokens = as_tokens(prompt)
    arrays.flat([max_new_tokens], np.int64, "max_new_tokens")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}: it must be above 0")
    if len(tokens) == 0:
        raise InputError("the prompt is empty: give at least one token")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= runner.vocab_size:
        raise InputError(
            f"the prompt has token ids from {low} to {high}: the model's vocabulary is 0 to"
            f" {runner.vocab_size - 1}"
        )
    total = len(tokens) + max_new_tokens
    if total > runner.context_tokens:
        raise InputError(
            f"the prompt has {len(tokens)} tokens and max_new_tokens is {max_new_tokens}:"
            f" together {total}, the model's context is {runner.context_tokens};"
            " shorten the prompt or lower max_new_tokens"
        )
    geometry, slabs = manager.geometry, manager.arena_stats().slabs
    need = geometry.slabs_needed(total)
    if need > slabs:
        raise CapacityError(
            f"a request of {total} tokens ({len(tokens)} in the prompt, max_new_tokens"
            f" {max_new_tokens}) needs {need} slabs of {geometry.slab_bytes:,} bytes, the arena"
            f" has {slabs}: give it more memory (slabs), shorten the prompt or lower"
            " max_new_tokens"
        )
    return tokens


def as_sampled(sampled: object, count: int, runner: Runner) -> NDArray[np.int32]:
    """What a runner gave, if it is one token of the vocabulary for each chunk."""
    tokens = arrays.flat(sampled, np.int32, "the runner's tokens")  # type: ignore[arg-type]
    if len(tokens) != count or not ((tokens >= 0) & (tokens < runner.vocab_size)).all():
        raise MisuseError(
            f"the runner gave {len(tokens)} tokens {tokens[:4]}... for {count} chunks of a"
            f" vocabulary of {runner.vocab_size}: one token for each chunk"
        )
    return tokens
