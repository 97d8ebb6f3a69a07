"""One JSON object about a model's cache: bytes, sessions, what fits, which interval pays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcache.bench.interval import Suggestion, suggest_interval
from kvcache.bench.replay_settings import STEP_TOKENS
from kvcache.bench.reuse import (
    CODING_AGENTS,
    CODING_AGENTS_WITHOUT_JUNCTIONS,
    ReuseProfile,
    profile_trace,
)
from kvcache.bench.sizing import (
    boundary_bytes,
    boundary_pages,
    bytes_per_token,
    kept_session,
    sessions_that_fit,
)
from kvcache.bench.traces import open_trace
from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.values import human_bytes
from kvcache.presets import Model
from kvcache.presets.find import find_model
from kvcache.presets.layers import CompressedLatent, Full, Indexed, Latent

_GRID_TOKENS = 128
_LEAST_BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class SizeRequest:
    """What is asked of one model.

    Args:
        model: a preset, or the path of a config.json or of its folder.
        tp, dcp, kv_dtype: as in `kvcache.presets.serving.Serving`.
        block_tokens: of a page on one rank; None: what gives a grid of 128, 16 at least.
        interval_tokens: of cached sessions; None is dense.
        contexts: tokens of sessions.
        memory_bytes: of the cache on each rank; None: not asked what fits.
        trace: path of a trace whose reuse decides the suggested interval.
    """

    model: str
    tp: int = 1
    dcp: int = 1
    kv_dtype: str = "auto"
    block_tokens: int | None = None
    interval_tokens: int | None = 0
    contexts: tuple[int, ...] = (8_192, 131_072, 1_048_576)
    memory_bytes: int | None = None
    trace: str | None = None


def size_report(asked: SizeRequest) -> dict[str, Any]:
    """Bytes are those of one rank. Raises `ConfigError` and `InputError`, each naming the setting."""
    chosen, kind = find_model(asked.model)
    geometry = _geometry(chosen, asked)
    grid, interval, memory = geometry.grid_tokens, asked.interval_tokens, asked.memory_bytes
    if interval is not None and interval % grid:
        raise ConfigError(
            f"--interval {interval} is neither dense, nor 0, nor a multiple of the hit grid of"
            f" {grid} tokens (--block-tokens)"
        )
    junctions = _keeps_all_tokens(geometry)
    profile = CODING_AGENTS if junctions else CODING_AGENTS_WITHOUT_JUNCTIONS
    coarser: list[str] = []
    if asked.trace is not None:
        trace = open_trace(asked.trace)
        profile = profile_trace(trace, grid, junctions=junctions)
        coarser = _coarser(profile, trace.block_tokens, grid)
    slabs = None if memory is None else geometry.slabs_in(memory)
    if slabs == 0:
        raise ConfigError(
            f"--memory {human_bytes(memory or 0)} is less than one slab of this model,"
            f" {human_bytes(geometry.slab_bytes)}"
        )
    sessions = [_session(geometry, tokens, interval, slabs) for tokens in asked.contexts]
    at_boundary, per_token = boundary_bytes(geometry), bytes_per_token(geometry)
    return {
        "model": chosen.name,
        "read_from": kind,
        "tp": asked.tp,
        "dcp": asked.dcp,
        "kv_dtype": chosen.kv_format(asked.kv_dtype),
        "block_tokens": _block_tokens(geometry),
        "interval": _policy(interval),
        "bytes_per_token": _whole(per_token),
        "bytes_per_boundary": at_boundary.total,
        "state_bytes": at_boundary.states,
        "window_bytes": at_boundary.windows,
        "pooling_bytes": at_boundary.pooling,
        "boundary_as_tokens": at_boundary.total / per_token if per_token else None,
        "grid_tokens": grid,
        "padding_waste": max(geometry.padding()),
        "slab_bytes": geometry.slab_bytes,
        "groups": _groups(geometry),
        "memory_bytes": memory,
        "memory_slabs": slabs,
        "contexts": sessions,
        **_suggestion(suggest_interval(geometry, profile, memory), profile),
        "notes": [
            *_too_small(sessions),
            *_notes(chosen, geometry, asked),
            *coarser,
        ],
        "unverified": list(chosen.unverified),
        "sources": list(chosen.sources),
    }


def _geometry(chosen: Model, asked: SizeRequest) -> Geometry:
    def pages_of(block_tokens: int) -> Geometry:
        return chosen.geometry(
            block_tokens=block_tokens, tp=asked.tp, dcp=asked.dcp, kv_dtype=asked.kv_dtype
        )

    if asked.block_tokens is not None:
        try:
            return pages_of(asked.block_tokens)
        except ConfigError as error:
            pages_of(_GRID_TOKENS)  # if these do not work either, it is not the block
            raise ConfigError(f"--block-tokens {asked.block_tokens}: {error}") from error
    try:
        found = pages_of(max(_LEAST_BLOCK, _GRID_TOKENS // max(1, asked.dcp)))
    except ConfigError:  # entries of many tokens need pages of as many
        return pages_of(_GRID_TOKENS)
    return found if asked.dcp == 1 or _keeps_all_tokens(found) else pages_of(_GRID_TOKENS)


def _keeps_all_tokens(geometry: Geometry) -> bool:
    """Whether any group does: what DCP deals out, and what a junction is found by."""
    return any(rules.kind == "full" for rules in geometry.rules)


def _block_tokens(geometry: Geometry) -> int:
    """Tokens of a page of the groups that are paged by `--block-tokens`."""
    shards = [getattr(group, "dcp_shards", 1) for group in geometry.groups]
    full = [
        rules.block_tokens // n
        for rules, n in zip(geometry.rules, shards, strict=True)
        if rules.kind == "full"
    ]
    return full[0] if full else geometry.grid_tokens


def _groups(geometry: Geometry) -> list[dict[str, Any]]:
    """One object for each group, in the geometry's order."""
    found = []
    at_boundary, padding = boundary_pages(geometry), geometry.padding()
    for i, (group, rules) in enumerate(zip(geometry.groups, geometry.rules, strict=True)):
        grows = rules.kind == "full"
        found.append(
            {
                "name": group.name,
                "kind": group.kind,
                "layers": group.layers,
                "tokens_per_page": rules.block_tokens or None,
                "page_bytes": group.page_bytes,
                "bytes_per_token": _whole(group.page_bytes / rules.block_tokens) if grows else 0,
                "boundary_pages": at_boundary[i],
                "boundary_bytes": at_boundary[i] * group.page_bytes,
                "pages_per_slab": geometry.pages_per_slab[geometry.class_of_group[i]],
                "padding": padding[i],
            }
        )
    return found


