"""How a model is served, as far as the bytes of its pages go: block size, ranks, format of the KV."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.core.errors import ConfigError
from kvcache.core.values import whole

KV_DTYPES = ("auto", "bf16", "fp8", "fp8_ds_mla")
_MOST_RANKS = 65_536


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What one rank holds follows from this and the model's layers.

    Args:
        block_tokens: tokens of an attention page on one rank.
        tp: tensor-parallel ranks. Heads and recurrent states are dealt out, at least one head to a
            rank; latent rows and index keys are on every rank.
        dcp: context-parallel ranks, which take turns with the tokens of attention that keeps every
            token: a page number spans `block_tokens * dcp` tokens. Windows and states are on
            each of them.
        kv_dtype: "bf16" or "fp8" for every element, "fp8_ds_mla" for rows of latent attention that
            carry their scales, or "auto": bf16, but for models that are served in one format only.
            Recurrent states have a format of their own.
    """

    block_tokens: int = 128
    tp: int = 1
    dcp: int = 1
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        whole(self.block_tokens, "block_tokens", least=1)
        whole(self.tp, "tp", least=1, most=_MOST_RANKS)
        whole(self.dcp, "dcp", least=1, most=_MOST_RANKS)
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(
                f"kv_dtype is {self.kv_dtype!r}: choose one of {', '.join(KV_DTYPES)}"
            )

    def heads_of_rank(self, heads: int) -> int:
        """Heads of the rank that has most of `heads`; kept whole where there are too few."""
        return -(-heads // self.tp)

    def element_bytes(self, group: str) -> int:
        """Bytes of an element of K and V. `ConfigError`: the format is one of latent rows."""
        if self.kv_dtype == "fp8_ds_mla":
            raise ConfigError(
                f"kv_dtype fp8_ds_mla is a format of latent (MLA) rows: {group!r} keeps K and V of"
                " heads, choose bf16 or fp8"
            )
        return 1 if self.kv_dtype == "fp8" else 2
