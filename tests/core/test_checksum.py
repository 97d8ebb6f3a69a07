"""XXH3 with 128 bits: answers of the reference library, whichever instructions compute it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvcache.core.native import COPY_PATHS
from kvcache.core.page_files import checksum

# `xxhash.xxh3_128_hexdigest(data[:n])` of xxhash (pip) with the same data.
DATA = np.array([i * 7 % 251 for i in range(5000)], np.uint8)
ANSWERS = {
    241: "29bc1e9cffb6d79bc614c8c3575348c1",
    1024: "07fe8eadab1cf098f22ef3dc84ff47ea",
    1025: "c89d767cdacc7c7643f869a83769a435",
    5000: "5ecbf80121973a82ce29a19460ee1bfc",
}


def test_answers_of_the_reference_library() -> None:
    for length, answer in ANSWERS.items():
        assert checksum(DATA[:length].copy()).hex() == answer, length


@pytest.mark.parametrize("path", COPY_PATHS)
def test_every_instruction_set_gives_the_same(path: str) -> None:
    """A path that this CPU lacks falls back to a narrower one, and is right all the same."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_checksum;"
        " test_checksum.test_answers_of_the_reference_library()"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        check=True,
        timeout=120,
        env={**os.environ, "KVCACHE_COPY_PATH": path},
    )
