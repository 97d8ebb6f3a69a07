"""What README and docs say is true of what stands."""

from __future__ import annotations

import inspect
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiers.disk_pieces import page_paths

import kvcache
from kvcache.connectors.testing import CONTRACT
from kvcache.core.explanation import CAUSES, Explanation

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


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def test_the_example_in_readme_and_the_examples_pass_strict_types(
    repo_root: Path, tmp_path: Path
) -> None:
    (code,) = snippets(repo_root / "README.md")
    readme = tmp_path / "readme.py"
    readme.write_text(code)
    programs = [str(path) for path in sorted((repo_root / "examples").glob("*.py"))]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--config-file",
            "pyproject.toml",
            "--cache-dir",
            str(tmp_path / "cache"),
            *programs,
            str(readme),
        ],
        cwd=repo_root,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"no issues found in {len(programs) + 1} source files" in done.stdout


def toy_groups() -> tuple[kvcache.FullAttention, kvcache.SlidingWindow, kvcache.RecurrentState]:
    return (
        kvcache.FullAttention(name="full", layers=1, kv_heads=1, head_dim=8, block_tokens=16),
        kvcache.SlidingWindow(
            name="window", layers=1, kv_heads=1, head_dim=8, block_tokens=16, window=32
        ),
        kvcache.RecurrentState(
            name="state", layers=1, state_bytes_per_layer=4096, speculative_tokens=3
        ),
    )


def test_the_policy_in_retention_keeps_the_ends_of_messages(repo_root: Path) -> None:
    (code,) = snippets(repo_root / "docs" / "retention.md")
    names: dict[str, object] = {}
    exec(compile(code, "retention.md", "exec"), names)  # noqa: S102
    manager = kvcache.Manager(
        kvcache.Geometry(toy_groups()),
        slabs=kvcache.UNLIMITED,
        retention=names["EveryMessage"](),  # type: ignore[operator]
    )
    turn = manager.open(range(100), boundaries=[40, 90])
    assert manager.stops(turn, 0, 80) == [32, 80]
    assert manager.stops(turn, 0, 79) == [32, 64]  # the last grid point of a grant always


