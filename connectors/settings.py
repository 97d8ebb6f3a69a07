"""Settings of tiers on their way in, each refused by its name; and how a budget of bytes is split over groups."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from kvcache.connectors.base import PageRegion
from kvcache.core.copy import cores
from kvcache.core.errors import ConfigError
from kvcache.core.hashing import Fingerprint
from kvcache.core.layout import Geometry
from kvcache.core.values import sequence, shown, text, whole

MOST_SLOTS = 2**31 - 2


def require_whole(setting: str, value: object) -> None:
    """`ConfigError` unless it is a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{setting} is {shown(value)}: it must be a whole number above 0")


def require_seconds(setting: str, value: object) -> None:
    """`ConfigError` unless it is a time that passes."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 < value < math.inf):  # type: ignore[operator]
        raise ConfigError(
            f"{setting} is {shown(value)}: it must be a number of seconds, above 0 and finite"
        )


def folder_path(owner: str, folder: object) -> Path:
    """The path of a folder, which need not be there; else `ConfigError`."""
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else ""
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError(f"{owner}.folder is {shown(folder)}: give the path of a folder")
    return Path(path)


def require_fingerprint(owner: str, fingerprint: object) -> None:
    """`ConfigError` unless it is one, and names a model: for tiers that outlive, or leave, a process."""
    if not isinstance(fingerprint, Fingerprint):
        raise ConfigError(
            f"{owner}.fingerprint is {shown(fingerprint)}: give the Fingerprint that the Manager has"
        )
    if not fingerprint.model:
        raise ConfigError(
            f"{owner}.fingerprint names no model: pages are there for other processes too, so say"
            " whose they are, as in Fingerprint(model='llama-3-8b', kv_dtype='bfloat16'), and give"
            " the Manager the same"
        )


def copy_threads(owner: str, threads: object) -> int:
    """Threads that copy at once, `ConfigError` unless above 0: no more than this process may run."""
    return min(whole(threads, f"{owner}.threads", least=1), cores())


def layout_setting(owner: str, layout: object) -> str:
    """What the pages are that processes share; `ConfigError` where it is left to a guess.

    Ranks of a model have equal keys, geometries and fingerprints, and other bytes: nothing else
    tells them apart.
    """
    if not text(layout, f"{owner}.layout"):
        raise ConfigError(
            f"{owner}.layout is empty: say whose bytes these are, 'whole' where this process has whole"
            " pages, or its rank, as in 'rank 0 of 8', where it has a shard of each"
        )
    return str(layout)


def slots_of_groups(
    owner: str,
    geometry: Geometry,
    *,
    capacity_bytes: int | None,
    pages: Sequence[int] | None,
    state_interval_tokens: int,
    slot_bytes: Sequence[int],
) -> tuple[tuple[int, ...], str]:
    """Slots of each group, from a budget or as they are given; and the setting that said so.

    Raises:
        ConfigError: both or neither are given, or numbers that cannot be.
    """
    if (capacity_bytes is None) == (pages is None):
        raise ConfigError(f"{owner} needs either capacity_bytes or pages, and not both")
    if capacity_bytes is not None:
        slots: tuple[int, ...] = split_bytes(
            geometry,
            capacity_bytes,
            state_interval_tokens=state_interval_tokens,
            slot_bytes=slot_bytes,
            owner=owner,
        )
        setting = f"{owner}.capacity_bytes"
    else:
        assert pages is not None
        setting = f"{owner}.pages"
        slots = tuple(sequence(pages, setting))
    _require_slots(geometry, slots, setting)
    return slots, setting


def split_bytes(
    geometry: Geometry,
    capacity_bytes: int,
    *,
    state_interval_tokens: int = 1024,
    slot_bytes: Sequence[int] | None = None,
    owner: str = "CpuConnector",
) -> tuple[int, ...]:
    """Pages of each group that share a byte budget so that all groups cover as many tokens.

    Args:
        geometry: the groups.
        capacity_bytes: the budget; the result never exceeds it.
        state_interval_tokens: tokens between two recurrent states that are stored, on average.
        slot_bytes: what a page of each group takes in the tier; None: its bytes.
        owner: whose settings they are, for messages.

    Raises:
        ConfigError: the budget does not hold one page of each group.
    """
    require_whole(f"{owner}.capacity_bytes", capacity_bytes)
    require_whole(f"{owner}.state_interval_tokens", state_interval_tokens)
    sizes = [group.page_bytes for group in geometry.groups] if slot_bytes is None else slot_bytes
    least = sum(sizes)
    if capacity_bytes < least:
        raise ConfigError(
            f"{owner}.capacity_bytes is {capacity_bytes}: one page of each group takes"
            f" {least} bytes, give at least that"
        )
    spans = [
        rules.block_tokens or (state_interval_tokens if rules.kind == "state" else 0)
        for rules in geometry.rules
    ]
    cached = [(size, span) for size, span in zip(sizes, spans, strict=True) if span]
    # One page of each first, the rest by tokens: rounding down keeps the sum within the budget.
    # Private pages are never stored.
    common = math.lcm(*(span for _, span in cached))
    common_bytes = sum(size * (common // span) for size, span in cached)
    tokens = (capacity_bytes - least) * common // common_bytes if cached else 0
    return tuple(1 + (tokens // span if span else 0) for span in spans)


def _require_slots(geometry: Geometry, slots: Sequence[object], setting: str) -> None:
    if len(slots) != len(geometry.groups):
        raise ConfigError(
            f"{setting} has {len(slots)} numbers for {len(geometry.groups)} groups: give one each"
        )
    for group, count in zip(geometry.groups, slots, strict=True):
        if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= MOST_SLOTS:
            raise ConfigError(
                f"{setting} gives group {group.name!r} {shown(count)} slots: it must be a whole number"
                " above 0 and below 2^31 - 1"
            )


def require_regions(
    groups: Sequence[str],
    page_bytes: Sequence[int],
    regions: Sequence[PageRegion],
    *,
    parts: bool = False,
) -> tuple[PageRegion, ...]:
    """The regions, where there is one for each group with pages of its size; else `ConfigError`.

    Args:
        parts: the worker moves pages that lie in the memories of several ranks, too.
    """
    if len(regions) != len(groups):
        raise ConfigError(
            f"register got {len(regions)} regions: this connector has {len(groups)} groups"
        )
    for name, region, size in zip(groups, regions, page_bytes, strict=True):
        if region.parts and not parts:
            raise ConfigError(
                f"register: pages of group {name!r} lie in {len(region.parts)} parts, and this"
                " connector moves whole ones only"
            )
        if region.parts:
            place = f"{len(region.parts)} parts, at {list(region.places)}"
            needs = "none of them at 0, and at least one address for each"
        else:
            place = f"address {region.address}"
            needs = "at an address that is not 0, such as that of an arena (arena_regions)"
        if (
            region.page_bytes != size
            or region.step_bytes < region.part_bytes
            or region.pages < 1
            or min(min(copies, default=0) for copies in region.places) < 1
        ):
            raise ConfigError(
                f"register: the region of group {name!r} has {region.pages} pages of"
                f" {region.page_bytes} bytes, {region.step_bytes} apart, at {place}: it needs pages"
                f" of {size} bytes, {size // max(len(region.parts), 1)} or more apart, {needs}"
            )
    return tuple(regions)
