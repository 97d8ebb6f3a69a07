"""These tests run in an environment with vLLM alone (`make conformance`); see `tests/test_conformance.py`."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

if not collect_ignore_glob:
    from conformance.oracle import plain_copies

    __all__ = ["plain_copies"]
