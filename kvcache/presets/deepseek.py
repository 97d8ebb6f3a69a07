"""DeepSeek V2 and V3 (MLA), V3.2 (with an indexer), V4 (compressed entries, window, pooling)."""

from __future__ import annotations

from kvcache.presets.fields import MOST_WINDOW, Fields
from kvcache.presets.layers import CompressedLatent, Latent, Layers
from kvcache.presets.model import Model

DEEPSEEK_V3 = Model(
    name="deepseek-v3",
    layers=(Latent(layers=61, rank=512, rope_dim=64),),
    sources=(
        (
            "config.json of deepseek-ai/DeepSeek-V3, the defaults of transformers' DeepseekV3Config:"
            " num_hidden_layers 61, kv_lora_rank 512, qk_rope_head_dim 64"
        ),
    ),
)
"""70,272 bytes per token on every rank; R1 and Kimi K2 too. Source: config.json of DeepSeek-V3."""

_V4_CODE = (
    "deepseek_v4/attention.py and compressor.py, sparse_swa.py of vLLM: a row of 448 fp8, 64 bf16"
    " and 8 scale bytes; 132 bytes an index key; pooling states of float32, twice the head"
    " dimension a token, twice more where entries overlap"
)

_V4_BOUNDARY = (
    "what a hit reads of the pooling states: 4 rows of the light ones, none of the heavy ones at"
    " multiples of 128 tokens; read in vLLM's compressor.py, not run (vLLM itself keeps 8 and 128)"
)


def _v4(windows: int, light: int, heavy: int) -> CompressedLatent:
    return CompressedLatent(
        windows=windows,
        light=light,
        heavy=heavy,
        head_dim=512,
        rope_dim=64,
        index_dim=128,
        window=128,
    )


DEEPSEEK_V4_PRO = Model(
    name="deepseek-v4-pro",
    layers=(_v4(windows=61, light=30, heavy=31),),
    sources=(
        (
            "config.json of deepseek-ai/DeepSeek-V4-Pro as hw-native-sys/pypto-lib has it"
            " (models/deepseek/v4/config.py, PRO): compress_ratios with 31 of 128 and 30 of 4 in 61"
            " layers, head_dim 512, qk_rope_head_dim 64, index_head_dim 128, sliding_window 128"
            " (transformers' DeepseekV4Config with 61 layers and no ratios has 32 and 29: not this model)"
        ),
        _V4_CODE,
    ),
    unverified=(_V4_BOUNDARY,),
)
"""5,511 bytes per token, a window of 4.35 MiB, pooling of 1.2 MiB. Source: config, vLLM's code."""

DEEPSEEK_V4_FLASH = Model(
    name="deepseek-v4-flash",
    layers=(_v4(windows=43, light=21, heavy=20),),
    sources=(
        (
            "config.json of deepseek-ai/DeepSeek-V4-Flash (alibaba/rtp-llm has a copy in its tests;"
            " pypto-lib, FLASH): compress_ratios with 2 of 0, 21 of 4 and 20 of 128 in 43 layers,"
            " head_dim 512, qk_rope_head_dim 64, index_head_dim 128, sliding_window 128"
        ),
        _V4_CODE,
    ),
    unverified=(_V4_BOUNDARY,),
)
"""3,850 bytes per token, a window of 3.07 MiB, pooling of 0.8 MiB. Source: config, vLLM's code."""


def read(fields: Fields) -> list[Layers]:
    """DeepseekV2Config, V3, V3.2; Kimi K2; Glm4MoeLiteConfig; GlmMoeDsaConfig.

    With an indexer each layer has index keys, but those of `indexer_types` "shared", which read the
    choice of an earlier layer.
    """
    layers = fields.layers()
    rank = fields.whole("kv_lora_rank")
    rope_dim = fields.whole("qk_rope_head_dim", least=0)
    if not fields.expects("index_head_dim"):
        return [Latent(layers=layers, rank=rank, rope_dim=rope_dim)]
    index_dim = fields.whole("index_head_dim")
    indexed = _indexed(fields, layers)
    found: list[Layers] = []
    if indexed:
        found.append(Latent(layers=indexed, rank=rank, rope_dim=rope_dim, index_dim=index_dim))
    if layers - indexed:
        name = "mla_shared" if indexed else "mla"
        found.append(Latent(layers=layers - indexed, rank=rank, rope_dim=rope_dim, name=name))
    return found


def _indexed(fields: Fields, layers: int) -> int:
    """Layers with an indexer of their own: listed, or by pattern, or by the schedule of GLM-5.2."""
    if fields.has("indexer_types"):
        return sum(fields.per_layer("indexer_types", layers, {"full": 1, "shared": 0}))
    if fields.has("index_topk_pattern"):
        return sum(fields.per_layer("index_topk_pattern", layers, {"F": 1, "S": 0}))
    if not fields.has("index_topk_freq"):
        return layers
    every = max(1, fields.whole("index_topk_freq", least=0))
    offset = 2
    if fields.has("index_skip_topk_offset"):
        offset = fields.whole("index_skip_topk_offset", least=0)
    return sum(max(i - offset + 1, 0) % every == 0 for i in range(layers))


def read_v4(fields: Fields) -> list[Layers]:
    """DeepseekV4Config: `compress_ratios` of the checkpoints, or `layer_types` of transformers."""
    layers = fields.layers()
    if fields.has("compress_ratios"):
        ratios = fields.per_layer("compress_ratios", layers, {0: 0, 1: 0, 4: 4, 128: 128})
    else:
        rates = fields.section("compress_rates")
        light = rates.whole("compressed_sparse_attention")
        heavy = rates.whole("heavily_compressed_attention")
        if (light, heavy) != (4, 128):
            raise rates.error(f"ratios are {light} and {heavy}: only 4 and 128 are known")
        kinds = {
            "sliding_attention": 0,
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 128,
        }
        ratios = fields.per_layer("layer_types", layers, kinds)
    return [
        CompressedLatent(
            windows=layers,
            light=ratios.count(4),
            heavy=ratios.count(128),
            head_dim=fields.whole("head_dim"),
            rope_dim=fields.whole("qk_rope_head_dim", least=0, most=fields.whole("head_dim")),
            index_dim=fields.whole("index_head_dim"),
            window=fields.whole("sliding_window", most=MOST_WINDOW),
        )
    ]
