"""docs/presets.md: its tables are what the code gives."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcache import cli
from kvcache.presets import names


@pytest.fixture(scope="module")
def page(repo_root: Path) -> str:
    return (repo_root / "docs" / "presets.md").read_text()


def between(page: str, mark: str) -> str:
    found = re.search(rf"<!-- {re.escape(mark)} -->\n(.*?)<!-- end -->", page, flags=re.DOTALL)
    assert found, mark
    return found[1]


def test_the_table_and_the_sources_are_those_of_the_presets(page: str, repo_root: Path) -> None:
    made = runpy.run_path(str(repo_root / "docs" / "presets_table.py"))
    assert between(page, "python docs/presets_table.py") == made["table"]()
    assert between(page, "python docs/presets_table.py sources") == made["sources"]()
    assert all(f"| `{name}` |" in page for name in names())


def test_the_snippet_runs(page: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    seen: list[Any] = []
    known: dict[str, Any] = {"print": lambda *values: seen.append(values)}
    exec(compile(code, "presets.md", "exec"), known)  # noqa: S102
    assert known["same"] == known["preset"]("llama-3-8b")
    assert known["geometry"].grid_tokens == 128
    assert len(seen) == 1


def test_the_commands_are_taken(
    page: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that need no file; the others fail for lack of it, not of an option."""
    lines = [line for line in page.splitlines() if line.startswith("kvcache size ")]
    assert len(lines) == 3
    monkeypatch.chdir(tmp_path)
    statuses = [cli.main(line.split()[1:]) for line in lines]
    assert statuses == [0, 2, 2]
    errors = capsys.readouterr().err.splitlines()
    assert "no config.json or folder of that path" in errors[0]
    assert "mooncake_conversation.jsonl.gz cannot be opened" in errors[1]


def test_suggestions_are_those_of_the_command(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = re.findall(
        r"^\| ([a-z0-9.-]+)(?:, TP (\d))? \(.*?\) \|.*\| ([\d,]+) \|$", page, flags=re.MULTILINE
    )
    assert len(rows) == 7
    for name, tp, suggested in rows:
        assert cli.main(["size", name, "--tp", tp or "1", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["suggested_interval"] == int(suggested.replace(",", ""))


def test_the_script_prints_both(
    repo_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["presets_table.py"])
    runpy.run_path(str(repo_root / "docs" / "presets_table.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert out.startswith("| preset |")
    assert "- `kimi-k3`: text_config" in out
