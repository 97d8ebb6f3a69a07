"""Did you mean: for a name that is none of those known, the one most like it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def alike(name: object, known: Iterable[str], *, least: float = 0.6) -> str:
    """For messages: ` (did you mean 'gpt_oss'?)`; empty if no known name is like this one.

    Case and signs are not looked at: GPT-OSS is like gpt_oss.
    """
    plain = {_letters(each): each for each in known}
    near = difflib.get_close_matches(_letters(str(name)[:100]), plain, n=1, cutoff=least)
    return f" (did you mean {plain[near[0]]!r}?)" if near else ""


def _letters(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
