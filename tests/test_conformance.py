"""The tests in `tests/conformance` need vLLM in the same process."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec


def test_the_connector_for_vllm_is_tested(require: Callable[[str, str], None]) -> None:
    if find_spec("vllm") is None:
        require("vllm", "tests/conformance need it in this environment: `make conformance`")
