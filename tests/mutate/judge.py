"""Runs the tests of a mutant and says whether they noticed.

| verdict | means |
|---|---|
| killed | every named test failed, by an assertion or a broken invariant |
| survived | a named test passed |
| odd | a test failed otherwise: an error of another kind, a crash, a hang |
| unbuilt | the faulty source does not compile |
| unjudged | a named test fails without the fault too |
"""

from __future__ import annotations

import json
import sys
import time
from typing import NamedTuple

from mutate.mutant import Mutant
from mutate.workshop import BuildError, Outcome, Workshop, run

NOTICED = {"AssertionError", "InvariantError", "Failed"}
PROGRAMS = "csrc/tests/"
PYTEST = ["-m", "pytest", "-q", "-x", "-p", "mutate.verdict_plugin", "-p", "no:cacheprovider"]


class Verdict(NamedTuple):
    """Of one mutant. `why` is the first failure's text, or what went wrong."""

    name: str
    verdict: str
    why: str
    seconds: float


class Failure(NamedTuple):
    """How a test failed: names of the exception and its bases; or `crash`, `hang`, `no test`."""

    names: list[str]
    text: str


def failure_of(shop: Workshop, test: str, seconds: float) -> Failure | None:
    """Run one test in the copy. None: it passed."""
    if test.startswith(PROGRAMS):
        return _program_failure(shop, test.removeprefix(PROGRAMS), seconds)
    report = shop.root / "report.json"
    report.unlink(missing_ok=True)
    env = {**shop.env, "MUTATE_REPORT": str(report)}
    command = [sys.executable, *PYTEST, f"--timeout={seconds:.0f}", test]
    outcome = run(command, cwd=shop.root, seconds=seconds + 30, env=env)
    failures = json.loads(report.read_text()) if report.is_file() else []
    if outcome.code == 0:
        return None
    if outcome.code == 1 and failures:
        _, names, text = failures[0]
        return Failure(names, text)
    return _without_report(outcome)


def judge(shop: Workshop, mutant: Mutant, seconds: float) -> Verdict:
    """Apply, build, run, revert."""
    started = time.monotonic()

    def verdict(word: str, why: str) -> Verdict:
        return Verdict(mutant.name, word, why, time.monotonic() - started)

    try:
        with mutant.applied(shop.root):
            return verdict(*_tried(shop, mutant, seconds))
    except BuildError as error:
        return verdict("unbuilt", str(error))


def _tried(shop: Workshop, mutant: Mutant, seconds: float) -> tuple[str, str]:
    """Verdict and reason, with the fault in place."""
    if mutant.file.startswith("csrc/"):
        shop.build()
    why = ""
    for test in mutant.tests:
        failure = failure_of(shop, test, seconds)
        if failure is None:
            return "survived", f"{test} passed"
        said = f"{failure.names[0]}: {failure.text}".strip()
        if not {*NOTICED, *mutant.errors} & {*failure.names}:
            return "odd", f"{test}: {said}"
        why = why or said
    return "killed", why


def _program_failure(shop: Workshop, name: str, seconds: float) -> Failure | None:
    shop.build(name)
    outcome = run([str(shop.program(name))], cwd=shop.root, seconds=seconds, env=shop.env)
    if outcome.code == 0:
        return None
    if outcome.code == 1:
        return Failure(["AssertionError"], outcome.output.strip()[-300:])
    return _without_report(outcome)


def _without_report(outcome: Outcome) -> Failure:
    if outcome.code is None:
        return Failure(["hang"], "")
    word = "no test" if outcome.code in {4, 5} else "crash"
    return Failure([word], f"exit {outcome.code}: {outcome.output.strip()[-500:]}")
