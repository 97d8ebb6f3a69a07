"""`kvcache size MODEL`: what a model's cache takes, what fits, and which states are worth keeping."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from kvcache.bench.size_report import SizeRequest, size_report
from kvcache.commands.numbers import SUFFIXES, byte_count, retention, token_count, whole_number
from kvcache.commands.output import emit_json
from kvcache.core.values import human_bytes
from kvcache.presets import names
from kvcache.presets.serving import KV_DTYPES

HELP = (
    "KV bytes of a model on one rank: per token, per kept boundary, per session; what fits in a"
    " memory, and which retention interval pays."
)

COLUMNS = 100


def context_list(text: str) -> list[int]:
    """Numbers of tokens, separated by commas."""
    return [token_count(part) for part in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, how it is served, and what is asked of it."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a preset ({', '.join(names())}), or the path of a Hugging Face config.json or of"
        " its folder (./NAME if it is named like a preset)",
    )
    served = parser.add_argument_group("how it is served")
    served.add_argument(
        "--tp", type=whole_number, default=1, metavar="N", help="tensor-parallel ranks (default: 1)"
    )
    served.add_argument(
        "--dcp",
        type=whole_number,
        default=1,
        metavar="N",
        help="context-parallel ranks, among which the tokens of full attention are dealt out"
        " (default: 1)",
    )
    served.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="auto",
        help="format of K, V and latent rows (default: auto, bf16 where the model has no own one)",
    )
    served.add_argument(
        "--block-tokens",
        type=token_count,
        metavar="N",
        help="tokens of an attention page on one rank (default: what gives a hit grid of 128)",
    )
    served.add_argument(
        "--interval",
        type=retention,
        default=0,
        metavar="dense|0|N",
        help=f"retention of windows and states in cached sessions (default: 0); {SUFFIXES}",
    )
    asked = parser.add_argument_group("what is asked")
    asked.add_argument(
        "--context",
        type=context_list,
        action="extend",
        metavar="C[,C...]",
        help="tokens of a session, such as 128Ki, repeatable (default: 8Ki, 128Ki and 1Mi);"
        f" {SUFFIXES}",
    )
    asked.add_argument(
        "--memory",
        type=byte_count,
        metavar="BYTES",
        help="bytes for the cache on each rank, such as 80GB (powers of ten) or 24GiB (of two): how"
        " many sessions fit",
    )
    asked.add_argument(
        "--trace",
        metavar="FILE",
        help="request trace from whose reuse the interval is suggested, as in `kvcache replay`"
        " (default: figures of 500 recorded coding-agent sessions)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the sizes; 0."""
    chosen = {"contexts": tuple(args.context)} if args.context else {}
    report = size_report(
        SizeRequest(
            model=args.model,
            tp=args.tp,
            dcp=args.dcp,
            kv_dtype=args.kv_dtype,
            block_tokens=args.block_tokens,
            interval_tokens=args.interval,
            memory_bytes=args.memory,
            trace=args.trace,
            **chosen,
        )
    )
    if args.json:
        emit_json(report)
    else:
        sys.stdout.write("\n".join(describe(report)) + "\n")
    return 0


def describe(report: dict[str, Any]) -> list[str]:
    """The report as tables for people, at most `COLUMNS` wide."""
    lines = [
        *_paragraph(
            f"{report['model']} ({report['read_from']}): TP {report['tp']}, DCP {report['dcp']}, KV"
            f" {report['kv_dtype']}, pages of {report['block_tokens']} tokens; bytes of one rank"
        ),
        "",
        *_describe_rank(report),
        "",
        *_describe_groups(report["groups"]),
        "",
        *_describe_contexts(report),
        "",
        *_paragraph(
            f"suggested interval {report['suggested_interval']}:"
            f" {report['interval_reasoning']['text']}"
        ),
    ]
    titles = {"notes": "note", "unverified": "not verified", "sources": "source"}
    for name, title in titles.items():
        for text in report[name]:
            lines += _paragraph(f"{title}: {text}")
    return lines


def _describe_rank(report: dict[str, Any]) -> list[str]:
    parts = [
        f"{title} {human_bytes(report[name])}"
        for title, name in (
            ("states", "state_bytes"),
            ("windows", "window_bytes"),
            ("pooling", "pooling_bytes"),
        )
        if report[name]
    ]
    boundary = "nothing: every block is one"
    if report["bytes_per_boundary"]:
        boundary = f"{human_bytes(report['bytes_per_boundary'])}  ({', '.join(parts)})"
        if report["boundary_as_tokens"] is not None:
            boundary += f", as much as KV of {report['boundary_as_tokens']:,.0f} tokens"
    rows = [
        ("per token", f"{report['bytes_per_token']:,} B"),
        ("per boundary", boundary),
        ("hit grid", f"{report['grid_tokens']:,} tokens"),
        (
            "slab",
            f"{human_bytes(report['slab_bytes'])}, padding {report['padding_waste']:.2%} at most",
        ),
    ]
    return [f"{name:12}  {value}" for name, value in rows]


def _describe_groups(groups: list[dict[str, Any]]) -> list[str]:
    header = ("group", "kind", "layers", "page", "bytes", "per token", "boundary", "in slab", "pad")
    rows = [
        (
            group["name"],
            group["kind"],
            f"{group['layers']}",
            f"{group['tokens_per_page']:,}" if group["tokens_per_page"] else "-",
            human_bytes(group["page_bytes"]),
            f"{group['bytes_per_token']:,}" if group["bytes_per_token"] else "-",
            human_bytes(group["boundary_bytes"]) if group["boundary_bytes"] else "-",
            f"{group['pages_per_slab']:,}",
            f"{group['padding']:.2%}",
        )
        for group in groups
    ]
    return _table(header, rows, left=2)


def _describe_contexts(report: dict[str, Any]) -> list[str]:
    header = ["tokens", "running", "smallest arena", "cached", "boundaries"]
    memory = report["memory_bytes"]
    if memory is not None:
        header += ["running fit", "cached fit"]
    rows = []
    for context in report["contexts"]:
        row = [
            f"{context['context_tokens']:,}",
            human_bytes(context["running"]["bytes"]),
            human_bytes(context["smallest_arena_bytes"]),
            human_bytes(context["cached"]["bytes"]),
            f"{context['cached']['boundaries']:,}",
        ]
        if memory is not None:
            fit = context["sessions_that_fit"]
            row += [f"{fit[k]:,}" if fit[k] is not None else "-" for k in ("running", "cached")]
        rows.append(tuple(row))
    title = f"a session of so many tokens, cached at interval {report['interval']}"
    if memory is not None:
        title += f"; how many fit in {human_bytes(memory)}"
    return [f"{title}:", *_table(tuple(header), rows, left=0)]


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], left: int) -> list[str]:
    """Columns as wide as their content; the first `left` ones flush left."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, subsequent_indent="  ")
