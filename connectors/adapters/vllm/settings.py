"""What `kv_connector_extra_config` says, and the tiers that it asks for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from kvcache.connectors.base import Connector
from kvcache.connectors.chain import ChainConnector
from kvcache.core.errors import ConfigError
from kvcache.core.hashing import Fingerprint
from kvcache.core.layout import Geometry
from kvcache.core.values import flag, shown, text, whole

CONNECTOR_GROUP = "kvcache.connectors"
"""Entry points of connectors."""

KNOWN = ("tiers", "store", "load", "weights_epoch")

LASTING_HASHES = ("sha256_cbor",)
"""Hash functions that are the same in every process, and cannot be made to collide."""

DEFAULT_STATE_TOKENS = 4096
"""For the split of a budget: tokens between two states where vLLM keeps them at its own discretion."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an operator wants it."""

    tiers: tuple[Mapping[str, Any], ...]
    """From the upper one to the lowest."""
    prompt_only: bool = False
    wait_for_loads: bool = False
    weights_epoch: int = 0


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Of `kv_connector_extra_config`.

    Raises:
        ConfigError: a setting that is not known, or a value that it cannot have.
    """
    unknown = sorted(set(config) - set(KNOWN))
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config has {', '.join(map(repr, unknown))}: it may have"
            f" {', '.join(map(repr, KNOWN))}"
        )
    tiers = config.get("tiers")
    if not isinstance(tiers, list) or not tiers or not all(isinstance(t, Mapping) for t in tiers):
        raise ConfigError(
            f'kv_connector_extra_config["tiers"] is {shown(tiers)}: give a list of tiers, such as'
            ' [{"connector": "cpu", "capacity_bytes": 68719476736}]'
        )
    for tier in tiers:
        if not text(tier.get("connector", ""), "tiers: connector"):
            raise ConfigError(
                f'a tier is {shown(dict(tier))}: it needs a "connector", such as "cpu", "disk", or'
                ' "package.module:Class"'
            )
    return Settings(
        tiers=tuple(tiers),
        prompt_only=_choice(config, "store", "all", "prompt"),
        wait_for_loads=_choice(config, "load", "async", "sync"),
        weights_epoch=whole(config.get("weights_epoch", 0), "weights_epoch", least=0),
    )


def _choice(config: Mapping[str, Any], name: str, default: str, other: str) -> bool:
    value = config.get(name, default)
    if value not in (default, other):
        raise ConfigError(
            f"kv_connector_extra_config[{name!r}] is {shown(value)}: give {default!r} or {other!r}"
        )
    return bool(value == other)


def open_tiers(
    settings: Settings,
    geometry: Geometry,
    *,
    fingerprint: Fingerprint,
    layout: str,
    hash_name: str,
    events: bool,
    state_tokens: int,
) -> Connector:
    """The tiers as one connector, the first one above the others.

    Args:
        settings: which.
        geometry: of the groups that they keep.
        fingerprint: of the model.
        layout: of the bytes in a page.
        hash_name: vLLM's hash function.
        events: whether they are to report keys.
        state_tokens: tokens between two states, for the split of a budget.
    """
    given: dict[str, object] = {
        "fingerprint": fingerprint,
        "layout": layout,
        "events": events,
        "state_interval_tokens": state_tokens,
    }
    tiers: list[Connector] = []
    try:
        for tier in settings.tiers:
            opened = _open(dict(tier), geometry, given, hash_name)
            tiers.append(opened)
        whole_tier = tiers[-1]
        for upper in reversed(tiers[:-1]):
            whole_tier = ChainConnector(upper, whole_tier)
    except BaseException:
        for connector in tiers:
            connector.worker.close()
        raise
    return whole_tier


def _open(
    options: dict[str, Any], geometry: Geometry, given: Mapping[str, object], hash_name: str
) -> Connector:
    name = options.pop("connector")
    make = find_connector(name)
    takes: Mapping[str, inspect.Parameter] = {}
    with suppress(TypeError, ValueError):
        takes = inspect.signature(make).parameters
    if "geometry" not in takes:
        raise ConfigError(f"tier {name!r} is {shown(make)}: a Connector takes a geometry first")
    if "layout" in takes and hash_name not in LASTING_HASHES:
        raise ConfigError(
            f"tier {name!r} keeps pages under vLLM's block hashes, other processes read them, and"
            f" {hash_name} may differ from one process to the next, or be made to collide: set"
            f" --prefix-caching-hash-algo {LASTING_HASHES[0]}"
        )
    unknown = sorted(set(options) - set(takes))
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        raise ConfigError(
            f"tier {name!r} has {', '.join(map(repr, unknown))}: {make.__name__} takes"
            f" {', '.join(sorted(set(takes) - {'geometry'} - set(given)))}"
        )
    own = {key: value for key, value in given.items() if key in takes}
    missing = [
        key
        for key, it in takes.items()
        if it.kind is it.KEYWORD_ONLY and it.default is it.empty and key not in own | options
    ]
    if missing:
        raise ConfigError(f"tier {name!r} lacks {', '.join(map(repr, missing))}: set it")
    connector = make(geometry, **(own | options))
    if not isinstance(connector, Connector):
        raise ConfigError(f"tier {name!r} is {shown(connector)}, not a kvcache Connector")
    return connector


def find_connector(name: str) -> Any:
    """A connector's class by the name of its entry point, or as "package.module:Class".

    Raises:
        ConfigError: there is none, or it cannot be imported.
    """
    points = {point.name: point for point in metadata.entry_points(group=CONNECTOR_GROUP)}
    try:
        if name in points:
            return points[name].load()
        module, colon, attribute = name.partition(":")
        if colon:
            return getattr(import_module(module), attribute)
    except Exception as fault:  # a plug-in's import may raise anything
        raise ConfigError(
            f"connector {name!r} cannot be imported: {type(fault).__name__}: {fault}"
        ) from fault
    raise ConfigError(
        f"connector {name!r} is not known: there are {', '.join(sorted(points))}; or give"
        ' "package.module:Class"'
    )


def events_wanted(vllm_config: Any) -> bool:
    """Whether vLLM publishes KV events."""
    config = vllm_config.kv_events_config
    return flag(config is not None and config.enable_kv_cache_events, "events")
