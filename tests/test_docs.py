"""What README and docs say is true of what stands."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

SOURCES = ("csrc", "kvcache", "retention", "connectors", "bench", "examples")
SUFFIXES = {".py", ".cpp", ".h"}


def source_files(root: Path) -> list[str]:
    files = []
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            inside = path.relative_to(root)
            linked = any((root / Path(*inside.parts[: i + 1])).is_symlink() for i in range(1, 3))
            if path.suffix in SUFFIXES and not linked and "__pycache__" not in inside.parts:
                files.append(str(inside))
    return files


def test_architecture_has_a_line_for_each_source_file_and_no_other(repo_root: Path) -> None:
    text = (repo_root / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)
    assert listed == sorted(listed, key=listed.index), "listed twice"
    files = [f for f in source_files(repo_root) if not f.endswith("/__init__.py")]
    assert set(listed) == set(files)


def test_readme_is_short_and_its_example_does_what_it_says(repo_root: Path) -> None:
    text = (repo_root / "README.md").read_text()
    assert len(text.splitlines()) < 150
    first_screen = "\n".join(text.splitlines()[:45])
    assert "make demo" in first_screen
    assert "make test" in first_screen
    assert "pip install ." in first_screen
    code = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert code is not None
    promised = re.search(r"hit_tokens=(\d+)", code[1])
    assert promised is not None
    seen: list[object] = []
    exec(compile(code[1], "README.md", "exec"), {"print": seen.append})  # noqa: S102
    assert [hit.hit_tokens for hit in seen] == [int(promised[1])]  # type: ignore[attr-defined]


def test_every_relative_link_in_the_docs_leads_somewhere(repo_root: Path) -> None:
    pages = [repo_root / "README.md", *sorted((repo_root / "docs").glob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_dependencies_page_names_every_dependency(repo_root: Path) -> None:
    metadata = (repo_root / "pyproject.toml").read_text()
    page = (repo_root / "docs" / "dependencies.md").read_text()
    names = set(re.findall(r'^    "([a-z][a-z0-9-]*)[><=]', metadata, flags=re.MULTILINE))
    assert {"numpy", "cffi", "torch", "pytest"} <= names
    missing = [name for name in sorted(names) if name not in page]
    assert missing == []


def test_the_figure_of_retention_shows_what_the_manager_does(repo_root: Path) -> None:
    figure = runpy.run_path(str(repo_root / "docs" / "retention_figure.py"))
    assert (repo_root / "docs" / "retention.svg").read_text() == figure["draw"]()
