"""What events say beside keys and tokens: the kind of a group, the root of a namespace, a session.

The manager counts in numbers (group, namespace, handle); these records give the numbers their
names on the wire.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcache.core.events.records import ExtraKeys


class GroupLabel(NamedTuple):
    """One group of a geometry."""

    block_tokens: int
    """Tokens of one key's block: a page's, or the grid for a recurrent state."""
    kind: str
    """A value of vLLM's `KVCacheSpecKind`: full_attention, mla_attention, sliding_window, ..."""
    window_tokens: int | None = None


class NamespaceLabel(NamedTuple):
    """One root of hash chains."""

    lora_name: str | None = None
    salt: str = ""
    """Told with the first block, as vLLM does, so that consumers that hash tokens of their own do
    not mix salts."""
    foreign: bytes | None = None
    """32 bytes if the keys are an engine's own digests; None for native keys."""


class MediaSpan(NamedTuple):
    """An image or sound in the prompt, in tokens."""

    identifier: str
    offset_tokens: int
    length_tokens: int


class RequestLabel(NamedTuple):
    """One request."""

    session_id: str | None = None
    media: tuple[MediaSpan, ...] = ()
    """In the order in which they stand in the prompt; they do not overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """All names of one manager. The mappings stay the caller's, and are read at each call.

    A number that a mapping lacks has an empty label. A request's label must last until the step
    that wrote its last block has ended: later than `finish`.
    """

    groups: Sequence[GroupLabel]
    namespaces: Mapping[int, NamespaceLabel] = field(default_factory=dict)
    requests: Mapping[int, RequestLabel] = field(default_factory=dict)


def extra_keys(
    start: int, blocks: int, block_tokens: int, namespace: NamespaceLabel, request: RequestLabel
) -> tuple[ExtraKeys, ...] | None:
    """One entry for each of `blocks` blocks from token `start` on; None if all are empty.

    Contents and order are vLLM's: LoRA name, (media id, offset seen from the block), cache salt in
    the first block of a prompt. Cost: blocks, the media in them, and a search for the first of those.
    """
    if not (namespace.lora_name or request.media or (namespace.salt and start == 0)):
        return None
    media = request.media
    at = bisect_right(media, start, key=_end)
    entries: list[ExtraKeys] = []
    for first in range(start, start + blocks * block_tokens, block_tokens):
        keys: list[object] = [namespace.lora_name] if namespace.lora_name else []
        while at < len(media) and _end(media[at]) <= first:
            at += 1
        for i in range(at, len(media)):
            if media[i].offset_tokens >= first + block_tokens:
                break
            keys.append((media[i].identifier, media[i].offset_tokens - first))
        if first == 0 and namespace.salt:
            keys.append(namespace.salt)
        entries.append(tuple(keys) or None)
    return tuple(entries) if any(entries) else None


def _end(span: MediaSpan) -> int:
    return span.offset_tokens + span.length_tokens