def _session(
    geometry: Geometry, tokens: int, interval: int | None, slabs: int | None
) -> dict[str, Any]:
    """What one session of so many tokens takes, running and cached, and how many fit."""
    running = geometry.pages_needed(tokens)
    kept = kept_session(geometry, tokens, interval)
    fit = None
    if slabs is not None:
        fit = {
            "running": sessions_that_fit(geometry, slabs, running),
            "cached": sessions_that_fit(geometry, slabs, kept.pages) if any(kept.pages) else None,
        }
    return {
        "context_tokens": tokens,
        "running": {
            "pages": dict(zip((g.name for g in geometry.groups), running, strict=True)),
            "bytes": geometry.pool_bytes(running),
        },
        "smallest_arena_bytes": geometry.slabs_needed(tokens) * geometry.slab_bytes,
        "cached": {
            "pages": dict(zip((g.name for g in geometry.groups), kept.pages, strict=True)),
            "boundaries": kept.boundaries,
            "bytes": geometry.pool_bytes(kept.pages),
        },
        "sessions_that_fit": fit,
    }


def _suggestion(found: Suggestion, profile: ReuseProfile) -> dict[str, Any]:
    return {
        "suggested_interval": _policy(found.interval_tokens),
        "interval_reasoning": {
            "text": found.reason,
            "lru_interval": _policy(found.lru_interval_tokens),
            "memory_bytes": found.memory_bytes,
            "reuse": {
                "source": profile.source,
                "requests": profile.requests,
                "prompt_tokens": profile.prompt_tokens,
                "hit_tokens": profile.hit_tokens,
                "unique_tokens": profile.unique_tokens,
                "distant_requests": profile.distant_requests,
                "reuse_distance_tokens": dict(
                    zip(("p50", "p90", "p99"), profile.distance_tokens, strict=True)
                ),
            },
            "candidates": [
                {
                    "interval": c.interval_tokens,
                    "boundary_bytes": _whole(c.boundary_bytes),
                    "boundaries": c.boundaries,
                    "saved_tokens": c.saved_tokens,
                    "cost_tokens": c.cost_tokens,
                    "lru_cost_tokens": c.lru_cost_tokens,
                }
                for c in found.candidates
            ],
        },
    }


def _policy(interval_tokens: int | None) -> int | str:
    return "dense" if interval_tokens is None else interval_tokens


