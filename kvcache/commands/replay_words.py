"""The result of a replay as a table for people."""

from __future__ import annotations

from typing import Any


def _describe_preset(report: dict[str, Any]) -> str:
    ranks = f"TP {report['tp']}" + (f", DCP {report['dcp']}" if report["dcp"] > 1 else "")
    return f"{report['preset']}, {ranks}, KV {report['kv_dtype']}, retention {report['retention']}"


def _describe_pool(report: dict[str, Any]) -> str:
    tokens, blocks = report["pool_tokens"], report["block_tokens"]
    pages = ", ".join(f"{count:,} {name}" for name, count in report["pages_per_slab"].items())
    grid = (
        ""
        if report["grid_tokens"] == blocks
        else f", hits on multiples of {report['grid_tokens']:,}"
    )
    if tokens == "inf":
        return f"without bound, blocks of {blocks} tokens{grid}"
    return (
        f"{tokens:,} tokens in blocks of {blocks}{grid}: {report['pool_slabs']:,} slabs of"
        f" {report['slab_bytes'] / 2**20:,.1f} MiB, pages in one: {pages}"
    )


def _describe_requests(report: dict[str, Any]) -> str:
    text = f"{report['requests']:,}"
    if report["lanes"] is None:
        return text
    warm_up = report["played_requests"] - report["requests"]
    return (
        f"{text} in {report['lanes']} lanes and {report['hours']:g} hours, lines played again among"
        f" them; {warm_up:,} before, as warm-up"
    )


def _describe_rates(report: dict[str, Any]) -> str:
    text = f"{report['hit_rate']:.4f}  (ideal {report['ideal_hit_rate']:.4f}"
    if report["oracle_hit_rate"] is not None:
        text += f", page-exact LRU {report['oracle_hit_rate']:.4f}"
    return text + ")"


def describe(report: dict[str, Any]) -> list[str]:
    """The result as a table for people."""
    prompt = report["prompt_tokens"]
    rows = [
        ("trace", report["trace"]),
        ("preset", _describe_preset(report)),
        ("pool", _describe_pool(report)),
        ("requests", _describe_requests(report)),
        ("prompt tokens", f"{prompt:,}"),
        ("hit rate", _describe_rates(report)),
    ]
    rows += [
        (f"lost: {cause.replace('_', ' ')}", f"{tokens / max(1, prompt):.4f}  ({tokens:,} tokens)")
        for cause, tokens in report["lost_tokens_by_cause"].items()
        if tokens
    ]
    policy = report["checkpoints_per_request"]
    end = report["end_of_turn_checkpoints_per_request"]
    if policy or end:
        rows.append(("states kept", f"{policy:.2f} per request, {end:.2f} at the end of the turn"))
    if report["reclaimed_slabs"]:
        rows.append(
            (
                "slabs reclaimed",
                f"{report['reclaimed_slabs']:,}, {report['moved_pages']:,} pages moved",
            )
        )
    if "hardware" in report:
        rows += _describe_times(report)
    rows += [
        ("peak used", f"{report['peak_used_bytes'] / 2**30:,.1f} GiB"),
        ("leaked blocks", str(report["leaked_blocks"])),
        *([("checks", f"{report['checks']:,}")] if report["checks"] else []),
        ("wall time", f"{report['wall_seconds']:.1f} s"),
        ("processor time", f"{report['cpu_seconds']:.1f} s"),
        (
            "of that",
            "{manager_seconds:.1f} s {what}, {explain_seconds:.1f} s causes".format(
                what="scheduler and manager" if "hardware" in report else "manager", **report
            ),
        ),
    ]
    rows += [("note", text) for text in report["notes"]]
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {value}" for name, value in rows]


def _describe_times(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Time, and what took it."""
    rows = [
        (
            "simulated",
            "{simulated_seconds:,.1f} s on {hardware}, busy {busy_share:.1%}, {steps:,} steps".format(
                **report
            ),
        ),
        (
            "rates",
            "{requests_per_second:,.2f} requests, {prompt_tokens_per_second:,.0f} prompt and"
            " {output_tokens_per_second:,.0f} output tokens a second".format(**report),
        ),
    ]
    for name, title in (
        ("ttft_seconds", "first token"),
        ("latency_seconds", "latency"),
        ("queue_seconds", "in the queue"),
        ("seconds_per_output_token", "an output token"),
    ):
        spread = report[name]
        if spread["mean"] is not None:
            text = ", ".join(f"{key} {value:,.4g}" for key, value in spread.items())
            rows.append((title, f"{text} s"))
    rows.append(
        (
            "preemptions",
            f"{report['preemptions']:,}, {report['recomputed_tokens']:,} tokens computed again",
        )
    )
    if report["host"] is not None:
        rows.append(("host tier", _describe_host(report["host"])))
    return rows


def _describe_host(host: dict[str, Any]) -> str:
    sizes = [host[name] / 2**30 for name in ("capacity_bytes", "loaded_bytes", "stored_bytes")]
    return (
        "{:,.1f} GiB, {:,.1f} GiB loaded, {:,.1f} stored".format(*sizes)
        + f", link busy {host['load_busy_share']:.1%} and {host['store_busy_share']:.1%}"
    )