def test_the_arena_in_memory_is_what_every_class_sees(repo_root: Path) -> None:
    (code,) = snippets(repo_root / "docs" / "memory.md")
    full, window, state = toy_groups()
    names: dict[str, object] = {
        "attention": full,
        "window": window,
        "state": state,
        "arena_bytes": 1 << 20,
        "g": 2,
        "np": np,
        **{n: getattr(kvcache, n) for n in ("Geometry", "Manager", "Sparse", "arena_regions")},
    }
    exec(compile(code, "memory.md", "exec"), names)  # noqa: S102
    arena, pages = names["arena"], names["pages"]
    assert isinstance(arena, np.ndarray)
    assert isinstance(pages, np.ndarray)
    assert pages.shape == (len(arena) // 4096, 4096)
    assert np.shares_memory(arena, pages)
    regions = names["regions"]
    assert isinstance(regions, list)
    assert regions[2] == kvcache.PageRegion(arena.ctypes.data, 4096, len(pages), 4096)


def test_the_steps_in_architecture_run(repo_root: Path) -> None:
    """A chunk of a recurrent group, then a step with guesses of which two stand."""
    states, guesses = snippets(repo_root / "docs" / "architecture.md")
    manager = kvcache.Manager(
        kvcache.Geometry(toy_groups()), slabs=40, retention=kvcache.Sparse(), journal=False
    )
    tokens = list(range(40))
    request = manager.open(tokens, max_tokens=60, boundaries=[16])
    manager.lookup(request)
    step = manager.begin_step()
    grant = manager.allocate(request, 40)
    assert grant
    manager.commit(request, grant.end)
    runs: list[list[int]] = []

    def run(part: list[int], *, read: int, write: int) -> None:
        assert write >= 0
        runs.append(part)

    names = {"manager": manager, "request": request, "group": 2, "grant": grant, "run": run}
    names["tokens"] = tokens
    exec(compile(states, "architecture.md", "exec"), names)  # noqa: S102
    assert [len(part) for part in runs] == [16, 16, 8]
    manager.end_step(step)
    manager.extend(request, [40])
    names |= {"tokens": [*tokens, 40], "guesses": [41, 42, 7], "verify": lambda *_: (2, 43)}
    exec(compile(guesses, "architecture.md", "exec"), names)  # noqa: S102
    info = manager.info(request)
    assert (info.tokens, info.computed, info.granted) == (44, 43, 43)
    manager.check()


def test_the_models_in_engine_do_what_it_says(repo_root: Path) -> None:
    codes = snippets(repo_root / "docs" / "engine.md")
    assert len(codes) == 4
    for code in codes:
        exec(compile(code, "engine.md", "exec"), {})  # noqa: S102


def test_the_calls_in_api_run_and_answer_what_they_say(
    repo_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    codes = snippets(repo_root / "docs" / "api.md")
    assert sum(code.count("assert ") for code in codes) > 15
    for code in codes:
        exec(compile(code, "api.md", "exec"), names)  # noqa: S102
    assert capsys.readouterr().out == ""  # nobody was in the way
    for name in ("manager", "hybrid"):
        names[name].check()  # type: ignore[attr-defined]


def test_the_tiers_page_says_what_a_restart_finds(repo_root: Path, tmp_path: Path) -> None:
    names: dict[str, object] = {}
    for code in snippets(repo_root / "docs" / "tiers.md"):
        exec(compile(code, "tiers.md", "exec"), names)  # noqa: S102
    life = names["life"]
    assert callable(life)
    assert [life(str(tmp_path / "kv")).hit_tokens for _ in range(2)] == [0, 96]
    for path in page_paths(tmp_path / "kv"):
        path.write_bytes(bytes(path.stat().st_size))
    assert [life(str(tmp_path / "kv")).hit_tokens for _ in range(2)] == [0, 96]
    assert names["rule"] is CONTRACT[-1], "the connector of the page was not put to each rule"


@pytest.mark.parametrize(
    "record",
    [
        kvcache.Hit,
        kvcache.Grant,
        kvcache.StatePlan,
        kvcache.RequestInfo,
        kvcache.ManagerStats,
        kvcache.ArenaStats,
        kvcache.ClassStats,
        kvcache.GroupStats,
    ],
)
def test_api_names_every_record_and_each_of_its_fields(repo_root: Path, record: type) -> None:
    page = (repo_root / "docs" / "api.md").read_text()
    assert f"`{record.__name__}`" in page
    missing = [name for name in record._fields if f"`{name}`" not in page]  # type: ignore[attr-defined]
    assert missing == []
    source = inspect.getsource(record)
    for name in record._fields:  # type: ignore[attr-defined]
        assert re.search(rf'^    {name}: .*\n    """', source, flags=re.MULTILINE), name


@pytest.mark.parametrize(
    ("title", "call"), [("## Manager", kvcache.Manager), ("## open", kvcache.Manager.open)]
)
def test_api_has_every_argument(title: str, call: Callable[..., object], repo_root: Path) -> None:
    section = (repo_root / "docs" / "api.md").read_text().split(f"{title}\n")[1].split("\n## ")[0]
    table = section[section.index("| argument |") :].split("\n\n")[0]
    arguments = [name for name in inspect.signature(call).parameters if name != "self"]
    named = [
        name
        for cell in re.findall(r"^\| (`[^|]*`) \|", table, flags=re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    ]
    assert named == arguments


def test_every_environment_variable_that_is_read_is_documented(repo_root: Path) -> None:
    page = (repo_root / "docs" / "api.md").read_text()
    listed = set(re.findall(r"`(KVCACHE_\w+)`", page[page.index("## Environment variables") :]))
    read: set[str] = set()
    for folder in (*SOURCES, "tests"):
        for path in (repo_root / folder).rglob("*"):
            if path.suffix in SUFFIXES and path.name != "test_docs.py":
                text = path.read_text()
                if "environ" in text or "getenv" in text:
                    read |= set(re.findall(r'"(KVCACHE_[A-Z_]+)"', text))
    assert listed == read


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


def test_the_examples_in_explain_say_what_is_printed(repo_root: Path) -> None:
    """Handles are N and times T there."""
    page = (repo_root / "docs" / "explain.md").read_text()
    setup, *examples = re.findall(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(setup[0], "explain.md", "exec"), names)  # noqa: S102
    causes = set()
    for code, shown in examples:
        exec(compile(code, "explain.md", "exec"), names)  # noqa: S102
        explanation = names["explanation"]
        assert isinstance(explanation, Explanation)
        words = re.sub(r"request \d+", "request N", str(explanation))
        assert re.sub(r"[\d.]+ s ago", "T ago", words) + "\n" == shown
        causes |= {loss.cause for loss in explanation.losses}
    assert causes == set(CAUSES)
    assert "after 'lmnopqrs' comes" in str(names["words"])
