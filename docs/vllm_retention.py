# ruff: noqa: INP001, T201  (a script, no module)
"""What vLLM's own block manager hits in the scenes of docs/retention.md, "Beside vLLM".

    python docs/vllm_retention.py PYTHON        # of an environment that has vLLM 0.33.0

`make conformance` makes such an environment: .venv-vllm/bin/python. Exit status: 0 done; 2 for a
PYTHON that will not do, 1 where vLLM failed, with one line on stderr.

`tests/retention/test_vllm_figures.py` runs it and compares (`make conformance`).

The models are those of `kvcache bench agents`: toy layers in the ratios, and with the block sizes,
that vLLM derives for each family. One request runs at a time, in a pool that evicts nothing.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.agents_peer import ask_peer
from kvcache.bench.agents_presets import PRESETS
from kvcache.bench.agents_trace import AgentRequest
from kvcache.bench.peer import check_peer, python_advice
from kvcache.core.errors import ConfigError, KVCacheError

MODELS = ("gptoss", "gemma3", "kimi_k3", "mixed3")
BLOCKS, CHUNK = 40_000, 8192
DRAW = np.random.default_rng(0)


def text(tokens: int) -> NDArray[np.int32]:
    """Tokens that stand nowhere else."""
    return DRAW.integers(0, 50_000, tokens, dtype=np.int32)


def scenes() -> dict[str, list[AgentRequest]]:
    """Requests of each scene; each session has one turn, and they come one after the other."""
    system, prompt, reply, long = text(5000), text(6000), text(1500), text(20_000)
    end = text(1)
    parts = (12_000, 1500, 5000, 8500, 19_000)

    def turns(*prompts: NDArray[np.int32]) -> list[AgentRequest]:
        return [AgentRequest(n, 0, tokens, end) for n, tokens in enumerate(prompts)]

    second = np.concatenate([prompt, reply, text(700)])
    return {
        "shared system prompt of 5,000": turns(
            *(np.concatenate([system, text(1000)]) for _ in range(4))
        ),
        "prompt 6,000, reply 1,500, next turn": [
            AgentRequest(0, 0, prompt, reply),
            AgentRequest(0, 1, second, end),
        ],
        "20,000, then prompts that part at 12,000, 1,500, 5,000, 8,500, 19,000": turns(
            long, *(np.concatenate([long[:part], text(100)]) for part in parts)
        ),
    }


def main(arguments: list[str]) -> int:
    """Prints the hit of each request, or says in a line why it cannot."""
    try:
        (python,) = arguments
    except ValueError:
        return complain(2, f"usage: vllm_retention.py PYTHON; {python_advice('vllm')}")
    try:
        check_peer(python, "vllm", setting="PYTHON")
        measure(python)
    except ConfigError as error:
        return complain(2, str(error))
    except KVCacheError as error:
        return complain(1, str(error))
    return 0


def complain(status: int, message: str) -> int:
    """One line on stderr."""
    print(f"vllm_retention: {' '.join(message.split())}", file=sys.stderr)
    return status


def measure(python: str) -> None:
    """Each scene in vLLM."""
    for name, requests in scenes().items():
        runs = [
            {
                "preset": model,
                "groups": PRESETS[model].peer_groups,
                "blocks": BLOCKS,
                "interval": interval,
            }
            for model in MODELS
            for interval in (None, 0, 1024)
        ]
        environment, results = ask_peer(
            python,
            requests,
            runs,
            max_running=1,
            step_tokens=CHUNK,
            progress=lambda _: None,
        )
        print(f"{name} (vLLM {environment['vllm']}): tokens hit by each request")
        for run, result in zip(runs, results, strict=True):
            print(f"  {run['preset']}, interval {run['interval']}: {result['hits']}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