def _notes(chosen: Model, geometry: Geometry, asked: SizeRequest) -> list[str]:
    """What a reader of the numbers should know."""
    notes = chosen.kv_notes(asked.kv_dtype)
    if asked.dcp > 1 and not _keeps_all_tokens(geometry):
        notes.append(
            f"DCP {asked.dcp} changes nothing: it deals out the tokens of attention that keeps all of"
            " them, and this model has none; windows and states are on every rank"
        )
    elif asked.tp % asked.dcp and asked.tp >= asked.dcp:
        notes.append(f"DCP {asked.dcp} does not divide TP {asked.tp}: vLLM refuses it")
    elif asked.dcp > 1 and (copies := _copies(chosen, asked.tp)) < asked.dcp:
        notes.append(
            f"DCP {asked.dcp}: vLLM takes its context-parallel ranks among those that hold the same"
            f" KV, {copies} at TP {asked.tp}; here they are more ranks"
        )
    if geometry.grid_tokens > _GRID_TOKENS:
        notes.append(
            f"the hit grid is {geometry.grid_tokens} tokens: --block-tokens makes it finer, where"
            " the model allows"
        )
    indexed = any(isinstance(layers, Latent) and layers.index_dim for layers in chosen.layers)
    if indexed and chosen.kv_format(asked.kv_dtype) == "fp8":
        notes.append(
            "index keys have a byte an element and a scale in every format; on Hopper vLLM serves"
            " sparse MLA in fp8_ds_mla when fp8 is asked for"
        )
    if (extra := _step_bytes(geometry)) > 0:
        notes.append(
            f"a prefill step of {STEP_TOKENS:,} tokens has up to {human_bytes(extra)} of windows more"
            " than `running` until it ends; smaller steps have less"
        )
    if len(geometry.pages_per_slab) > 1 and asked.memory_bytes is not None:
        notes.append(
            "`cached fit` is that of an engine which copies pages (movable=True of the Manager): with"
            " pages that stay where they are, slabs of evicted sessions stay partly in use"
        )
    return [*notes, *_dealt(chosen, asked.tp)]


def _step_bytes(geometry: Geometry) -> int:
    """What a step of many tokens takes of windows beside the grid unit that `pages_needed` has."""
    more = max(0, STEP_TOKENS - geometry.grid_tokens)
    return geometry.pool_bytes(
        [
            more // rules.block_tokens if rules.kind == "span" and not rules.transient else 0
            for rules in geometry.rules
        ]
    )


def _dealt(chosen: Model, tp: int) -> list[str]:
    """Where tensor parallelism does not deal out evenly, or has more ranks than parts."""
    notes = []
    for what, count in {
        k: n for layers in chosen.layers for k, n in layers.dealt().items()
    }.items():
        if tp <= count:
            if count % tp:
                notes.append(
                    f"TP {tp} does not divide the {count} {what}: bytes are those of the rank that"
                    f" has {-(-count // tp)} of them, others have fewer; engines refuse such a TP"
                )
        else:
            uneven = (
                "" if tp % count == 0 else f"; engines refuse a TP that {count} does not divide"
            )
            notes.append(
                f"TP {tp} is more than the {count} {what}: each rank keeps one, several the same,"
                f" which costs a rank no less than TP {count}{uneven}"
            )
    return notes


def _copies(chosen: Model, tp: int) -> int:
    """Ranks that hold the same KV of every layer which keeps all tokens."""
    copies = [tp for layers in chosen.layers if isinstance(layers, Latent | CompressedLatent)]
    copies += [
        max(1, tp // layers.kv_heads)
        for layers in chosen.layers
        if isinstance(layers, Full | Indexed)
    ]
    return min(copies, default=1)


def _coarser(profile: ReuseProfile, trace_block_tokens: int, grid_tokens: int) -> list[str]:
    """Where reuse is counted in steps that are neither those of the trace nor those of hits."""
    if profile.unit_tokens in (trace_block_tokens, grid_tokens):
        return []
    return [
        (
            f"the trace's reuse is counted in steps of {profile.unit_tokens:,} tokens, the least multiple of"
            f" its blocks, {trace_block_tokens}, and of the hit grid, {grid_tokens:,}: reuse looks shorter"
            " than it is, and so does what an interval saves; a --block-tokens whose grid divides the"
            " trace's blocks, or is a multiple of them, is exact"
        )
    ]


def _too_small(sessions: list[dict[str, Any]]) -> list[str]:
    return [
        f"no session of {session['context_tokens']:,} tokens can run in this memory: the smallest"
        f" arena has {human_bytes(session['smallest_arena_bytes'])}"
        for session in sessions
        if session["sessions_that_fit"] and not session["sessions_that_fit"]["running"]
    ]


def _whole(value: float) -> float:
    """An int where it is one."""
    return int(value) if value == int(value) else value
