"""The peer of the agent benchmark: vLLM's block manager, in an environment of its own.

`bench/peers/vllm_core.py` is run by the Python that has vLLM. It is told the trace, token by token,
and the runs; it answers with a line for each of them as it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvcache.bench.agents_trace import AgentRequest
from kvcache.bench.peer import PEER_SECONDS, SCRIPTS, Conversation

SCRIPT = SCRIPTS / "vllm_core.py"


def ask_peer(
    python: str,
    requests: Sequence[AgentRequest],
    runs: Sequence[dict[str, Any]],
    *,
    max_running: int,
    step_tokens: int,
    progress: Callable[[dict[str, Any]], None],
    deadline_seconds: float = PEER_SECONDS,
    script: Path = SCRIPT,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Let the peer play a trace once for each run; returns its environment and its figures.

    Blocks until the peer has ended. `progress` gets each run's figures as they arrive.

    Raises:
        ConfigError: `python` is no program that can be started.
        KVCacheError: the peer failed, the message ends with the last line it wrote; or it was not
            done after `deadline_seconds`.
    """
    question = {
        "trace": [[r.session, r.prompt.tolist(), r.output.tolist()] for r in requests],
        "max_running": max_running,
        "step_tokens": step_tokens,
        "runs": list(runs),
    }
    name = f"the peer ({python} {script.name})"
    with Conversation([python, str(script)], name=name, deadline_seconds=deadline_seconds) as peer:
        peer.tell(question, last=True)
        peer.doing = f"after 0 of {len(runs)} runs"
        environment, results = peer.hear(), []
        for done in range(len(runs)):
            results.append(peer.hear())
            peer.doing = f"after {done + 1} of {len(runs)} runs"
            progress(results[-1])
        peer.finish()
    return environment, results
