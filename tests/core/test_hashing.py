from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from conftest import require
from hypothesis import given, settings, strategies as st

from kvcache.core import native
from kvcache.core.errors import ConfigError
from kvcache.core.hashing import Fingerprint, as_tokens, hash_chain, root_digest

DOMAIN_BLOCK = b"kvcache/block/2".ljust(64, b"\0")
EXACT = settings(derandomize=True, database=None, deadline=None, max_examples=150)

sha256_lengths = [*range(130), 183, 184, 191, 192, 193, 1000, 4095, 4096, 4097]
digests = st.binary(min_size=32, max_size=32)
int32s = st.integers(-(2**31), 2**31 - 1)
TEXT_FIELDS = ("model", "kv_dtype", "position_scheme")


def native_sha256(path: int, data: bytes) -> bytes:
    ffi, lib = native.load()
    out = ffi.new("uint8_t[32]")
    native.call(lib.kvc_sha256, path, data, len(data), out)
    return bytes(ffi.buffer(out))


def chain_by_hashlib(parent: bytes, tokens: list[int], block_tokens: int) -> list[bytes]:
    links = []
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        block = np.array(tokens[end - block_tokens : end], "<i4").tobytes()
        parent = hashlib.sha256(DOMAIN_BLOCK + block + parent).digest()
        links.append(parent)
    return links


def has_sha_ni() -> bool:
    _, lib = native.load()
    return bool(lib.kvc_sha256(2, b"", 0, native.load()[0].new("uint8_t[32]")) == 0)


@pytest.fixture(params=[0, 1, 2], ids=["best", "portable", "sha-ni"])
def path(request: pytest.FixtureRequest) -> int:
    if request.param == 2 and not has_sha_ni():
        require("sha-ni", "this CPU has no SHA-NI")
    return int(request.param)


def test_sha256_equals_hashlib_at_every_padding_length(path: int) -> None:
    for n in sha256_lengths:
        data = bytes((7 * i + n) % 256 for i in range(n))
        assert native_sha256(path, data) == hashlib.sha256(data).digest(), n


