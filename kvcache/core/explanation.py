"""Why a lookup lost tokens: every token with one cause, and the evidence for it as data and in words.

The words are made by `kvcache.core.explain_words`; `str(explanation)` gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

CAUSES = (
    "last_block",
    "no_state",
    "evicted",
    "pending",
    "not_stored",
    "elsewhere",
    "tokens_differ",
    "key_differs",
)
"""Causes of an explanation, in the order of `kvc_cause` and `kvc_loss_cause`. `Hit.lost` has the first five."""

WHYS = (
    "new",
    "aborted",
    "ended",
    "uncomputed",
    "cleared",
    "retired",
    "forgotten",
    "unkept",
)
"""What became of content that was not there, in the order of `kvc_why`."""

Decode = Callable[[list[int]], str]
"""Tokens as text."""


class Other(NamedTuple):
    """Another request that the evidence speaks of (or an earlier run of the same one)."""

    handle: int
    session: str
    """As `open` was told; empty where it was not, or where it is forgotten."""
    tokens: int | None = None
    """Its known tokens; None: not known any more."""
    computed: int | None = None
    """How many of them it had computed at most."""
    closed_seconds_ago: float | None = None
    """None: it is open, or not known any more."""


class LastBlock(NamedTuple):
    """The last token is always computed, and what lies past the last whole grid unit before it."""

    grid_tokens: int


class NoState(NamedTuple):
    """The content was computed, but no window or state was kept where this hit would need one."""

    group: str
    """A group that had nothing for a hit where full attention ended; empty: no one is known."""
    nearest: int
    """The nearest boundary below that every group serves; 0: none."""
    full_tokens: int
    """Where the hit of full attention alone ended: kept from the next computation on."""
    other: Other | None = None
    """Who had computed it, in a model without full attention."""


class Evicted(NamedTuple):
    """It was there, and its page was taken."""

    group: str
    """Of the first page that went; empty: not remembered."""
    position: int
    """First token of that page, or how many tokens its state stood for; -1: not remembered."""
    seconds_ago: float | None
    """None: longer ago than is remembered."""
    by: Other | None
    """The request that the page was taken for."""
    pages_since: int
    """Pages of all groups that were evicted from then on until the lookup, each time that one was."""
    bytes_since: int
    """Their bytes. No size to buy: what came back and went again counts each time, and a superseded
    page goes before all others in a larger arena, too."""
    remembered: bool
    """False: nothing is left of the eviction; that it was computed is known from `other`, or, where
    that is None, to the replay from its trace."""
    other: Other | None = None
    """A request that had computed it."""


class Pending(NamedTuple):
    """It was being written, or loaded, when the request was looked up."""

    writer: Other | None
    step: int
    """The open step that writes it; 0: none, or it has ended since."""
    load: int
    """The load that fills it; 0: none, or it has ended since."""


class Elsewhere(NamedTuple):
    """A tier or replica holds it, and it was not loaded."""

    reason: str
    """Why, as whoever knows the tier tells; empty: nobody did."""


class TokensDiffer(NamedTuple):
    """Another request began like this one and went on with other tokens."""

    position: int
    """The first token that differs; for foreign keys the first token of the first block that does."""
    other: Other
    before: tuple[int, ...]
    """Up to eight tokens before it, the same in both. Empty for foreign keys, as the next two."""
    own: tuple[int, ...]
    """Up to eight tokens from it on, here ..."""
    others: tuple[int, ...]
    """... and there."""


class KeyField(NamedTuple):
    """A part of the key that two requests with equal tokens do not share."""

    name: str
    """`salt`, `lora`, `lora_version`, `weights_epoch`, `media` (or prompt embeddings), or `root`: not
    known any more which."""
    own: str
    others: str


class KeyDiffers(NamedTuple):
    """Another request had the same tokens under another key."""

    fields: tuple[KeyField, ...]
    position: int
    """Where media or embeddings differ first; -1: the whole request has another root."""
    other: Other


class NotStored(NamedTuple):
    """Nobody had stored it."""

    why: str
    """One of `WHYS`. `new`: no request is known that had this content."""
    other: Other | None
    """The request that had it too; None with `new` and `retired`."""
    history_tokens: int
    """How much of closed requests the manager remembers; 0: nothing, so nothing can be compared."""


Evidence = (
    LastBlock | NoState | Evicted | Pending | Elsewhere | TokensDiffer | KeyDiffers | NotStored
)


class Loss(NamedTuple):
    """Tokens [start, end) of a prompt that were no hit, and why."""

    cause: str
    """One of `CAUSES`."""
    start: int
    end: int
    evidence: Evidence
    told: str
    """The cause that `Hit.lost` counts them under."""

    @property
    def tokens(self) -> int:
        """How many."""
        return self.end - self.start


class Explanation(NamedTuple):
    """What the last lookup of a request lost. `hit_tokens` and all losses add up to the prompt."""

    prompt_tokens: int
    """Known tokens when it was looked up."""
    hit_tokens: int
    losses: tuple[Loss, ...]
    """Ascending, without gaps, from `hit_tokens` to `prompt_tokens`."""

    def lost(self) -> dict[str, int]:
        """Tokens by cause: all of `CAUSES`."""
        sums = dict.fromkeys(CAUSES, 0)
        for loss in self.losses:
            sums[loss.cause] += loss.tokens
        return sums

    def with_reason(self, reason: str) -> Explanation:
        """The same, with why what lies elsewhere was not loaded."""
        losses = (
            loss._replace(evidence=Elsewhere(reason)) if loss.cause == "elsewhere" else loss
            for loss in self.losses
        )
        return self._replace(losses=tuple(losses))

    def text(self, decode: Decode | None = None) -> str:
        """In words, one line for each loss. `decode`: shows tokens as text instead of numbers."""
        from kvcache.core.explain_words import describe  # noqa: PLC0415 (it needs these classes)

        return describe(self, decode)

    def __str__(self) -> str:
        return self.text()
