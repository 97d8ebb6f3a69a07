"""The manager as the source of KV events: which keys became findable, which went."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from kvcache.core.errors import MisuseError
from kvcache.core.events.labels import GroupLabel, Labels, MediaSpan, RequestLabel
from kvcache.core.events.records import Event
from kvcache.core.events.runs import ClearedRun, RemovedRun, Run, StoredRun, to_events
from kvcache.core.layout import Geometry
from kvcache.core.media import Media
from kvcache.core.tier_calls import TierCalls
from kvcache.core.values import text

MAX_CLOSED = 65_536
"""Closed requests that events may still name; beyond, the oldest lose their names."""


class EventCalls(TierCalls):
    """Keys as they come and go, of a manager that was made with `events=True`."""

    def __init__(self, geometry: Geometry, slabs: int, *, events: bool, **settings: int) -> None:
        super().__init__(geometry, slabs, events=events, **settings)
        self._events = bool(events)
        self._labels: dict[int, RequestLabel] = {}
        self._closed: deque[int] = deque()
        """Closed requests whose events may not have been taken yet."""

    def _label(self, handle: int, label: RequestLabel) -> None:
        if self._events:
            self._labels[handle] = label

    def _label_closed(self, handle: int) -> None:
        if self._events:
            self._closed.append(handle)
            while len(self._closed) > MAX_CLOSED:
                self._labels.pop(self._closed.popleft(), None)

    @property
    def reports_events(self) -> bool:
        """Whether it was made with `events=True`."""
        return self._events

    def take_events(self, *, medium: str = "GPU") -> list[Event]:
        """KV events since the last call, in order.

        An `AllBlocksCleared` comes first where events were lost for want of a reader. Salts and
        names of adapters are told, as vLLM does: whoever reads events may know them, unless the
        publisher leaves salts out (`EventPublisher(publish_salts=False)`). What nobody takes is
        bounded: the names of 65,536 closed requests, and the runs of `take_runs`.

        Raises:
            MisuseError: the manager was made without `events=True`.
        """
        text(medium, "medium")
        labels = Labels(
            groups=self.group_labels(), namespaces=self._namespaces.labels, requests=self._labels
        )
        events = to_events(self.take_runs(), labels, medium=medium)
        while self._closed:
            self._labels.pop(self._closed.popleft(), None)
        return events

    def take_runs(self) -> list[Run]:
        """Keys that became findable or went since the last call, in order, as runs of blocks.

        A `ClearedRun` first: events were lost, because nobody took them. What follows is right,
        and what was stored before it is not told again.

        Raises:
            MisuseError: the manager was made without `events=True`.
        """
        if not self._events:
            raise MisuseError("this manager keeps no events: make it with Manager(events=True)")
        ffi, lib = self._ffi, self._lib
        cap, counts = ffi.new("kvc_event_counts*"), ffi.new("kvc_event_counts*")
        while True:
            heads = ffi.new("kvc_event_run[]", cap.runs)
            keys = np.empty((cap.keys, 32), np.uint8)
            tokens = np.empty(cap.tokens, np.int32)
            self._call(
                lib.kvc_take_events,
                cap,
                heads,
                ffi.from_buffer("uint8_t[]", keys),
                ffi.from_buffer("int32_t[]", tokens),
                counts,
            )
            fits = counts.runs <= cap.runs and counts.keys <= cap.keys
            if fits and counts.tokens <= cap.tokens:
                break
            cap[0] = counts[0]
        runs: list[Run] = []
        key_at = token_at = 0
        for i in range(counts.runs):
            head = heads[i]
            rows = keys[key_at : key_at + head.n_keys]
            text = tokens[token_at : token_at + head.n_tokens]
            key_at, token_at = key_at + head.n_keys, token_at + head.n_tokens
            if head.kind == lib.KVC_EVENT_STORED:
                block = self.geometry.block_tokens[head.group]
                ends = head.first_end + block * np.arange(head.n_keys, dtype=np.int64)
                parent = bytes(head.parent) if head.has_parent else None
                runs.append(StoredRun(head.group, head.handle, head.ns, parent, rows, ends, text))
            elif head.kind == lib.KVC_EVENT_REMOVED:
                runs.append(RemovedRun(head.group, head.ns, rows))
            else:
                runs.append(ClearedRun())
        return runs

    def group_labels(self) -> list[GroupLabel]:
        """What events call the groups."""
        return [
            GroupLabel(self.geometry.block_tokens[g], spec.kind, spec.window_tokens)
            for g, spec in enumerate(self.geometry.groups)
        ]


def request_label(session: str, media: Sequence[Media]) -> RequestLabel:
    """What events say of a request beside its keys."""
    ordered = sorted(media, key=lambda item: item.offset_tokens)
    spans = tuple(MediaSpan(m.identifier, m.offset_tokens, m.length_tokens) for m in ordered)
    return RequestLabel(text(session, "session") or None, spans)
