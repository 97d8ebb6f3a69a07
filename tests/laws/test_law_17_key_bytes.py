"""Native keys, byte by byte: the format that `docs/architecture.md` gives, written a second time.

Every process and host must come to the same keys, so the bytes are frozen: a change of them is a
change of the domains' version number.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st
from laws import cases

from kvcache import Fingerprint, Sparse
from kvcache.core.errors import ConfigError
from kvcache.core.manager import Manager
from kvcache.core.media import Media, PromptEmbeddings
from kvcache.core.records import UNLIMITED

FINGERPRINT = Fingerprint(
    model="m", weights_epoch=3, kv_dtype="fp8", position_scheme="rope", secret=b"\x00s"
)
Item = tuple[int, int, bytes]
"""Offset and length in tokens, digest."""


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def root(unit: int, *, salt: str = "", lora: str = "", version: str = "") -> bytes:
    fields = ["m", "3", "fp8", "rope", "\x00s", str(unit), lora, salt, *([version] * bool(version))]
    coded = [text.encode() for text in fields]
    return sha(b"kvcache/root/1", *(struct.pack("<Q", len(text)) + text for text in coded))


def media_item(identifier: str, offset: int, length: int) -> Item:
    return offset, length, sha(b"kvcache/media/2\0", struct.pack("<q", length), identifier.encode())


def embedding_items(offset: int, values: np.ndarray, unit: int) -> list[Item]:
    """One for each part of it that lies in one hash unit."""
    kind = f"{values.dtype.str}/{values.dtype.name}/{values.shape[1]}"
    header = f"kvcache/embedding/1\0{kind}\0".encode()
    cuts = [at for at in range(offset, offset + len(values)) if at == offset or at % unit == 0]
    ends = [*cuts[1:], offset + len(values)]
    return [
        (a, b - a, sha(header, values[a - offset : b - offset].tobytes()))
        for a, b in zip(cuts, ends, strict=True)
    ]


def chain(parent: bytes, tokens: Sequence[int], unit: int, items: Sequence[Item]) -> list[bytes]:
    links = []
    for begin in range(0, len(tokens) // unit * unit, unit):
        inside = [i for i in sorted(items) if i[0] < begin + unit and i[0] + i[1] > begin]
        domain = b"kvcache/block+/2" if inside else b"kvcache/block/2"
        text = struct.pack(f"<{unit}i", *tokens[begin : begin + unit])
        extra = [digest + struct.pack("<q", offset - begin) for offset, _, digest in inside]
        parent = sha(domain.ljust(64, b"\0"), text, *extra, parent)
        links.append(parent)
    return links


def links_of(manager: Manager, tokens: Sequence[int], **options: object) -> list[bytes]:
    handle = manager.open(tokens, **options)  # type: ignore[arg-type]
    links = [row.tobytes() for row in manager.digests(handle)]
    manager.abort(handle)
    return links


def manager_of(name: str) -> Manager:
    geometry = cases.GEOMETRIES[name]
    return Manager(geometry, slabs=UNLIMITED, retention=Sparse(), fingerprint=FINGERPRINT)


pieces = st.lists(
    st.tuples(
        st.integers(0, 9), st.integers(1, 12), st.sampled_from(["cat", "kö\n", " ", None, None])
    ),
    max_size=4,
)
"""A gap, then so many tokens: an image by its identifier, or embeddings."""


@cases.law(80)
@given(
    name=cases.names,
    pieces=pieces,
    n=st.integers(1, 60),
    salt=st.sampled_from(["", "sält"]),
    lora=st.sampled_from(["", "x"]),
)
def test_law_17_keys_have_the_documented_bytes(
    name: str, pieces: list[tuple[int, int, str | None]], n: int, salt: str, lora: str
) -> None:
    m = manager_of(name)
    unit = m.geometry.hash_unit_tokens
    m.set_lora_version("x", "7")
    media, embeddings = [], []
    items: list[Item] = []
    at = 0
    for gap, length, identifier in pieces:
        at += gap
        if identifier is None:
            values = np.arange(at, at + 3 * length, dtype=np.float16).reshape(length, 3)
            embeddings.append(PromptEmbeddings(offset_tokens=at, values=values))
            items += embedding_items(at, values, unit)
        else:
            media.append(Media(identifier=identifier, offset_tokens=at, length_tokens=length))
            items.append(media_item(identifier, at, length))
        at += length
    tokens = [(17 * i) ^ (-i) for i in range(max(n, at))]
    start = root(unit, salt=salt, lora=lora, version="7" if lora else "")
    expected = chain(start, tokens, unit, items)
    options = {"salt": salt, "lora": lora, "media": media[::-1], "embeddings": embeddings}
    assert links_of(m, tokens, **options) == expected
    first = max(at, 1)  # media lie in the prompt; the rest may come later
    handle = m.open(tokens[:first], max_tokens=len(tokens), **options)  # type: ignore[arg-type]
    m.extend(handle, tokens[first:])
    assert [row.tobytes() for row in m.digests(handle)] == expected


def test_law_17_keys_of_today_are_keys_of_tomorrow() -> None:
    """The figures come from `chain` above, by hashlib alone."""
    m = manager_of("full")
    media = [Media(identifier="cat", offset_tokens=3, length_tokens=2)]
    values = np.array([[1, 2], [3, 4]], "<f4")
    embeddings = [PromptEmbeddings(offset_tokens=7, values=values)]
    plain = links_of(m, range(12), salt="s", lora="x")  # type: ignore[arg-type]
    mixed = links_of(m, range(12), salt="s", lora="x", media=media, embeddings=embeddings)  # type: ignore[arg-type]
    frozen = ["59f37d61c067b86c", "263fe60620112d41", "d805ebdb1a404ad7"]
    assert [link.hex()[:16] for link in plain] == frozen
    frozen = ["cc57e111ad0d97b9", "1ce0760247953f46", "596243aefbd245f1"]
    assert [link.hex()[:16] for link in mixed] == frozen


@pytest.mark.parametrize(("offset", "length"), [(-1, 2), (0, 0), (8, 2), (9, 1), (2**40, 1)])
def test_law_17_media_outside_the_prompt_are_refused(offset: int, length: int) -> None:
    m = manager_of("full")
    item = Media(identifier="cat", offset_tokens=offset, length_tokens=length)
    with pytest.raises(ConfigError, match="inside the prompt"):
        m.open(range(9), media=[item])  # type: ignore[arg-type]


def test_law_17_media_must_not_overlap() -> None:
    m = manager_of("full")
    items = [Media(identifier="cat", offset_tokens=o, length_tokens=3) for o in (1, 3)]
    with pytest.raises(ConfigError, match="not overlap"):
        m.open(range(9), media=items)  # type: ignore[arg-type]
    values = np.zeros((2, 2), np.float32)
    with pytest.raises(ConfigError, match="not overlap"):
        m.open(
            range(9),  # type: ignore[arg-type]
            media=items[:1],
            embeddings=[PromptEmbeddings(offset_tokens=3, values=values)],
        )
    assert m.stats().open_requests == 0


def test_law_17_embeddings_of_objects_have_no_bytes_to_hash() -> None:
    m = manager_of("full")
    values = np.array([[1, "a"]], dtype=object)
    with pytest.raises(ConfigError, match="give numbers"):
        m.open(range(9), embeddings=[PromptEmbeddings(offset_tokens=0, values=values)])  # type: ignore[arg-type]
