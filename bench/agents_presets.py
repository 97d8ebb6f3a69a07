"""The models of the agent benchmark: the same layers as vLLM groups them, and as we do.

Both sides have the same groups with the same bytes a token. Block sizes are each side's own: a vLLM
block holds the largest page of any group, so its states force large attention blocks on it (544
tokens in `qwen3next`); ours are those that attention kernels like, beside states of any size.
Pools are compared at equal bytes: vLLM's blocks times the bytes of a block.

The groups and pool sizes are toy-sized stand-ins with the layer ratios and block sizes that vLLM
0.33 derives for each family; no model has just these layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.specs import (
    Compressed,
    FullAttention,
    GroupSpec,
    LatentAttention,
    LatentWindow,
    PoolingState,
    RecurrentState,
    SlidingWindow,
)

KV_HEADS, HEAD_DIM = 8, 128
LATENT_RANK = 512
"""Of MLA rows, in bf16: 1024 bytes a token."""
STATE_ELEMENTS = 128 * 128
"""Of vLLM's state pages, in fp32: 64 KiB before they are padded to a block."""

STATE_BYTES = ("block", "spec")
"""What a state of ours takes: as much as the vLLM block that holds it, or its bare elements.

The bare elements are few; a real state fills the block (that is why vLLM's blocks are as large as
they are). `block` gives no advantage to the side that does not pad.
"""


class Pools(NamedTuple):
    """vLLM block counts of the pools of one trace, and its third retention interval there."""

    blocks: tuple[int, ...]
    interval_tokens: int | None


@dataclass(frozen=True)
class AgentPreset:
    """One model: vLLM's groups, our groups, and the pools in which they are compared."""

    peer_groups: tuple[dict[str, Any], ...]
    attention: tuple[GroupSpec, ...]
    """Our groups, the recurrent ones apart: one for each `state` group of the peer is added."""
    pools: dict[str, Pools]
    """By name of the trace."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one vLLM block: the largest page of any group."""
        return max(map(peer_page_bytes, self.peer_groups))

    def geometry(self, state_bytes: str = "block") -> Geometry:
        """Our geometry. `state_bytes` is one of `STATE_BYTES`."""
        if state_bytes not in STATE_BYTES:
            raise ConfigError(f"--state-bytes is {state_bytes!r}: one of {', '.join(STATE_BYTES)}")
        size = self.block_bytes if state_bytes == "block" else STATE_ELEMENTS * 4
        states = [
            RecurrentState(name=f"state{i}", layers=1, state_bytes_per_layer=size)
            for i, group in enumerate(self.peer_groups)
            if group["kind"] == "state"
        ]
        return Geometry((*self.attention, *states))


def peer_page_bytes(group: dict[str, Any]) -> int:
    """Bytes of one page as vLLM's spec has it, unpadded."""
    if group["kind"] == "state":
        return int(group["state_elements"]) * 4
    rows = group["block_tokens"] // group.get("tokens_per_entry", 1)
    parts = 1 if group["kind"].startswith("latent") else 2
    row = parts * group["kv_heads"] * group["head_dim"] * group["element_bytes"]
    return int(rows * row)


def _peer(kind: str, block_tokens: int, **fields: int) -> dict[str, Any]:
    base = {"kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "element_bytes": 2}
    if kind.startswith("latent"):
        base |= {"kv_heads": 1, "head_dim": LATENT_RANK}
    return {"kind": kind, "block_tokens": block_tokens, **base, **fields}


def _peer_state(block_tokens: int) -> dict[str, Any]:
    return {"kind": "state", "block_tokens": block_tokens, "state_elements": STATE_ELEMENTS}


def _full(block_tokens: int) -> FullAttention:
    return FullAttention(
        name="full", layers=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_tokens=block_tokens
    )


def _window(name: str, window: int, block_tokens: int) -> SlidingWindow:
    return SlidingWindow(
        name=name,
        layers=1,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        window=window,
        block_tokens=block_tokens,
    )


PRESETS = {
    "gptoss": AgentPreset(
        peer_groups=(_peer("full", 16), _peer("window", 16, window=128)),
        attention=(_full(16), _window("window", 128, 16)),
        pools={
            "short": Pools((11933, 17867, 35671), 128),
            "long": Pools((29775, 45174), 4096),
        },
    ),
    "gemma3": AgentPreset(
        peer_groups=(_peer("full", 16), *(_peer("window", 16, window=1024) for _ in range(5))),
        attention=(_full(16), *(_window(f"window{i}", 1024, 16) for i in range(5))),
        pools={
            "short": Pools((11933, 17867, 35671), 128),
            "long": Pools((34487, 49886), 4096),
        },
    ),
    "qwen3next": AgentPreset(
        peer_groups=(_peer("full", 544), *(_peer_state(544) for _ in range(3))),
        attention=(_full(16),),
        pools={"short": Pools((418, 595, 1126), 4352)},
    ),
    "kimi_k3": AgentPreset(
        peer_groups=(_peer("latent", 128), *(_peer_state(128) for _ in range(3))),
        attention=(
            LatentAttention(name="latent", layers=1, rank=LATENT_RANK, rope_dim=0, block_tokens=64),
        ),
        pools={"short": Pools((1553, 2297, 4531), 1024), "long": Pools((3642, 5570), 4096)},
    ),
    "dsv4": AgentPreset(
        peer_groups=(
            _peer("latent", 256, tokens_per_entry=4),
            _peer("latent_window", 64, window=128),
            _peer("latent_window", 4, head_dim=2048, element_bytes=4, window=8),
            _peer("latent_window", 8, head_dim=1024, element_bytes=4, window=128),
        ),
        attention=(
            Compressed(
                name="compressed", layers=1, ratio=4, entry_bytes=2 * LATENT_RANK, block_tokens=128
            ),
            LatentWindow(
                name="window", layers=1, entry_bytes=2 * LATENT_RANK, window=128, block_tokens=64
            ),
            PoolingState(
                name="pooling4", layers=1, ratio=4, token_bytes=8192, block_tokens=4, overlap=True
            ),
            PoolingState(name="pooling128", layers=1, ratio=128, token_bytes=4096, block_tokens=8),
        ),
        pools={"short": Pools((3771,), 2048), "long": Pools((9152, 10116), 4096)},
    ),
    "mixed3": AgentPreset(
        peer_groups=(_peer("full", 128), _peer("window", 128, window=1024), _peer_state(128)),
        attention=(_full(16), _window("window", 1024, 16)),
        pools={"short": Pools((1553, 2297, 4531), 1024), "long": Pools((3642, 5570), 4096)},
    ),
}
"""By name. `gptoss`: full + window 128. `gemma3`: full + five windows of 1024. `qwen3next`, `kimi_k3`:
full or MLA + three recurrent groups. `dsv4`: compressed + window + pooling states. `mixed3`: full +
window + recurrent."""


FULL16 = AgentPreset(peer_groups=(_peer("full", 16),), attention=(_full(16),), pools={})
"""One full group with blocks of 16 tokens, for `kvcache bench manager`."""


def comparison_model(name: str) -> AgentPreset:
    """One of `PRESETS`, or `FULL16` by the name "full16"."""
    return FULL16 if name == "full16" else PRESETS[name]
