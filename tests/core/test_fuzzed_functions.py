"""The fuzz of the C ABI leaves no function out: its list is compared with the header."""

from __future__ import annotations

import re
from pathlib import Path

NO_STATUS = {
    "kvc_abi_version",
    "kvc_copy_path",
    "kvc_cores",
    "kvc_last_error",
    "kvc_manager_free",
    "kvc_page_file_bytes",
    "kvc_page_head_bytes",
    "kvc_pool_free",
    "kvc_pool_version",
    "kvc_sha256_path",
    "kvc_shared_free",
    "kvc_unlimited",
}
"""They cannot fail, so no status of theirs is counted."""


def declared(header: str) -> set[str]:
    """Names of all functions of the header."""
    code = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    return set(re.findall(r"\b(kvc_\w+)\(", code))


def listed(fuzz: str) -> list[str]:
    """Those that must have succeeded at least once."""
    found = re.search(r"kFunctions\[\] = \{(.*?)\};", fuzz, re.DOTALL)
    assert found
    return re.findall(r'"(kvc_\w+)"', found[1])


def test_the_fuzz_lists_every_function_that_returns_a_status(repo_root: Path) -> None:
    functions = declared((repo_root / "csrc/include/kvcache_core.h").read_text())
    names = listed((repo_root / "csrc/tests/fuzz_abi.cpp").read_text())
    assert len(functions) > 50
    assert len(names) == len(set(names))
    assert {*names, *NO_STATUS} == functions
    assert not NO_STATUS & {*names}


def test_functions_without_a_status_are_called_by_the_tests_of_the_core(repo_root: Path) -> None:
    text = "".join(path.read_text() for path in (repo_root / "csrc/tests").glob("*.[ch]*"))
    called = {name for name in NO_STATUS if re.search(rf"\b{name}\b", text)}
    assert called == NO_STATUS


def test_a_new_function_in_the_header_is_seen() -> None:
    header = "/* calls kvc_old(1) */ int32_t kvc_new(kvc_manager* manager, int64_t n);"
    assert declared(header) == {"kvc_new"}
