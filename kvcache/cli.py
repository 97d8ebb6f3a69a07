"""The command line `kvcache VERB`: the only reader of `sys.argv`.

A verb is a module of `kvcache.commands` with `HELP: str`, `add_arguments(parser)` and
`run(args) -> int`. Only the module of the chosen verb is imported.

Exit status: 0 done; 2 wrong usage or bad input, with one line on stderr; 1 failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import kvcache
from kvcache.core.alike import alike
from kvcache.core.errors import CapacityError, ConfigError, InputError, KVCacheError

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
"""As shells report a command that was ended by SIGINT."""

VERBS = {
    "bench": "measure one part of the library on this machine",
    "chat": "talk to a small model: what each turn found on the device, in a tier, or computed",
    "demo": "play multi-turn sessions on a small model: recompute, offload, everything in memory",
    "doctor": "what is installed, which native path runs, which connectors are found",
    "explain": "why the requests of a trace lost tokens, each with its evidence",
    "replay": "run a request trace through the block manager: hit rate, and where the rest was lost",
    "size": "KV bytes of a model per token, boundary and session; what fits; which interval pays",
}

_WITHOUT_VERB = ("-h", "--help", "-V", "--version")

EXTRAS = {"tokenizers": "engine", "torch": "engine"}
"""Which extra installs a module that is not a base dependency."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _verb_name(text: str) -> str:
    if text in VERBS:
        return text
    raise argparse.ArgumentTypeError(
        f"there is no verb {text!r}{alike(text, VERBS)}: choose from {', '.join(VERBS)}"
    )


def _whole_number(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2^64 - 1")
    return value


def _choose(argv: list[str]) -> tuple[str, list[str]]:
    """The verb and what follows it. Exits for --help, --version and an unknown verb."""
    width = max(map(len, VERBS))
    parser = _Parser(
        prog="kvcache",
        usage="kvcache [-h] [-V] VERB [--json] [--seed N] ...",
        description="KV-cache management and offload for LLM serving.",
        epilog="\n".join(
            ["verbs:"]
            + [f"  {verb:{width}}  {text}" for verb, text in VERBS.items()]
            + ["", "`kvcache VERB --help` lists the options of a verb."]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-V", "--version", action="version", version=f"kvcache {kvcache.__version__}"
    )
    parser.add_argument("verb", metavar="VERB", type=_verb_name, help="what to do")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    if argv and argv[0].startswith("-") and argv[0] not in _WITHOUT_VERB:
        parser.error(f"{argv[0]} comes after the verb: kvcache VERB {argv[0]} ...")
    chosen = parser.parse_args(argv)
    return chosen.verb, chosen.rest


def _run(argv: list[str]) -> int:
    verb, rest = _choose(argv)
    command = importlib.import_module(f"kvcache.commands.{verb}")
    parser = _Parser(prog=f"kvcache {verb}", description=command.HELP, allow_abbrev=False)
    common = parser.add_argument_group("common options")
    common.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, and nothing else there"
    )
    common.add_argument(
        "--seed", type=_whole_number, default=0, metavar="N", help="seed of all randomness (0)"
    )
    command.add_arguments(parser)
    status: int = command.run(parser.parse_args(rest))
    try:
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "stdout") from error
    return status


def _quiet_exit() -> None:
    """Points a stdout that cannot be written at nothing: the interpreter flushes it once more."""
    try:
        sys.stdout.flush()
    except OSError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def _said(end: SystemExit) -> int:
    """The status of a help text or a usage error; a help text that did not arrive is a failure."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return _report(error)
    return end.code if isinstance(end.code, int) else FAILED


def _say(message: str) -> None:
    """One line on stderr, if anybody is there to read it."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"kvcache: {' '.join(message.split())}\n")
        sys.stderr.flush()


def _report(error: KVCacheError | OSError | ModuleNotFoundError) -> int:
    """Says what went wrong and returns the exit status of it."""
    if isinstance(error, ConfigError | InputError | CapacityError):
        _say(str(error))
        return BAD_INPUT
    if isinstance(error, KVCacheError):
        _say(f"{type(error).__name__}: {error}")
        return FAILED
    if isinstance(error, OSError):
        _quiet_exit()
        _say(f"{error.filename or 'stdout'}: {error.strerror or error}")
        return BAD_INPUT
    extra = EXTRAS.get(error.name or "")
    if extra is None:
        raise error
    _say(
        f"{error.name} is not installed: pip install 'kvcache[{extra}]', or in a checkout"
        f" pip install '.[{extra}]'"
    )
    return FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit status. `argv` without the program's name."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    # A stream that was closed before the start is None: what would be said there is dropped.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 (lives as long as we do)
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale without the character
    try:
        return _run(arguments)
    except SystemExit as end:  # argparse has said its line
        return _said(end)
    except BrokenPipeError:  # who read our output has left (`| head`)
        _quiet_exit()
        return FAILED
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except MemoryError:
        _say("out of memory: give smaller sizes, or more memory")
        return FAILED
    except (KVCacheError, OSError, ModuleNotFoundError) as error:
        return _report(error)


if __name__ == "__main__":
    sys.exit(main())
