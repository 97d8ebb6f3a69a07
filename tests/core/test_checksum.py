"""The checksum of page files is XXH3 with 128 bits, as everybody else has it."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from kvcache.core.errors import ConfigError
from kvcache.core.page_files import checksum

KNOWN = {
    241: "d894c74b1b3ea28f44dbd3180a664e27",
    1024: "54680c079a49361cd1abb5dbd52032f9",
    1025: "4010f40cb0ea5efda3908b116ddf0191",
    4196: "57dd6d7f08a95e62b0ae8d5c7d16a74a",
    65536: "5b9ee82cbb7745bfc4717f32a25f9b2b",
}
"""Of `pattern(length)`, by xxHash 0.8.4 (`xxh3_128_hexdigest` of the package xxhash 4.1.0)."""


def pattern(length: int) -> bytes:
    i = np.arange(length)
    return (i * 131 + (i >> 8) * 7).astype(np.uint8).tobytes()


def test_known_digests() -> None:
    for length, digest in KNOWN.items():
        assert checksum(pattern(length)).hex() == digest, length


PATHS = """
import sys
from kvcache.core.page_files import checksum
raw = sys.stdin.buffer.read()
print(*(checksum(raw[:n]).hex() for n in range(241, 2400, 13)))
"""


def test_all_instruction_sets_give_the_same_digests() -> None:
    raw = np.random.default_rng(0).integers(0, 256, 2400, dtype=np.uint8).tobytes()
    found = set()
    for path in ("", "avx2", "memcpy"):
        done = subprocess.run(
            [sys.executable, "-c", PATHS],
            input=raw,
            check=True,
            capture_output=True,
            env={**os.environ, "KVCACHE_COPY_PATH": path},
        )
        found.add(done.stdout)
    assert len(found) == 1


def test_shorter_inputs_are_refused() -> None:
    with pytest.raises(ConfigError, match="240 bytes to check"):
        checksum(bytes(240))
