"""An explanation in words: what was lost, by whom or since when, and which setting would change it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

from kvcache.core.explanation import (
    Decode,
    Elsewhere,
    Evicted,
    Evidence,
    Explanation,
    KeyDiffers,
    LastBlock,
    Loss,
    NoState,
    NotStored,
    Other,
    Pending,
    TokensDiffer,
)
from kvcache.core.values import human_bytes


def describe(explanation: Explanation, decode: Decode | None = None) -> str:
    """One line for the whole, one for each loss."""
    lost = explanation.prompt_tokens - explanation.hit_tokens
    head = f"{explanation.hit_tokens:,} of {explanation.prompt_tokens:,} tokens were hit, {lost:,} lost"
    return "\n".join([head, *(f"  {line}" for line in lines(explanation, decode))])


def lines(explanation: Explanation, decode: Decode | None = None) -> list[str]:
    """A line for each loss."""
    return [
        f"[{loss.start:,}, {loss.end:,}) {loss.cause}: {_words(loss.evidence, loss, decode)}"
        for loss in explanation.losses
    ]


def seconds(value: float) -> str:
    """A time span with as many digits as are of use."""
    if value < 100:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def counted(number: int, noun: str) -> str:
    """Such as 1 page, 2 pages."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def name(other: Other) -> str:
    """A request as a sentence calls it."""
    text = f"request {other.handle}"
    notes = [f"session {other.session!r}"] if other.session else []
    if other.closed_seconds_ago is not None:
        notes.append(f"closed {seconds(other.closed_seconds_ago)} ago")
    elif other.tokens is not None:
        notes.append("open")
    return f"{text} ({', '.join(notes)})" if notes else text


@singledispatch
def _words(evidence: Evidence, loss: Loss, decode: Decode | None) -> str:
    raise AssertionError(f"no words for {evidence!r} of {loss!r} with {decode!r}")


@_words.register
def _last_block(e: LastBlock, *_: object) -> str:
    return (
        f"the last token is always computed, and hits end on multiples of {e.grid_tokens} tokens;"
        " smaller blocks would lose less"
    )


@_words.register
def _elsewhere(e: Elsewhere, *_: object) -> str:
    return "a tier or replica holds it, and it was not loaded" + (
        f": {e.reason}" if e.reason else ""
    )


@_words.register
def _no_state(e: NoState, loss: Loss, *_: object) -> str:
    remedy = f"declare a boundary there, or set a retention interval below {loss.end:,}"
    nearest = f"the nearest one kept is at {e.nearest:,}" if e.nearest else "none is kept below"
    if e.other is not None:
        return f"{name(e.other)} had computed it, and kept no window or state there; {nearest}; {remedy}"
    what = f"group {e.group!r} kept nothing" if e.group else "no window or state was kept"
    return (
        f"full attention goes on to {e.full_tokens:,}, where {what} for a hit; {nearest}; this request"
        f" keeps one at {e.full_tokens:,} when it is computed; to have it before, {remedy}"
    )


@_words.register
def _evicted(e: Evicted, *_: object) -> str:
    if not e.remembered:
        had = f"{name(e.other)} had computed it" if e.other is not None else "it had been computed"
        return f"{had}; it was evicted, and more was evicted since than the table of evicted keys holds"
    text = f"the first page that went is of group {e.group!r}, at token {e.position:,}"
    if e.seconds_ago is None:
        return f"{text}; when and for whom is not remembered any more; a larger arena keeps more"
    by = f" for {name(e.by)}" if e.by is not None and e.by.handle else ""
    return (
        f"{text}: evicted {seconds(e.seconds_ago)} ago{by}; {counted(e.pages_since, 'page')}"
        f" ({human_bytes(e.bytes_since)}) went from then on until the lookup"
    )


@_words.register
def _pending(e: Pending, *_: object) -> str:
    who = name(e.writer) if e.writer is not None else "a request that is not known any more"
    if e.load:
        return f"load {e.load} of {who} is filling it: look it up again when that has ended"
    if e.step:
        return f"{who} writes it in step {e.step}: look it up again when that has ended"
    return (
        f"{who} was writing it, and has ended the step since: look it up before computing it twice"
    )


@_words.register
def _tokens_differ(e: TokensDiffer, _: Loss, decode: Decode | None) -> str:
    what = f"of {name(e.other)}, which has most in common with this one"
    if not e.own:
        return f"the key of the block at token {e.position:,} is another one than that {what}"

    def shown(tokens: Sequence[int]) -> str:
        if decode is None:
            return "[" + " ".join(map(str, tokens)) + "]"
        return repr(decode(list(tokens)))

    after = f"after {shown(e.before)} comes" if e.before else "it is"
    others = shown(e.others) if e.others else "nothing"
    return f"token {e.position:,} is not that {what}: {after} {shown(e.own)} here, {others} there"


@_words.register
def _key_differs(e: KeyDiffers, *_: object) -> str:
    parts = []
    for field in e.fields:
        if field.name == "root":
            parts.append("its salt, adapter or weights (not known any more which)")
        elif field.name == "media":
            parts.append(f"the media or embeddings from token {e.position:,} on")
        elif field.name == "salt":
            parts.append("the salt")
        else:
            parts.append(f"{field.name} ({field.own!r} here, {field.others!r} there)")
    one = len(parts) == 1 and e.fields[0].name != "media"
    return (
        f"{name(e.other)} had the same tokens under another key: {' and '.join(parts)}"
        f" {'differs' if one else 'differ'};"
        " requests share prefixes only where all of that is equal"
    )


@_words.register
def _not_stored(e: NotStored, *_: object) -> str:
    if e.why == "new" or (e.other is None and e.why != "retired"):
        if not e.history_tokens:
            return (
                "not stored under these keys; closed requests are not remembered: with"
                " Manager(history_tokens=...) above 0 they can be compared"
            )
        return "new content: no open or remembered request had computed it"
    if e.why == "retired":
        return (
            "the adapter or the weights changed since the request was opened: abort it and open it"
            " anew to find and leave keys"
        )
    assert e.other is not None
    who, computed = name(e.other), e.other.computed or 0
    return {
        "aborted": f"{who} had the same tokens and was aborted after {computed:,} computed ones",
        "ended": f"{who} had the same tokens and ended after {computed:,} computed ones",
        "uncomputed": f"{who} had the same tokens, and had not computed them when this one was looked"
        " up: let it go first",
        "cleared": f"{who} had computed it, and its keys were dropped by a clear",
        "unkept": f"{who} had computed it, and it is not among what the retention policy keeps",
    }[e.why]
