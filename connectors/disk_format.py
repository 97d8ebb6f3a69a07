"""What a page's file on disk is called, and what stands in it before the page: one format, one version.

    FOLDER/ROLE-LAYOUT/GROUP/ab/abcd...            native keys: the digest; two letters are a folder
    FOLDER/ROLE-LAYOUT/GROUP/ab/abcd...-0123...    foreign keys: digest and namespace

    0     head: all that makes this page this page; whoever reads it knows what it must be
    120   XXH3-128 of the whole file, with zeros in place of itself
    4096  the page, zeros up to a multiple of 4096

LAYOUT is a digest of everything that changes the bytes of pages and is not in their keys. So other
layouts, and other versions of this format, are other folders. ROLE is a digest of that part of it that
says whose they are, a model's and a rank's: who comes replaces its own old geometry, and nothing of others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys

import numpy as np
from numpy.typing import NDArray

from kvcache.core.hashing import Fingerprint
from kvcache.core.layout import Geometry
from kvcache.core.specs import GroupSpec

VERSION = 1
MAGIC = b"kvcpage\n"
HEAD_DTYPE = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("group", "<u4"),
        ("page_bytes", "<u8"),
        ("layout", "u1", 32),
        ("name", "u1", 64),
    ]
)
"""`name`: namespace and digest of the key, as in `Transfer.names`."""

FILE_NAME_BYTES = 136
"""`ab/`, 64 letters, `-`, 64 letters, zeros."""

_LETTERS = np.frombuffer(b"".join(b"%02x" % i for i in range(256)), np.uint8).reshape(256, 2)
_PATTERN = re.compile(r"([0-9a-f]{64})(?:-([0-9a-f]{64}))?")


def layout_text(geometry: Geometry, fingerprint: Fingerprint, layout: str) -> str:
    """All that the bytes of pages depend on, for people too. The secret is not in it, keys have it.

    Args:
        layout: what the geometry does not know: rank, order of pages, kernels' formats.
    """
    lines = [
        f"kvcache page files, version {VERSION}, {sys.byteorder} endian",
        role_text(fingerprint, layout),
        *(f"group {i}: {_spec_text(group)}" for i, group in enumerate(geometry.groups)),
    ]
    return "\n".join(lines) + "\n"


def role_text(fingerprint: Fingerprint, layout: str) -> str:
    """Whose pages they are, whatever their geometry: what a process may take the place of."""
    lines = [
        f"model: {fingerprint.model!r}",
        f"KV dtype: {fingerprint.kv_dtype!r}",
        f"positions: {fingerprint.position_scheme!r}",
        f"layout: {layout!r}",
    ]
    return "\n".join(lines)


def _spec_text(group: GroupSpec) -> str:
    own = ""
    spec: object = group  # one that is no dataclass says no more than the protocol asks
    if dataclasses.is_dataclass(spec):
        own = "".join(f" {f.name}={getattr(spec, f.name)!r}" for f in dataclasses.fields(spec))
    rules = "".join(f" {name}={value!r}" for name, value in group.rules._asdict().items())
    return (
        f"{type(group).__name__}{own}; layers={group.layers} page_bytes={group.page_bytes}"
        f" window={group.window_tokens};{rules}"
    )


def layout_digest(text: str) -> bytes:
    """32 bytes that name a layout."""
    return hashlib.sha256(b"kvcache/layout/1\0" + text.encode()).digest()


def layout_name(role: str, layout: bytes) -> str:
    """Name of the folder of a layout. Layouts of one role take each other's place.

    Args:
        role: `role_text`.
    """
    of_role = hashlib.sha256(b"kvcache/role/1\0" + role.encode()).hexdigest()
    return f"{of_role[:8]}-{layout.hex()[:32]}"


def heads(
    layout: bytes, group: int, page_bytes: int, names: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """`[n, HEAD_DTYPE.itemsize]`: what must stand in the files of these pages."""
    rows = np.zeros(len(names), HEAD_DTYPE)
    rows["magic"], rows["version"] = MAGIC, VERSION
    rows["group"], rows["page_bytes"] = group, page_bytes
    rows["layout"] = np.frombuffer(layout, np.uint8)
    rows["name"] = names
    return rows.view(np.uint8).reshape(len(names), HEAD_DTYPE.itemsize)


def file_names(names: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`[n, FILE_NAME_BYTES]`: the files of pages, in the folder of their group."""
    n = len(names)
    out = np.zeros((n, FILE_NAME_BYTES), np.uint8)
    letters = _LETTERS[names].reshape(n, 128)
    out[:, :2], out[:, 2], out[:, 3:67] = letters[:, 64:66], ord("/"), letters[:, 64:]
    foreign = names[:, :32].any(axis=1)
    out[foreign, 67], out[foreign, 68:132] = ord("-"), letters[foreign, :64]
    return out


def name_of_file(name: str) -> bytes | None:
    """Namespace and digest, 64 bytes, of a file in a folder of two letters; None: not of ours."""
    found = _PATTERN.fullmatch(name)
    if found is None:
        return None
    return bytes.fromhex(found[2] or "0" * 64) + bytes.fromhex(found[1])
