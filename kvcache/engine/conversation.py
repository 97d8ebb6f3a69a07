"""Conversations on one engine: each a list of tokens that grows by a message and its answer.

Nothing but the tokens of a conversation is needed to go on with it, in this process or a later one:
what the device, or a tier, still has of it is found by its prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import Connector
from kvcache.connectors.driver import Offload
from kvcache.core.errors import CapacityError, ConfigError, HandleError
from kvcache.core.hashing import Fingerprint
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.engine.chat import DEFAULT_SYSTEM, Message, encode_chat, encode_reply, end_of_answer
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.model import Model
from kvcache.engine.queues import Counters
from kvcache.engine.request import Finished, Reason, Usage
from kvcache.engine.runner import TorchRunner
from kvcache.engine.speculative import SpeculativeRunner, joint_fingerprint, joint_geometry
from kvcache.engine.tokenizer import StreamDecoder, Tokenizer
from kvcache.retention import Sparse

LEAST_TOKENS = 64
"""A device pool that holds less holds no conversation."""
DRAIN_SECONDS = 30.0
TOKEN_BUDGET = 512
DRAFT_TOKENS = 4
"""Most guesses of one step, where there is a draft model."""


@dataclass(slots=True)
class Conversation:
    """What was said, in tokens and in words."""

    tokens: list[int] = field(default_factory=list)
    """Prompt of the next turn but for its message: all that was computed, and the last token."""
    messages: list[Message] = field(default_factory=list)
    ended: bool = True
    """The last answer has its end mark."""


class Answer(NamedTuple):
    """One turn: what was said, and what it cost."""

    text: str
    usage: Usage
    reason: Reason
    first_token_seconds: float
    """From the message to the first token; 0.0 if there was none."""
    seconds: float


class Chat:
    """An engine for one conversation at a time. `close` it. Not thread-safe.

    Args:
        model, tokenizer: who answers.
        device_bytes: size of the device pool; None: room for the longest conversation.
        tier: makes the tier below it; None: there is none.
        system: message before each new conversation; empty: the model's own.
        draft: guesses tokens that the model then checks, see `SpeculativeRunner`; None: nobody does.
        lazy_bytes: see `Offload`: pages go to the tier shortly before the device evicts them, and at
            the end. None: as soon as they are computed.

    Attributes:
        limit_tokens: of one conversation: what the context and the device pool hold.
        device_bytes: size of the device pool.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        device_bytes: int | None = None,
        tier: Callable[[Geometry, Fingerprint], Connector] | None = None,
        system: str = "",
        draft: Model | None = None,
        lazy_bytes: int | None = None,
    ) -> None:
        geometry, fingerprint, context = model.geometry, model.fingerprint(), model.context_tokens
        if draft is not None:
            geometry = joint_geometry(model, draft, DRAFT_TOKENS)
            fingerprint = joint_fingerprint(model, draft)
            context = min(context, draft.context_tokens)
        whole = geometry.slabs_needed(context)
        slabs = whole if device_bytes is None else min(whole, geometry.slabs_in(device_bytes))
        fitting = _most_tokens(lambda n: geometry.slabs_needed(n) <= slabs, context)
        if fitting < LEAST_TOKENS:
            raise ConfigError(
                f"the device pool holds {fitting} tokens of {model.name}: give it at least"
                f" {geometry.slabs_needed(LEAST_TOKENS) * geometry.slab_bytes:,} bytes"
            )
        self.limit_tokens = fitting
        self.device_bytes = slabs * geometry.slab_bytes
        self._tokenizer, self._system = tokenizer, system
        self._stop_ids = end_of_answer(tokenizer)
        runner = (
            TorchRunner(model, slabs)
            if draft is None
            else SpeculativeRunner(model, draft, slabs, draft_tokens=DRAFT_TOKENS)
        )
        manager = Manager(
            geometry,
            slabs=slabs,
            movable=True,
            retention=Sparse(),
            fingerprint=fingerprint,
        )
        self._lazy = lazy_bytes is not None
        self._offload = None
        if tier is not None:
            self._offload = Offload(
                manager, tier(geometry, fingerprint), runner.regions(), lazy_bytes=lazy_bytes
            )
        self._engine = Engine(
            runner, manager, self._offload, settings=EngineSettings(token_budget=TOKEN_BUDGET)
        )
        self._shared = len(encode_chat(tokenizer, self._opening(), answer=False))
        """Tokens that all conversations begin with."""
        self._answer: Answer | None = None

    def ask(
        self,
        conversation: Conversation,
        text: str,
        *,
        max_tokens: int,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[str]:
        """Pieces of the answer to a message, as they come; then `answer` says what it cost.

        The conversation takes message and answer when the answer is over; of one that is not heard to
        its end, nothing. `stopped` is asked before each step: True ends the answer where it is.

        Raises:
            InputError: the message has no UTF-8 form.
            CapacityError: no room for the message; the conversation is as it was.
        """
        prompt = self._prompt(conversation, text)
        room = self.limit_tokens - len(prompt)
        if room < 1:
            raise CapacityError(
                f"the conversation would have {len(prompt):,} tokens with this message, and there is"
                f" room for {self.limit_tokens:,}: begin another one, or give the device more memory"
            )
        begin, first = time.perf_counter(), 0.0
        request = self._engine.add_request(
            prompt,
            max_new_tokens=min(max_tokens, room),
            stop_ids=sorted(self._stop_ids),
            boundaries=[self._shared] if 0 < self._shared < len(prompt) else (),
        )
        decoder = StreamDecoder(self._tokenizer)
        output: list[int] = []
        pieces: list[str] = []
        end: Finished | None = None
        aborted = False
        try:
            while end is None:
                if not aborted and stopped():
                    aborted = True
                    self._engine.abort(request)
                for event in self._engine.step():
                    if event.request != request:
                        continue  # the end of an answer that nobody wanted to hear
                    if isinstance(event, Finished):
                        end = event
                        continue
                    first = first or time.perf_counter()
                    output.append(event.token)
                    pieces.append(decoder.push(event.token))
                    if pieces[-1]:
                        yield pieces[-1]
        finally:
            if end is None and not aborted:
                with suppress(HandleError):  # the step that raised may have ended it
                    self._engine.abort(request)
        pieces.append(decoder.flush())
        if pieces[-1]:
            yield pieces[-1]
        said = "".join(pieces)
        now = time.perf_counter()
        self._answer = Answer(said, end.usage, end.reason, max(0.0, first - begin), now - begin)
        conversation.tokens = [*prompt.tolist(), *output]
        conversation.messages += [Message("user", text), Message("assistant", said)]
        conversation.ended = bool(output) and output[-1] in self._stop_ids

    @property
    def answer(self) -> Answer:
        """The last one that is over."""
        assert self._answer is not None, "nothing was asked yet"
        return self._answer

    def _prompt(self, conversation: Conversation, text: str) -> NDArray[np.int32]:
        if conversation.tokens:
            reply = encode_reply(self._tokenizer, text, ended=conversation.ended)
            return np.concatenate([np.array(conversation.tokens, np.int32), reply])
        return encode_chat(self._tokenizer, [*self._opening(), Message("user", text)])

    def _opening(self) -> list[Message]:
        return [Message("system", self._system or DEFAULT_SYSTEM)]

    @property
    def counters(self) -> Counters:
        """Of the engine."""
        return self._engine.counters

    def settle(self) -> bool:
        """Let everything computed so far reach the last tier, unless stores are lazy.

        False: it did not in time.
        """
        return self._lazy or self._drain()

    def _drain(self) -> bool:
        return self._offload is None or self._offload.drain(DRAIN_SECONDS)

    def close(self) -> bool:
        """Let everything reach the last tier, and end that. False: it did not in time."""
        settled = self._drain()
        if self._offload is not None:
            self._offload.close()
        return settled


def _most_tokens(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits; what is larger than one that does not does not."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
