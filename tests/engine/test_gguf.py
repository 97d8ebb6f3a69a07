from __future__ import annotations

import collections
import os
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import gguf_writer as w
from hypothesis import given, settings, strategies as st

from kvcache.core.errors import ConfigError, InputError
from kvcache.engine.gguf import GGUF
from kvcache.engine.smollm2 import load_model, load_tokenizer
from kvcache.engine.tokenizer import BPETokenizer

HUGE = 2**61
Save = Callable[[bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Save:
    def save(data: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return save


def test_metadata_of_every_type_is_read(write: Save) -> None:
    scalars = {"u8": 200, "i8": -3, "u16": 60000, "i16": -7, "u32": 2**31, "i32": -9, "f32": 0.5,
               "bool": True, "u64": 2**63, "i64": -(2**40), "f64": 0.1}  # fmt: skip
    entries = [w.entry(f"one.{kind}", kind, value) for kind, value in scalars.items()]
    entries += [
        w.entry(f"many.{kind}", f"{kind}[]", [value] * 3) for kind, value in scalars.items()
    ]
    entries += [w.entry("text", "str", "grüße"), w.entry("texts", "str[]", ["a", "", "日本"])]
    entries += [w.entry("none", "i32[]", [])]
    with GGUF(write(w.gguf(entries))) as file:
        for kind, value in scalars.items():
            assert file.metadata[f"one.{kind}"] == value
            assert file.metadata[f"many.{kind}"].tolist() == [value] * 3
        assert file.text("text") == "grüße"
        assert file.texts("texts") == ["a", "", "日本"]
        assert file.whole_numbers("none") == []
        assert file.whole_number("one.u16", 0, 60000) == 60000
        assert file.number("one.f32", 0, 1) == 0.5


@pytest.mark.parametrize("kind", [w.F32, w.F16, w.Q4_1, w.Q8_0])
def test_elements_are_expanded_bit_for_bit(write: Save, kind: int) -> None:
    raw = w.random_blocks(kind, 3 * 64, np.random.default_rng(kind))
    table, data = w.pack({"pad": ([1], w.F32, b"\0\0\0\0"), "x": ([64, 3], kind, raw)})
    with GGUF(write(w.gguf((), table, data))) as file:
        values = file.read("x", (3, 64))
    assert values.dtype == np.float32
    assert values.ravel().view(np.uint32).tolist() == [
        int(v.view(np.uint32)) for v in w.expand(kind, raw)
    ]


def test_offsets_follow_the_alignment_of_the_file(write: Save) -> None:
    table, data = w.pack(
        {"a": ([2], w.F32, np.array([1, 2], "<f4").tobytes()),
         "b": ([1], w.F32, np.array([3], "<f4").tobytes())}, alignment=64)  # fmt: skip
    entries = [w.entry("general.alignment", "u32", 64)]
    with GGUF(write(w.gguf(entries, table, data, alignment=64))) as file:
        assert file.read("a", (2,)).tolist() == [1, 2]
        assert file.read("b", (1,)).tolist() == [3]


def test_the_real_file_is_what_it_is_known_to_be(smollm2_path: Path) -> None:
    raw = smollm2_path.read_bytes()
    kinds = {"F32": w.F32, "Q4_1": w.Q4_1, "Q8_0": w.Q8_0}
    with GGUF(smollm2_path) as file:
        count = collections.Counter(t.type.name for t in file.tensors.values())
        assert count == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
        assert file.metadata["llama.block_count"] == 30
        for name in ("token_embd.weight", "blk.29.ffn_down.weight", "output_norm.weight"):
            info = file.tensors[name]
            flat = file.read(name, info.shape).ravel()
            size = info.type.block.itemsize
            for block in (0, 1, info.blocks // 2, info.blocks - 1):
                at = info.start + block * size
                expected = w.expand(kinds[info.type.name], raw[at : at + size])
                first = block * info.type.block_elements
                assert flat[first : first + len(expected)].tolist() == expected


def tensor_file(
    sizes: Sequence[int] = (32,),
    kind: int = w.F32,
    offset: int = 0,
    data: bytes = bytes(128),
    **header: Any,
) -> bytes:
    return w.gguf((), [w.tensor("x", sizes, kind, offset)], data, **header)


HOSTILE = {
    "empty": (b"", "the file is empty"),
    "another format": (b"\x89PNG" + bytes(60), "not a GGUF model"),
    "old version": (w.gguf(version=1), "version 1 is not supported"),
    "big-endian": (w.gguf(version=3 << 24), "version 50331648 is not supported"),
    "tensor count": (w.gguf(counts=(HUGE, 0)), "number of tensors is 2305843009213693952"),
    "metadata count": (w.gguf(counts=(0, HUGE)), "number of metadata entries is 2305843"),
    "array length": (
        w.gguf([w.text("k") + bytes([9, 0, 0, 0, 10, 0, 0, 0]) + HUGE.to_bytes(8, "little")]),
        "length of 'k' is 2305843009213693952",
    ),
    "array bytes": (
        w.gguf(
            [w.text("k") + bytes([9, 0, 0, 0, 10, 0, 0, 0]) + (20).to_bytes(8, "little")],
            data=bytes(64),
        ),
        "needs 160 bytes",
    ),
    "string length": (
        w.gguf([HUGE.to_bytes(8, "little") + b"k"], data=bytes(64)),
        "needs 23058430",
    ),
    "key encoding": (w.gguf([w.entry(b"\xff\xfe", "u8", 1)]), "a metadata key .* is not UTF-8"),
    "value encoding": (w.gguf([w.entry("k", "str", b"\xc3")]), "value of 'k' .* is not UTF-8"),
    "value type": (w.gguf([w.text("k") + bytes([77, 0, 0, 0, 1])]), "'k' has the unknown type 77"),
    "nested array": (
        w.gguf([w.text("k") + bytes([9, 0, 0, 0, 9, 0, 0, 0]) + bytes(8)]),
        "unknown type 9",
    ),
    "truth value": (w.gguf([w.text("k") + bytes([7, 0, 0, 0, 2])]), "neither 0 nor 1"),
    "key twice": (w.gguf([w.entry("k", "u8", 1)] * 2), "metadata 'k' occurs twice"),
    "alignment": (w.gguf([w.entry("general.alignment", "u32", 12)]), "expected a multiple of 8"),
    "no alignment": (w.gguf([w.entry("general.alignment", "u32", 0)]), "from 8 to 1048576"),
    "no dimensions": (tensor_file(sizes=()), "has 0 dimensions"),
    "dimensions": (tensor_file(sizes=(1,) * 5), "has 5 dimensions"),
    "dimensions count": (
        w.gguf((), [w.text("x") + (2**31).to_bytes(4, "little")], bytes(64)),
        "2147483648 dimensions",
    ),
    "zero size": (tensor_file(sizes=(32, 0)), "expected sizes above 0"),
    "huge sizes": (tensor_file(sizes=(HUGE, HUGE, 8)), "reaches to byte"),
    "half a block": (tensor_file(sizes=(48,), kind=w.Q4_1), "a multiple of 32"),
    "tensor type": (tensor_file(kind=12), "has type 12: supported are F32, F16, Q4_1, Q8_0"),
    "tensor offset": (tensor_file(offset=4), "not a multiple of 32"),
    "far offset": (tensor_file(offset=HUGE), "reaches to byte"),
    "short data": (tensor_file(data=bytes(127)), "it is truncated or damaged"),
    "tensor twice": (w.gguf((), [w.tensor("x", [1], w.F32, 0)] * 2, bytes(64)), "occurs twice"),
    "overlap": (
        w.gguf((), [w.tensor("x", [32], w.F32, 0), w.tensor("y", [8], w.F32, 96)], bytes(256)),
        "'x' and 'y' overlap",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_with_its_name_and_what_is_wrong(write: Save, case: str) -> None:
    data, message = HOSTILE[case]
    with pytest.raises(InputError, match=rf"model\.gguf: .*{message}"):
        GGUF(write(data))


def test_a_claimed_size_is_refused_before_anything_is_allocated(write: Save) -> None:
    paths = [write(HOSTILE[c][0]) for c in ("array length", "huge sizes", "string length")]
    tracemalloc.start()
    for path in paths:
        with pytest.raises(InputError):
            GGUF(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_values_that_are_not_finite_are_refused(write: Save) -> None:
    path = write(tensor_file(data=np.full(32, np.nan, "<f4").tobytes()))
    message = "'x' holds values that are not finite"
    with GGUF(path) as file, pytest.raises(InputError, match=message):
        file.read("x", (32,))


def test_a_wrong_kind_of_metadata_is_named(write: Save) -> None:
    entries = [w.entry("a", "str", "12"), w.entry("b", "u32", 12), w.entry("c", "f32", 1.5),
               w.entry("d", "bool", True)]  # fmt: skip
    with GGUF(write(w.gguf(entries))) as file:
        for call in (
            lambda: file.whole_number("a", 0, 99),
            lambda: file.whole_number("b", 0, 11),
            lambda: file.whole_number("c", 0, 99),
            lambda: file.whole_number("d", 0, 99),
            lambda: file.number("a", 0, 1),
            lambda: file.text("b"),
            lambda: file.texts("a"),
            lambda: file.whole_numbers("b"),
        ):
            with pytest.raises(InputError, match="expected"):
                call()
        with pytest.raises(InputError, match="there is no metadata 'e'"):
            file.text("e")
        with pytest.raises(InputError, match="there is no tensor 'x'"):
            file.read("x", (1,))


def test_a_file_that_is_not_there_is_a_setting_error(tmp_path: Path) -> None:
    for call in (GGUF, load_model, load_tokenizer):
        with pytest.raises(ConfigError, match=r"gone\.gguf: No such file"):
            call(tmp_path / "gone.gguf")
    with pytest.raises(ConfigError, match="directory"):
        GGUF(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ConfigError, match="no plain file"):
        GGUF(tmp_path / "pipe.gguf")


def test_a_file_that_is_cut_short_while_it_is_read_is_named(write: Save) -> None:
    table, data = w.pack({"x": ([1 << 16], w.F32, bytes(1 << 18))})
    path = write(w.gguf((), table, data))
    with GGUF(path) as file:
        os.truncate(path, path.stat().st_size - (1 << 17))
        with pytest.raises(InputError, match=r"cut short while tensor 'x' was read"):
            file.read("x", (1 << 16,))


def test_no_message_is_as_long_as_a_name_in_the_file(write: Save) -> None:
    name = "k" * 1_000_000
    for data in (
        w.gguf([w.entry(name, "u8", 1)] * 2),
        w.gguf((), [w.tensor(name, [1], 77, 0)], bytes(64)),
        w.llama_file(architecture=name),
    ):
        with pytest.raises(InputError) as caught:
            load_model(write(data))
        assert len(str(caught.value)) < 500


# ---- whole models ------------------------------------------------------------------------------------

MODEL = w.llama_file()
HEADER_BYTES = MODEL.index(w.text("blk.1.ffn_down.weight")) + 60


def read_everything(path: Path) -> None:
    load_model(path)
    with GGUF(path) as file:
        BPETokenizer(file)
        for name, info in file.tensors.items():
            assert np.isfinite(file.read(name, info.shape)).all()


BAD_SETTINGS = {
    "architecture": ("mamba", "general.architecture is 'mamba'"),
    "block_count": (0, "from 1 to 1024"),
    "context_length": (2**40, "from 1 to 131072"),
    "embedding_length": (2**40, "from 1 to 65536"),
    "feed_forward_length": (96, r"need \[96, 32\]"),
    "head_count": (5, "do not divide"),
    "head_count_kv": (3, "do not divide"),
    "dimension_count": (4, "only the whole head, 8"),
    "freq_base": (float("nan"), "freq_base is nan"),
    "layer_norm_rms_epsilon": (-1.0, "expected a number from 0.0 to 1.0"),
}


@pytest.mark.parametrize("setting", BAD_SETTINGS)
def test_a_model_whose_settings_cannot_be_is_refused(write: Save, setting: str) -> None:
    value, message = BAD_SETTINGS[setting]
    with pytest.raises(InputError, match=rf"model\.gguf: .*{message}"):
        load_model(write(w.llama_file(**{setting: value})))


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for length in [*range(400), *range(400, len(MODEL), 61), len(MODEL) - 1]:
        path.write_bytes(MODEL[:length])
        with pytest.raises(InputError, match=r"cut\.gguf"):
            GGUF(path)


@st.composite
def damaged_models(draw: st.DrawFn) -> bytes:
    """The model with bytes changed, put in or left out, mostly in its header, or cut short."""
    data = bytearray(MODEL)
    places = st.integers(0, HEADER_BYTES) | st.integers(0, len(MODEL))
    numbers = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]).map(
        lambda n: n.to_bytes(8, "little")
    )
    for _ in range(draw(st.integers(1, 3))):
        at, patch = draw(places), draw(st.binary(max_size=5) | numbers)
        data[at : at + draw(st.sampled_from([0, len(patch), len(patch), 4]))] = patch
    return bytes(data[: draw(places)] if draw(st.integers(0, 9)) == 0 else data)


@settings(max_examples=200)
@given(damaged_models())
def test_a_damaged_file_gives_an_input_error_or_a_sound_model(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "model.gguf"
    path.write_bytes(data)
    named = ""
    try:
        read_everything(path)
    except InputError as error:
        named = str(error)
    assert named == "" or named.startswith(str(path))


def test_a_name_with_a_nul_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be the name"):
        GGUF("model\0.gguf")


def test_files_of_one_name_and_other_bytes_have_other_digests(tmp_path: Path) -> None:
    digests = set()
    for i in range(2):
        path = tmp_path / str(i) / "model.gguf"
        path.parent.mkdir()
        path.write_bytes(w.gguf([w.entry("general.name", "str", str(i))], []))
        with GGUF(path) as file:
            digests.add(file.digest())
    assert len(digests) == 2
