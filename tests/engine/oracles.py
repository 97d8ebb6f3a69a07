"""Models of transformers with small random sizes, and the same weights as the engine has them.

transformers' modelling code is the independent oracle of the layers' maths: nothing of it is copied.
Its rotary embedding pairs (i, i + half) where the engine pairs neighbours, except where a model of
it says interleave: rows of projections are put in the engine's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from conftest import require
from torch import Tensor, nn

from kvcache.engine import ops
from kvcache.engine.layers import Attention, CompressedAttention, GatedDelta, KimiDelta, Latent
from kvcache.engine.layers.compressor import Compressor, Index, Series
from kvcache.engine.layers.latent import LowRank
from kvcache.engine.layers.recurrence import Heads
from kvcache.engine.model import Layer, Mixer, Weights

try:
    import transformers
    import transformers.utils.logging
    from transformers import masking_utils
    from transformers.models.deepseek_v4 import modeling_deepseek_v4
except ModuleNotFoundError:
    require("transformers", "the package transformers is not installed")

transformers.utils.logging.set_verbosity_error()  # it says which kernels it goes without

CONTEXT_TOKENS = 256
VOCABULARY = 64
EPSILON = 1e-6

Part = Callable[[str], Tensor]
"""A parameter of a layer, by its name in transformers."""


class Oracle(NamedTuple):
    """One model, twice."""

    model: nn.Module
    weights: Weights

    def logits(self, tokens: Tensor) -> Tensor:
        """`[T, vocabulary]`, all of the text in one pass."""
        with torch.inference_mode():
            logits: Tensor = self.model(input_ids=tokens[None], use_cache=False).logits[0]
        return logits


def randomize(module: nn.Module, seed: int) -> None:
    """Every parameter a random number: none is left at 0 or 1 where a fault would not show."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.named_parameters():
        values = torch.randn(value.shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif "conv1d" in name or value.dim() == 2:
            values = values * value.shape[-1] ** -0.5
        value.data.copy_(values)


def part_of(module: nn.Module, prefix: str = "") -> Part:
    """Parameters under a prefix, by name."""
    parameters = dict(module.named_parameters())

    def get(name: str) -> Tensor:
        return parameters[f"{prefix}{name}"].detach()

    return get


def stack(model: nn.Module, mixers: Sequence[Mixer], *, norms_from_one: bool = False) -> Weights:
    """The whole model around the mixers: all of these have the same MLP, norms, head."""
    one = 1.0 if norms_from_one else 0.0
    whole = part_of(model)
    layers = []
    for i, mixer in enumerate(mixers):
        p = part_of(model, f"model.layers.{i}.")
        layers.append(
            Layer(
                mixer_norm=one + p("input_layernorm.weight"),
                mixer=mixer,
                mlp_norm=one + p("post_attention_layernorm.weight"),
                gate_up=torch.cat((p("mlp.gate_proj.weight"), p("mlp.up_proj.weight"))),
                down=p("mlp.down_proj.weight"),
            )
        )
    return Weights(
        name="oracle",
        embed=whole("model.embed_tokens.weight"),
        layers=layers,
        norm=one + whole("model.norm.weight"),
        head=whole("lm_head.weight"),
        epsilon=EPSILON,
        context_tokens=CONTEXT_TOKENS,
    )


def in_pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows of halves (i, i + half) as neighbouring pairs."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def make(config: Any, seed: int) -> nn.Module:
    """A causal model of a configuration, with random weights, that attends in plain torch."""
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    randomize(model, seed)
    return model


def _common(width: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "rms_norm_eps": EPSILON,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


# ---- whole models ----------------------------------------------------------------------------------


def mistral(seed: int, window: int | None) -> Oracle:
    """GQA, over everything or over a sliding window."""
    heads, kv_heads, dim = 6, 2, 10
    config = transformers.MistralConfig(
        **_common(36, 2),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        sliding_window=window,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    model = make(config, seed)
    rotation = ops.rotation_table(CONTEXT_TOKENS, dim, 500.0)
    mixers = []
    for i in range(2):
        p = part_of(model, f"model.layers.{i}.self_attn.")
        q, k = (
            in_pairs(p(f"{name}_proj.weight"), n) for name, n in (("q", heads), ("k", kv_heads))
        )
        mixers.append(
            Attention(
                qkv=torch.cat((q, k, p("v_proj.weight"))),
                out=p("o_proj.weight"),
                kv_heads=kv_heads,
                head_dim=dim,
                rotation=rotation,
                window=window,
            )
        )
    return Oracle(model, stack(model, mixers))


def latent(p: Part, sizes: Any, rotation: Tensor | None) -> Latent:
    """An MLA layer of DeepSeek V3, or of Kimi Linear (without positions)."""
    heads, nope = sizes.num_attention_heads, sizes.qk_nope_head_dim
    up = p("kv_b_proj.weight").unflatten(0, (heads, -1))
    direct = sizes.q_lora_rank is None
    return Latent(
        query=p("q_proj.weight" if direct else "q_b_proj.weight"),
        row=p("kv_a_proj_with_mqa.weight"),
        row_norm=p("kv_a_layernorm.weight"),
        key_up=up[:, :nope].transpose(1, 2).contiguous(),
        value_up=up[:, nope:],
        out=p("o_proj.weight"),
        rope_dim=sizes.qk_rope_head_dim,
        epsilon=EPSILON,
        rotation=rotation,
        low_rank=None if direct else LowRank(p("q_a_proj.weight"), p("q_a_layernorm.weight")),
    )


def deepseek_v3(seed: int, q_rank: int | None) -> Oracle:
    """MLA with rotary positions."""
    config = transformers.DeepseekV3Config(
        **_common(36, 2),
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=q_rank,
        kv_lora_rank=14,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=8,
        first_k_dense_replace=2,
        rope_interleave=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    model = make(config, seed)
    rotation = ops.rotation_table(CONTEXT_TOKENS, 6, 500.0)
    mixers = [
        latent(part_of(model, f"model.layers.{i}.self_attn."), config, rotation) for i in range(2)
    ]
    return Oracle(model, stack(model, mixers))


def qwen3_5(seed: int) -> Oracle:
    """GDN in every layer."""
    sizes = Heads(key_heads=2, value_heads=6, key_dim=10, value_dim=8, taps=4)
    config = transformers.Qwen3_5TextConfig(
        **_common(36, 2),
        layer_types=["linear_attention"] * 2,
        linear_num_key_heads=sizes.key_heads,
        linear_num_value_heads=sizes.value_heads,
        linear_key_head_dim=sizes.key_dim,
        linear_value_head_dim=sizes.value_dim,
        linear_conv_kernel_dim=sizes.taps,
    )
    model = make(config, seed)
    mixers = []
    for i in range(2):
        p = part_of(model, f"model.layers.{i}.linear_attn.")
        mixers.append(
            GatedDelta(
                heads=sizes,
                qkv=p("in_proj_qkv.weight"),
                taps=p("conv1d.weight")[:, 0].t().contiguous(),
                decay=p("in_proj_a.weight"),
                decay_bias=p("dt_bias"),
                speed=p("A_log").exp(),
                rate=p("in_proj_b.weight"),
                gate=p("in_proj_z.weight"),
                norm=p("norm.weight"),
                out=p("out_proj.weight"),
                epsilon=EPSILON,
            )
        )
    return Oracle(model, stack(model, mixers, norms_from_one=True))


def kimi_linear(seed: int) -> Oracle:
    """KDA, then MLA without positions, then KDA."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    sizes = Heads(key_heads=3, value_heads=3, key_dim=10, value_dim=10, taps=3)
    config = transformers.KimiLinearConfig(
        **_common(36, 3),
        num_attention_heads=3,
        num_key_value_heads=3,
        kv_lora_rank=14,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=8,
        linear_num_heads=3,
        linear_head_dim=10,
        linear_conv_kernel_dim=sizes.taps,
        layer_types=kinds,
        mlp_layer_types=["dense"] * 3,
    )
    model = make(config, seed)
    mixers: list[Mixer] = []
    for i, kind in enumerate(kinds):
        p = part_of(model, f"model.layers.{i}.self_attn.")
        mixers.append(latent(p, config, None) if kind == "full_attention" else kimi_delta(p, sizes))
    return Oracle(model, stack(model, mixers))


def kimi_delta(p: Part, sizes: Heads) -> KimiDelta:
    """A KDA layer."""
    return KimiDelta(
        heads=sizes,
        qkv=torch.cat([p(f"{name}_proj.weight") for name in "qkv"]),
        taps=p("conv1d.weight")[:, 0].t().contiguous(),
        decay_in=p("forget_gate.f_a_proj.weight"),
        decay_out=p("forget_gate.f_b_proj.weight"),
        decay_bias=p("forget_gate.dt_bias"),
        speed=p("forget_gate.A_log").flatten().exp(),
        rate=p("b_proj.weight"),
        gate_in=p("g_a_proj.weight"),
        gate_out=p("g_b_proj.weight"),
        norm=p("o_norm.weight"),
        out=p("o_proj.weight"),
        epsilon=EPSILON,
    )


# ---- one layer of DeepSeek V4 ------------------------------------------------------------------------
# Its whole model has streams of residuals and experts that the engine has not.


class LayerOracle(NamedTuple):
    """One attention layer, twice."""

    module: nn.Module
    rotary: nn.Module
    config: Any
    mixer: CompressedAttention

    @property
    def width(self) -> int:
        """Of what goes in and out."""
        return int(self.config.hidden_size)

    def outputs(self, x: Tensor) -> Tensor:
        """`[T, width]`, all of the text in one pass."""
        positions = torch.arange(len(x))[None]
        mask = masking_utils.create_sliding_window_causal_mask(
            self.config, x[None], None, None, position_ids=positions
        )
        with torch.inference_mode():
            turns = {
                kind: self.rotary(x[None], position_ids=positions, layer_type=kind)
                for kind in ("main", "compress")
            }
            out: Tensor = self.module(
                x[None], position_embeddings=turns, position_ids=positions, attention_mask=mask
            )[0]
        return out[0]


def deepseek_v4(
    seed: int, kind: str, *, window: int = 9, ratio: int = 4, top: int = 3
) -> LayerOracle:
    """`compressed_sparse_attention`, `heavily_compressed_attention` or `sliding_attention`."""
    config = transformers.DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=36,
        num_hidden_layers=1,
        num_attention_heads=4,
        head_dim=10,
        partial_rotary_factor=0.4,
        q_lora_rank=14,
        sliding_window=window,
        layer_types=[kind],
        mlp_layer_types=["moe"],
        compress_rates={kind: ratio},
        o_groups=2,
        o_lora_rank=6,
        index_n_heads=8,
        index_head_dim=8,
        index_topk=top,
        rms_norm_eps=EPSILON,
        max_position_embeddings=CONTEXT_TOKENS,
        rope_theta=300.0,
        compress_rope_theta=500.0,
    )
    config._attn_implementation = "eager"
    module = modeling_deepseek_v4.DeepseekV4Attention(config, 0).float().eval()
    randomize(module, seed)
    p = part_of(module)
    compressor = None
    if kind != "sliding_attention":
        index = None
        if kind == "compressed_sparse_attention":
            index = Index(
                series=_series(part_of(module, "compressor.indexer.")),
                query=p("compressor.indexer.q_b_proj.weight"),
                weight=p("compressor.indexer.scorer.weights_proj.weight"),
                top=top,
            )
        compressor = Compressor(ratio, _series(part_of(module, "compressor.")), index)
    mixer = CompressedAttention(
        low_rank=LowRank(p("q_a_proj.weight"), p("q_a_norm.weight")),
        query=p("q_b_proj.weight"),
        row=p("kv_proj.weight"),
        row_norm=p("kv_norm.weight"),
        sinks=p("sinks"),
        out_in=p("o_a_proj.weight").unflatten(0, (2, -1)),
        out=p("o_b_proj.weight"),
        window=window,
        rotation=ops.rotation_table(
            CONTEXT_TOKENS, 4, 300.0 if kind == "sliding_attention" else 500.0
        ),
        epsilon=EPSILON,
        compressor=compressor,
    )
    rotary = modeling_deepseek_v4.DeepseekV4RotaryEmbedding(config)
    return LayerOracle(module, rotary, config, mixer)


def _series(p: Part) -> Series:
    return Series(
        value=p("kv_proj.weight"),
        gate=p("gate_proj.weight"),
        bias=p("position_bias"),
        norm=p("kv_norm.weight"),
    )
