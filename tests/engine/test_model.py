"""What the models compute: against forwards that know no pages, and on real text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import gguf_writer as w, paged
from numpy.typing import NDArray

from kvcache.bench.dense import Dense
from kvcache.core.attention import PagedKV
from kvcache.engine import smollm2, tiny
from kvcache.engine.chat import Message, encode_chat, end_of_answer
from kvcache.engine.gguf import GGUF
from kvcache.engine.layers import Attention
from kvcache.engine.model import Model
from kvcache.engine.tokenizer import decode

torch.set_num_threads(1)

Floats = NDArray[np.float64]


@pytest.fixture(scope="module")
def real_model(smollm2_path: Path) -> Model:
    return smollm2.load_model(smollm2_path)


@pytest.fixture(params=["tiny", "window", "smollm2"])
def model(request: pytest.FixtureRequest) -> Model:
    if request.param == "smollm2":
        model: Model = request.getfixturevalue("real_model")
        return model
    return tiny.build_model(3, window=20 if request.param == "window" else None)


# ---- the llama architecture in float64, straight from its definition --------------------------------


def halves_first(weight: Floats, heads: int) -> Floats:
    """Query or key rows as in a GGUF file, back in the order where pair i is (i, i + half)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


def naive_llama(weights: dict[str, NDArray[np.float32]], tokens: NDArray[np.int32]) -> Floats:
    """Logits after each token; positions rotate (i, i + half) pairs."""
    get = {name: value.astype(np.float64) for name, value in weights.items()}
    n, dim = len(tokens), w.WIDTH // w.HEADS
    half = dim // 2
    angle = np.outer(np.arange(n), 10000.0 ** (-np.arange(half) / half))
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def norm(x: Floats, weight: Floats) -> Floats:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight

    def turn(x: Floats) -> Floats:
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = get["token_embd.weight"][tokens]
    for i in range(w.LAYERS):
        part = {k: get[f"blk.{i}.{k}.weight"] for k in (
            "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate",
            "ffn_up", "ffn_down")}  # fmt: skip
        h = norm(x, part["attn_norm"])
        q = turn((h @ halves_first(part["attn_q"], w.HEADS).T).reshape(n, w.HEADS, dim))
        k = turn((h @ halves_first(part["attn_k"], w.KV_HEADS).T).reshape(n, w.KV_HEADS, dim))
        v = (h @ part["attn_v"].T).reshape(n, w.KV_HEADS, dim)
        out = np.zeros((n, w.HEADS, dim))
        for t in range(n):
            for head in range(w.HEADS):
                kv = head * w.KV_HEADS // w.HEADS
                score = np.exp(k[: t + 1, kv] @ q[t, head] / np.sqrt(dim))
                out[t, head] = score / score.sum() @ v[: t + 1, kv]
        x = x + out.reshape(n, -1) @ part["attn_output"].T
        h = norm(x, part["ffn_norm"])
        gate = h @ part["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ part["ffn_up"].T)) @ part["ffn_down"].T
    return norm(x, get["output_norm.weight"]) @ get["token_embd.weight"].T


def test_a_gguf_model_computes_what_its_architecture_defines(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(w.llama_file())
    with GGUF(path) as file:
        weights = {name: file.read(name, shape) for name, shape in w.llama_shapes().items()}
    model = smollm2.load_model(path, block_tokens=4)
    tokens = paged.random_tokens(model, 23, seed=1)
    expected = torch.from_numpy(naive_llama(weights, tokens)).float()
    cuts = [1, 2, 9, 16, 17, 18]
    logits = paged.run(paged.new_sequence(model, 23, seed=2), tokens, cuts)
    for end, row in zip([*cuts, 23], logits, strict=True):
        paged.assert_close(row, expected[end - 1])


# ---- against the benchmark's dense forward -----------------------------------------------------------


def dense_logits(model: Model, tokens: NDArray[np.int32]) -> torch.Tensor:
    with torch.inference_mode():
        return Dense(model, 1, len(tokens)).prefill(torch.from_numpy(tokens))[0]


def test_a_prompt_computes_what_a_dense_forward_computes(model: Model) -> None:
    tokens = paged.random_tokens(model, 75, seed=4)
    (logits,) = paged.run(paged.new_sequence(model, 75, seed=4), tokens)
    paged.assert_close(logits, dense_logits(model, tokens), tolerance=1e-3)


def test_a_prompt_in_chunks_computes_what_one_chunk_computes(model: Model) -> None:
    tokens = paged.random_tokens(model, 75, seed=5)
    (whole,) = paged.run(paged.new_sequence(model, 75), tokens)
    *_, last = paged.run(paged.new_sequence(model, 75, seed=6), tokens, cuts=[7, 32, 64, 73])
    paged.assert_close(last, whole)


@pytest.mark.parametrize("in_place", [True, False])
def test_decoding_in_pages_computes_what_padded_dense_decoding_computes(
    model: Model, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 300)  # more than the core takes
    read: list[int] = []
    attend = PagedKV.attend

    def counted(*args: Any, **named: Any) -> Floats:
        read.append(len(args[1]))
        return attend(*args, **named)

    monkeypatch.setattr(PagedKV, "attend", counted)
    if not in_place:
        monkeypatch.setattr(Attention, "_in_place", lambda *_: None)
    lengths = np.array([33, 3, 17, 48])
    prompts = [paged.random_tokens(model, n, seed=n) for n in lengths]
    runner = paged.Runner(model, paged.pages_for(model, 64, requests=4))
    pages = np.random.default_rng(0).permutation(16).reshape(4, 4)
    requests = [paged.Request(runner, [pages[i]] * 2, state=i) for i in range(4)]
    dense = Dense(model, 4, 64)
    with torch.inference_mode():
        runner.run([r.chunk(p) for r, p in zip(requests, prompts, strict=True)])
        for i, prompt in enumerate(prompts):
            alone = Dense(model, 1, 64)
            alone.prefill(torch.from_numpy(prompt))
            for memory, one in zip(dense.memory, alone.memory, strict=True):
                for part, of_one in zip(memory, one, strict=True):
                    part[i] = of_one[0]
        for step in range(3):
            tokens = paged.random_tokens(model, 4, seed=step)
            runner.run([r.chunk(tokens[i : i + 1]) for i, r in enumerate(requests)])
            expected = dense.decode(torch.from_numpy(tokens), torch.from_numpy(lengths + step))
            paged.assert_close(runner.last_logits, expected, tolerance=1e-3)
    assert bool(read) == in_place


def test_the_real_model_answers_a_question(smollm2_path: Path, real_model: Model) -> None:
    tokenizer = smollm2.load_tokenizer(smollm2_path)
    prompt = encode_chat(tokenizer, [Message("user", "What is the capital of France?")])
    request = paged.new_sequence(real_model, 64, seed=1)
    answer, tokens = [], prompt
    while len(answer) < 20:
        tokens = request.runner.run([request.chunk(tokens)])
        if int(tokens[0]) in end_of_answer(tokenizer):
            break
        answer.append(int(tokens[0]))
    assert decode(tokenizer, answer) == "The capital of France is Paris."


def test_weights_are_read_once_for_all_page_sizes(smollm2_path: Path, real_model: Model) -> None:
    other = smollm2.load_model(smollm2_path, block_tokens=64)
    assert other.weights is real_model.weights
    assert other.geometry.groups[0].block_tokens == 64
    assert real_model.geometry.groups[0].page_bytes == 46_080 * 16


def test_equal_seeds_give_equal_tiny_models() -> None:
    one, same, other = (tiny.build_model(seed).weights for seed in (1, 1, 2))
    assert torch.equal(one.layers[0].mixer.qkv, same.layers[0].mixer.qkv)
    assert not torch.equal(one.layers[0].mixer.qkv, other.layers[0].mixer.qkv)
    assert one.name == same.name != other.name


@pytest.mark.parametrize("position", [0, 40, 79])
def test_the_tiny_model_sees_its_whole_context(position: int) -> None:
    model = tiny.build_model()
    tokens = paged.random_tokens(model, 80, seed=7)
    changed = tokens.copy()
    changed[position] = (changed[position] + 1) % 256
    one, other = (paged.run(paged.new_sequence(model, 80), t)[0] for t in (tokens, changed))
    assert float((one - other).abs().max()) > 1e-3
