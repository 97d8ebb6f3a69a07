"""`kvcache explain TRACE`: why the requests of a trace lost tokens, with the evidence."""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcache.bench.replay import play
from kvcache.bench.traces import TraceRequest
from kvcache.commands.numbers import whole_number
from kvcache.commands.output import Progress, emit_json
from kvcache.commands.replay import add_trace_arguments, open_replay
from kvcache.core.errors import ConfigError
from kvcache.core.explain_words import lines
from kvcache.core.explanation import CAUSES, Explanation, LastBlock, NotStored, Other

HELP = (
    "Replays a trace through the block manager and says why tokens were no hit: sums by cause, and the"
    " requests that lost most beside new content, in words. Times are those of the replay, not of the trace."
)

DEFAULT_TOP = 5
MOST_TOP = 10_000


class Explained(NamedTuple):
    """One request of the trace and what it lost."""

    number: int
    """In the order of the replay, the first is 1. Lines can be played more than once (`--lanes`)."""
    request: TraceRequest
    explanation: Explanation

    def lost_to(self, cause: str) -> int:
        """Tokens of one cause."""
        return self.explanation.lost()[cause]

    @property
    def avoidable(self) -> int:
        """Lost tokens, but for those that every cache loses: new content, and the last block."""
        return sum(
            loss.tokens
            for loss in self.explanation.losses
            if not isinstance(loss.evidence, LastBlock)
            and not (isinstance(loss.evidence, NotStored) and loss.evidence.why == "new")
        )

    def values(self) -> dict[str, Any]:
        """As JSON."""
        request, explanation = self.request, self.explanation
        return {
            "request": self.number,
            "line": request.line,
            "session": request.session,
            "agent": request.agent,
            "prompt_tokens": explanation.prompt_tokens,
            "hit_tokens": explanation.hit_tokens,
            "losses": [
                {
                    "cause": loss.cause,
                    "told": loss.told,
                    "start": loss.start,
                    "end": loss.end,
                    "evidence": plain(loss.evidence),
                    "words": words,
                }
                for loss, words in zip(explanation.losses, lines(explanation), strict=True)
            ],
        }

    def describe(self) -> list[str]:
        """In words."""
        request, explanation = self.request, self.explanation
        session = f", session {request.session!r}" if request.session else ""
        head = (
            f"request {self.number} (line {request.line}{session}): {explanation.hit_tokens:,} of"
            f" {explanation.prompt_tokens:,} tokens were hit"
        )
        return [head, *(f"  {line}" for line in lines(explanation))]


def plain(value: object) -> Any:
    """Records as objects, by the names of their fields; of another request its number."""
    if isinstance(value, Other):
        return {"request" if k == "handle" else k: v for k, v in value._asdict().items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(field) for name, field in value._asdict().items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The trace, how to replay it, and which requests to show."""
    add_trace_arguments(parser)
    parser.add_argument(
        "--top",
        type=whole_number,
        metavar="N",
        help="how many of the requests to show that lost most, new content and last blocks apart"
        f" (default: {DEFAULT_TOP})",
    )
    parser.add_argument(
        "--cause",
        choices=CAUSES,
        help="show the requests that lost most to this cause, those that lost nothing to it not at all",
    )
    parser.add_argument(
        "--request",
        type=whole_number,
        metavar="N",
        help="show the request alone that is played as number N; the replay ends with it",
    )


def run(args: argparse.Namespace) -> int:
    """Replay and explain; 0 unless the request is not there."""
    top = DEFAULT_TOP if args.top is None else args.top
    if not 0 <= top <= MOST_TOP:
        raise ConfigError(f"--top is {top}: it must be from 0 to {MOST_TOP}")
    if args.request is not None:
        if args.request < 1:
            raise ConfigError(f"--request is {args.request}: requests count from 1")
        if args.top is not None or args.cause is not None:
            raise ConfigError("--request shows one request: --top and --cause choose among all")
    started = time.perf_counter()
    replay, requests = open_replay(args)
    worst: list[tuple[int, int, Explained]] = []
    numbers: dict[int, int] = {}  # by handle
    count = 0
    with Progress() as progress:
        for count, (request, explanation) in enumerate(play(replay, requests), 1):
            explained = Explained(count, request, explanation)
            numbers[replay.handle] = count
            progress.update(f"explain: {count} requests, {time.perf_counter() - started:.0f} s")
            if args.request is not None:
                if count != args.request:
                    continue
                worst = [(0, 0, explained)]
                break
            lost = explained.lost_to(args.cause) if args.cause else explained.avoidable
            if request.counted and top and (lost or not args.cause):
                entry = (lost, -count, explained)
                (heapq.heappush if len(worst) < top else heapq.heappushpop)(worst, entry)
    if args.request is not None and not worst:
        raise ConfigError(f"--request {args.request}: {args.trace} has {count} requests to replay")
    shown = [
        explained._replace(explanation=numbered(explained.explanation, numbers))
        for _, _, explained in sorted(worst, reverse=True)
    ]
    report = replay.report() | {
        "played_requests": count,
        "shown": [explained.values() for explained in shown],
        "wall_seconds": time.perf_counter() - started,
    }
    if args.json:
        emit_json(report)
    else:
        sys.stdout.write("\n".join(describe(report, shown)) + "\n")
        sys.stdout.flush()
    return 0


def numbered(explanation: Explanation, numbers: Mapping[int, int]) -> Explanation:
    """Other requests have their numbers for handles, as `--request` takes them."""
    losses = []
    for loss in explanation.losses:
        named: dict[str, Any] = {
            field: value._replace(handle=numbers.get(value.handle, 0))
            for field, value in loss.evidence._asdict().items()
            if isinstance(value, Other)
        }
        losses.append(loss._replace(evidence=loss.evidence._replace(**named)))
    return explanation._replace(losses=tuple(losses))


def describe(report: dict[str, Any], shown: list[Explained]) -> list[str]:
    """Sums, then the requests, for people."""
    prompt = max(1, report["prompt_tokens"])
    rate = report["hit_tokens"] / prompt
    requests = f"{report['requests']:,} requests"
    rows = [f"{requests}, {report['prompt_tokens']:,} prompt tokens, {rate:.4f} of them hit; lost:"]
    if warm_up := report["played_requests"] - report["requests"]:
        rows.insert(0, f"{warm_up:,} requests of the warm-up are numbered too, and in no sum")
    rows += [
        f"  {cause:13}  {tokens / prompt:.4f}  ({tokens:,} tokens)"
        for cause, tokens in report["lost_tokens_by_cause"].items()
        if tokens
    ]
    if not shown:
        rows.append("no request to show")
    for explained in shown:
        rows += ["", *explained.describe()]
    return rows
