"""The tables of docs/performance.md about the engine, from a report of `kvcache bench engine`.

kvcache bench engine --repeats 9 --seed 0 --output engine.json --json >/dev/null
python docs/engine_table.py engine.json
"""

# ruff: noqa: INP001  (a script, no module)

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROWS = (
    ("output tokens a second", "output_tokens_per_second", "{:.1f}"),
    ("mean latency, s", "mean_latency_seconds", "{:.1f}"),
    ("median first token, s", "median_first_token_seconds", "{:.1f}"),
    ("hit rate", "hit_rate", "{:.3f}"),
    ("tokens computed", "computed_tokens", "{:,}"),
    ("tokens restored", "restored_tokens", "{:,}"),
    ("CPU seconds", "cpu_seconds", "{:.0f}"),
    ("scheduler and manager, of a step", "scheduler_and_manager_share", "{:.2%}"),
)


def tables(report: dict[str, Any]) -> str:
    """What was measured where, each figure beside its aim, then each way."""
    machine, ways = report["machine"], report["ways"]
    medium = report["medium"]
    cache = "O_DIRECT" if medium["direct"] else "through the kernel's cache"
    lines = [
        (
            f"{report['model']}, {machine['threads']} of {machine['cpus']} CPUs ({machine['processor']}),"
            f" load {machine['load_average']:.1f}, torch {machine['torch']}, seed {report['seed']}; files on"
            f" {medium['file_system']}, {cache}. Outputs equal: {'yes' if report['outputs_equal'] else 'NO'}."
        ),
        "",
        "| figure | measured | aim | |",
        "|---|---|---|---|",
    ]
    aims = [("at least", name, aim) for name, aim in report["targets"].items()]
    aims += [("at most", name, aim) for name, aim in report["limits"].items()]
    for kind, name, aim in aims:
        value = report[name]
        reached = value >= aim if kind == "at least" else value <= aim
        lines.append(f"| `{name}` | {value:.3f} | {kind} {aim:g} | {'' if reached else 'missed'} |")
    lines.append(f"| `host_vs_unthrottled` | {report['host_vs_unthrottled']:.3f} | none | |")
    lines += ["", f"| | {' | '.join(ways)} |", f"|---|{'---|' * len(ways)}"]
    for label, key, form in ROWS:
        cells = " | ".join(form.format(way[key]) for way in ways.values())
        lines.append(f"| {label} | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(tables(json.loads(Path(sys.argv[1]).read_text())))
