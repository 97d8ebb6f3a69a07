"""`python -m mutate`: puts each fault of the list into a copy of the source, and wants it noticed.

Exit 0: every mutant was killed by its tests. The list is `mutants.py`.
"""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from mutate.judge import Verdict, failure_of, judge
from mutate.mutant import Mutant, StaleMutantError
from mutate.mutants import MUTANTS
from mutate.workshop import Workshop

ROOT = Path(__file__).resolve().parent.parent.parent


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutate", description=__doc__)
    parser.add_argument("names", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=2, help="copies that work side by side")
    parser.add_argument("--seconds", type=float, default=120, help="time limit of one test")
    parser.add_argument("--json", type=Path, help="write the verdicts to this file")
    parser.add_argument("--list", action="store_true", help="list the mutants and their tests")
    parser.add_argument("--unchecked", action="store_true", help="skip the run without a fault")
    return parser.parse_args()


@contextmanager
def workshops(jobs: int) -> Iterator[list[Workshop]]:
    """Copies of the tree, built."""
    folder = Path(tempfile.mkdtemp(prefix="kvcache-mutate-"))
    try:
        shops = [Workshop(ROOT, folder / str(i)) for i in range(jobs)]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(Workshop.build, shops))
        yield shops
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Crew:
    """Threads with a workshop each."""

    def __init__(self, shops: list[Workshop], seconds: float) -> None:
        self._seconds = seconds
        self._jobs = len(shops)
        self._free: queue.SimpleQueue[Workshop] = queue.SimpleQueue()
        for shop in shops:
            self._free.put(shop)

    def failing(self, tests: list[str]) -> dict[str, str]:
        """The named tests that fail on the source as it is, and why."""

        def one(test: str) -> str:
            shop = self._free.get()
            try:
                failure = failure_of(shop, test, self._seconds)
            finally:
                self._free.put(shop)
            if failure is None:
                return ""
            why = f"{failure.names[0]} {failure.text}"
            say(f"fails without any fault: {test}: {why}")
            return why

        with ThreadPoolExecutor(self._jobs) as pool:
            return {test: why for test, why in zip(tests, pool.map(one, tests), strict=True) if why}

    def verdicts(self, mutants: list[Mutant], failing: Mapping[str, str]) -> list[Verdict]:
        """In the order of the mutants. `failing` tests cannot judge."""

        def one(mutant: Mutant) -> Verdict:
            for test in mutant.tests:
                if test in failing:
                    return Verdict(mutant.name, "unjudged", f"{test} fails without it", 0.0)
            shop = self._free.get()
            try:
                verdict = judge(shop, mutant, self._seconds)
            finally:
                self._free.put(shop)
            say(f"{verdict.verdict:10}{verdict.seconds:6.1f} s  {verdict.name}")
            if verdict.verdict != "killed":
                say(f"           {verdict.why}")
            return verdict

        with ThreadPoolExecutor(self._jobs) as pool:
            return list(pool.map(one, mutants))


def table(mutants: list[Mutant], verdicts: list[Verdict]) -> str:
    rows = ["| mutant | file | verdict | by |", "|---|---|---|---|"]
    for mutant, verdict in zip(mutants, verdicts, strict=True):
        tests = ", ".join(test.split("::")[-1] for test in mutant.tests)
        rows.append(f"| {mutant.name} | {mutant.file} | {verdict.verdict} | {tests} |")
    killed = sum(verdict.verdict == "killed" for verdict in verdicts)
    return "\n".join([*rows, "", f"{killed} of {len(verdicts)} killed"])


def chosen(names: list[str]) -> list[Mutant]:
    return [m for m in MUTANTS if not names or any(name in m.name for name in names)]


def main() -> int:
    args = arguments()
    mutants = chosen(args.names)
    if not mutants:
        say(f"no mutant has a name with {' or '.join(args.names)} in it")
        return 2
    if args.list:
        sys.stdout.write("\n".join(f"{m.name}: {', '.join(m.tests)}" for m in mutants) + "\n")
        return 0
    try:
        for mutant in mutants:
            mutant.faulty(ROOT)
    except StaleMutantError as stale:
        say(str(stale))
        return 1
    with workshops(min(args.jobs, len(mutants))) as shops:
        crew = Crew(shops, args.seconds)
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        say(f"{len(tests)} tests without a fault, then {len(mutants)} mutants")
        failing = {} if args.unchecked else crew.failing(tests)
        verdicts = crew.verdicts(mutants, failing)
    sys.stdout.write(table(mutants, verdicts) + "\n")
    if args.json:
        args.json.write_text(json.dumps([verdict._asdict() for verdict in verdicts], indent=1))
    return 0 if all(verdict.verdict == "killed" for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
