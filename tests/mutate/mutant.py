"""One small fault, and the tests that must notice it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class StaleMutantError(Exception):
    """The text that a mutant replaces is not in its file exactly once."""


class Mutant(NamedTuple):
    """A fault as a replacement of text, small enough to be read.

    Args:
        name: what is wrong, in a few words.
        file: of the source tree, from its root.
        old: what stands there, found exactly once.
        new: what takes its place.
        tests: pytest node ids, or `csrc/tests/NAME` for a program of the core's own tests; each
            must fail. A node id without parameters means all of that function's.
        errors: names of exceptions that count as noticing beside a failed assertion and a broken
            invariant. "crash": the process may die; "hang": it may take too long.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    errors: tuple[str, ...] = ()

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """The fault stands in the tree at `root` meanwhile. Raises `StaleMutantError`."""
        path = root / self.file
        good, faulty = path.read_text(), self.faulty(root)
        path.write_text(faulty)
        try:
            yield
        finally:
            path.write_text(good)

    def faulty(self, root: Path) -> str:
        """The file's text with the fault in it. Raises `StaleMutantError`."""
        text = (root / self.file).read_text()
        if text.count(self.old) != 1 or self.old == self.new:
            raise StaleMutantError(
                f"{self.name}: {self.old!r} stands {text.count(self.old)} times in {self.file}, not"
                " once: bring the mutant up to date"
            )
        return text.replace(self.old, self.new)