def test_sha256_of_the_nist_vectors(path: int) -> None:
    # FIPS 180-4 example values, as published by NIST for SHA-256.
    assert (
        native_sha256(path, b"abc").hex()
        == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    assert (
        native_sha256(path, b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq").hex()
        == "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
    )


def test_best_path_names_what_runs() -> None:
    ffi, lib = native.load()
    expected = "sha-ni" if has_sha_ni() else "portable"
    assert ffi.string(lib.kvc_sha256_path()).decode() == expected


@pytest.mark.parametrize("bad_path", [-1, 3, 99])
def test_an_unknown_path_is_a_named_error(bad_path: int) -> None:
    with pytest.raises(ConfigError):
        native_sha256(bad_path, b"x")
    with pytest.raises(ConfigError):
        hash_chain(bytes(32), np.arange(4, dtype=np.int32), 4, path=bad_path)


@pytest.mark.parametrize("block_tokens", [*range(1, 20), 31, 32, 33, 128, 256, 544])
def test_chain_equals_hashlib_for_every_block_size(path: int, block_tokens: int) -> None:
    rng = np.random.default_rng(block_tokens)
    tokens = rng.integers(-(2**31), 2**31, size=5 * block_tokens + 3).tolist()
    parent = rng.bytes(32)
    links = hash_chain(parent, as_tokens(tokens), block_tokens, path=path)
    assert [bytes(link) for link in links] == chain_by_hashlib(parent, tokens, block_tokens)


@EXACT
@given(parent=digests, tokens=st.lists(int32s, max_size=80), block=st.integers(1, 33))
def test_chain_equals_hashlib_for_any_tokens(parent: bytes, tokens: list[int], block: int) -> None:
    expected = chain_by_hashlib(parent, tokens, block)
    for which in (0, 1):
        links = hash_chain(parent, as_tokens(tokens), block, path=which)
        assert [bytes(link) for link in links] == expected


@EXACT
@given(parent=digests, tokens=st.lists(int32s, max_size=60), cut=st.integers(0, 15))
def test_a_chain_continued_from_any_link_is_the_whole_chain(
    parent: bytes, tokens: list[int], cut: int
) -> None:
    whole = hash_chain(parent, as_tokens(tokens), 4)
    cut = min(cut, len(whole))
    middle = bytes(whole[cut - 1]) if cut else parent
    assert np.array_equal(hash_chain(middle, as_tokens(tokens[4 * cut :]), 4), whole[cut:])


@EXACT
@given(tokens=st.lists(int32s, min_size=4, max_size=40), where=st.integers(0, 39))
def test_a_changed_token_changes_its_link_and_all_later_ones(tokens: list[int], where: int) -> None:
    where %= len(tokens) // 4 * 4
    changed = [*tokens]
    changed[where] ^= 1
    before = hash_chain(bytes(32), as_tokens(tokens), 4)
    after = hash_chain(bytes(32), as_tokens(changed), 4)
    same = [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    assert same == [i < where // 4 for i in range(len(before))]


def test_a_partial_block_has_no_key() -> None:
    assert hash_chain(bytes(32), np.arange(7, dtype=np.int32), 8).shape == (0, 32)
    assert hash_chain(bytes(32), np.array([], dtype=np.int32), 8).shape == (0, 32)


@pytest.mark.parametrize(
    "call",
    [
        lambda: hash_chain(bytes(31), np.arange(4, dtype=np.int32), 4),
        lambda: hash_chain(bytes(33), np.arange(4, dtype=np.int32), 4),
        lambda: hash_chain(bytes(32), np.arange(4, dtype=np.int32), 0),
        lambda: hash_chain(bytes(32), np.arange(4, dtype=np.int32), -4),
    ],
    ids=["short parent", "long parent", "block of 0", "block below 0"],
)
def test_a_bad_parent_or_block_size_is_a_named_error(call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        call()


def test_native_calls_refuse_negative_counts() -> None:
    ffi, lib = native.load()
    out = ffi.new("uint8_t[32]")
    tokens = ffi.new("int32_t[4]")
    with pytest.raises(ConfigError):
        native.call(lib.kvc_sha256, 0, b"", -1, out)
    with pytest.raises(ConfigError):
        native.call(lib.kvc_hash_chain, 0, bytes(32), tokens, -1, 4, out)
    with pytest.raises(ConfigError):
        native.call(lib.kvc_hash_chain, 0, bytes(32), tokens, 1, 0, out)


# ---- tokens ----------------------------------------------------------------------------------------


def test_int32_tokens_are_not_copied() -> None:
    tokens = np.arange(8, dtype=np.int32)
    assert np.shares_memory(as_tokens(tokens), tokens)


@pytest.mark.parametrize("dtype", ["<i8", "<u2", "<u4", ">i4", "<i2"])
def test_tokens_of_any_integer_type_are_taken_by_value(dtype: str) -> None:
    tokens = as_tokens(np.array([0, 1, 32767], dtype))
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [0, 1, 32767]


@pytest.mark.parametrize(
    "tokens",
    [[2**31], [-(2**31) - 1], [0.5], [[1, 2]], ["a"], 7, [None]],
    ids=["above", "below", "fraction", "nested", "text", "scalar", "none"],
)
def test_tokens_that_are_no_int32_are_a_named_error(tokens: object) -> None:
    with pytest.raises(ConfigError):
        as_tokens(tokens)  # type: ignore[arg-type]


# ---- roots -----------------------------------------------------------------------------------------

fields = st.fixed_dictionaries(
    {
        **{name: st.sampled_from(["", "a", "b", "ab", "1", "16"]) for name in TEXT_FIELDS},
        "weights_epoch": st.sampled_from([0, 1, 11]),
        "secret": st.sampled_from([b"", b"a", b"\0"]),
        "unit": st.sampled_from([1, 16, 161]),
        "salt": st.sampled_from(["", "a", "b", "ab"]),
        "lora": st.sampled_from(["", "a", "b", "ab"]),
    }
)


def root_of(values: dict[str, object]) -> bytes:
    rest = {k: v for k, v in values.items() if k not in {"unit", "salt", "lora"}}
    return root_digest(
        Fingerprint(**rest),  # type: ignore[arg-type]
        hash_unit_tokens=values["unit"],  # type: ignore[arg-type]
        salt=values["salt"],  # type: ignore[arg-type]
        lora=values["lora"],  # type: ignore[arg-type]
    )


@settings(EXACT, max_examples=400)
@given(one=fields, other=fields)
def test_roots_are_equal_exactly_when_every_field_is(
    one: dict[str, object], other: dict[str, object]
) -> None:
    assert (root_of(one) == root_of(other)) == (one == other)


def test_moving_a_character_between_fields_changes_the_root() -> None:
    base = dict.fromkeys(TEXT_FIELDS, "") | {"weights_epoch": 0, "secret": b"", "unit": 16}
    texts = (*TEXT_FIELDS, "lora", "salt")
    roots = set()
    for name in texts:
        roots.add(root_of(base | {"salt": "", "lora": ""} | {name: "ab"}))
        for second in texts:
            if second != name:
                roots.add(root_of(base | {"salt": "", "lora": ""} | {name: "a", second: "b"}))
    assert len(roots) == len(texts) + len(texts) * (len(texts) - 1)


def test_a_root_is_the_same_in_every_process_and_release() -> None:
    # A golden value: changing the encoding of roots makes every stored key unreachable.
    encoded = hashlib.sha256(b"kvcache/root/1")
    for field in (b"m", b"3", b"bf16", b"rope", b"s", b"16", b"l", b"t"):
        encoded.update(len(field).to_bytes(8, "little") + field)
    root = root_digest(
        Fingerprint(
            model="m", weights_epoch=3, kv_dtype="bf16", position_scheme="rope", secret=b"s"
        ),
        hash_unit_tokens=16,
        salt="t",
        lora="l",
    )
    assert root == encoded.digest()
