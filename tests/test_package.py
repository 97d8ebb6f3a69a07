from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

import kvcache

BUILD_SECONDS = 240
LINKED = ("connectors", "retention", "bench")
IGNORED = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "__pycache__", ".*_cache", ".hypothesis"
)

# A build and an installation may wait for the network.
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

Require = Callable[[str, str], NoReturn]


def python(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """This interpreter, outside the checkout's influence where `-P` is given."""
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        **{"timeout": BUILD_SECONDS, **options},
    )


def modules_loaded_by(statement: str) -> set[str]:
    done = python("-c", f"import sys; {statement}; print(*sys.modules)", timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


# ---- imports -------------------------------------------------------------------------------------


def test_bare_import_loads_nothing_but_the_package_itself() -> None:
    loaded = modules_loaded_by("import kvcache") - modules_loaded_by("import importlib, typing")
    # importlib: what the finder of an editable install uses.
    own = {name for name in loaded if not name.startswith(("_", "importlib."))}
    assert own == {"kvcache"}


def test_names_of_the_package_load_what_they_need_and_no_torch() -> None:
    loaded = modules_loaded_by("import kvcache; kvcache.Manager; kvcache.Sparse")
    assert "numpy" in loaded
    assert "torch" not in loaded


def test_every_public_name_is_there() -> None:
    assert sorted(kvcache.__all__) == sorted({"__version__", *kvcache._LAZY})
    for name in kvcache.__all__:
        assert getattr(kvcache, name) is not None
        assert name in dir(kvcache)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        kvcache.Nonsense  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", LINKED)
def test_a_linked_folder_refuses_its_bare_name(name: str, repo_root: Path) -> None:
    done = python("-c", f"import {name}", cwd=repo_root, timeout=60)
    assert done.returncode == 1
    assert f"ImportError: import kvcache.{name}, not {name}" in done.stderr


# ---- sdist and wheel -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, links kept, without what builds and tools left there."""
    folder = tmp_path_factory.mktemp("source") / "kvcache"
    return Path(shutil.copytree(repo_root, folder, symlinks=True, ignore=IGNORED))


def build(source: Path, kind: str, out: Path, *options: str) -> Path:
    done = python("-m", "build", "--no-isolation", kind, "--outdir", out, *options, source)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, "--sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the unpacked sdist, as `pip install kvcache-....tar.gz` does."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # 3.11.4 and later
        archive.extractall(folder, **safe)  # noqa: S202
    (unpacked,) = folder.iterdir()
    return build(unpacked, "--wheel", tmp_path_factory.mktemp("wheel"))


def installed_files(wheel: Path) -> dict[str, int]:
    """Size by name, without the metadata folder."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            item.filename: item.file_size
            for item in archive.infolist()
            if ".dist-info/" not in item.filename
        }


def expected_files(source: Path) -> set[str]:
    """Every file of the package, links followed, and what the build adds."""
    package = source / "kvcache"
    files = {
        Path(folder, name).relative_to(source).as_posix()
        for folder, _, names in os.walk(package, followlinks=True)
        for name in names
    }
    return files | {"kvcache/core/libkvcache_core.so", "kvcache/core/kvcache_core.h"}


def test_one_wheel_serves_every_python_and_holds_the_package_alone(
    source: Path, wheel: Path
) -> None:
    assert wheel.name.startswith(f"kvcache-{kvcache.__version__}-py3-none-linux_")
    files = installed_files(wheel)
    assert set(files) == expected_files(source)
    assert "kvcache/py.typed" in files
    for name in LINKED:
        assert files[f"kvcache/{name}/__init__.py"] > 0


def test_the_library_needs_libc_alone(wheel: Path, tmp_path: Path, require: Require) -> None:
    reader = shutil.which("readelf")
    if reader is None:
        require("readelf", "readelf (binutils) was not found")
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("kvcache/core/libkvcache_core.so", tmp_path)
    dynamic = subprocess.run([reader, "-d", library], capture_output=True, text=True, check=True)
    needed = [
        line.split("[")[1].rstrip("]") for line in dynamic.stdout.splitlines() if "(NEEDED)" in line
    ]
    assert {name.split(".")[0] for name in needed} <= {
        "libc",
        "libm",
        "libpthread",
        "ld-linux-x86-64",
    }
    symbols = subprocess.run(
        [reader, "--dyn-syms", "-W", library], capture_output=True, text=True, check=True
    )
    defined = [
        f[7]
        for f in map(str.split, symbols.stdout.splitlines())
        if len(f) > 7 and f[4] in ("GLOBAL", "WEAK") and f[6].isdigit()
    ]
    assert defined
    assert all(name.startswith("kvc_") for name in defined), defined


def test_the_sdist_holds_real_files_in_place_of_links(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {item.name.partition("/")[2] for item in archive}
        assert not [item.name for item in archive if item.issym() or item.islnk()]
    assert {"LICENSE", "README.md", "CMakeLists.txt", "csrc/include/kvcache_core.h"} <= names


def test_a_wheel_from_the_checkout_has_the_same_python_files(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    made = build(source, "--wheel", tmp_path, "-Cwheel.cmake=false")
    native = {"kvcache/core/libkvcache_core.so", "kvcache/core/kvcache_core.h"}
    assert set(installed_files(made)) | native == set(installed_files(wheel))


@pytest.mark.parametrize(
    ("value", "words"), [("ON", "has no CUDA sources"), ("MAYBE", "must be AUTO, ON or OFF")]
)
def test_a_cuda_setting_that_cannot_be_met_stops_the_build(
    value: str, words: str, source: Path, tmp_path: Path
) -> None:
    programs = Path(sysconfig.get_path("scripts"))
    done = subprocess.run(
        [
            programs / "cmake",
            "-G",
            "Ninja",
            "-S",
            source,
            "-B",
            tmp_path,
            f"-DKVCACHE_CUDA={value}",
        ],
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    assert words in " ".join(done.stderr.split())


# ---- the wheel in a fresh environment ----------------------------------------------------------------


def other_pythons() -> list[Path]:
    """Interpreters of other minor versions, newest first: on PATH or kept by pyenv."""
    own = sys.version_info[1]
    found: dict[int, Path] = {}
    for minor in range(20, 10, -1):
        kept = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3.{minor}"))
        named = shutil.which(f"python3.{minor}")
        for path in [*kept, *([Path(named)] if named else [])]:
            program = "import sys, ensurepip, venv; print(sys.version_info[1])"
            done = subprocess.run(
                [path, "-c", program], capture_output=True, text=True, check=False, timeout=60
            )
            if minor != own and done.returncode == 0 and done.stdout.strip() == str(minor):
                found.setdefault(minor, path)
    return [found[minor] for minor in sorted(found, reverse=True)]


def doctor_in_fresh_environment(
    interpreter: Path, wheel: Path, folder: Path, require: Require
) -> dict[str, dict[str, str]]:
    """Installs the wheel as a user would and runs `kvcache doctor` without a compiler on PATH."""
    subprocess.run([interpreter, "-m", "venv", folder], check=True, timeout=120)
    # The environment's own pip: an older one of this interpreter may not run under a newer Python.
    pip = (folder / "bin" / "python", "-I", "-m", "pip", "--disable-pip-version-check", "install")
    done = subprocess.run(
        [*pip, "--quiet", "--no-compile", "--only-binary", ":all:", wheel],
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_SECONDS,
    )
    if done.returncode != 0:
        require("packages", f"pip cannot install the wheel: {done.stderr[-1000:]}")
    bare = {"PATH": str(folder / "bin"), "HOME": str(folder)}
    assert shutil.which("g++", path=bare["PATH"]) is None
    report = subprocess.run(
        [folder / "bin" / "kvcache", "doctor", "--json"],
        cwd=folder,
        env=bare,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert report.returncode == 0, report.stdout + report.stderr
    loaded: dict[str, dict[str, str]] = json.loads(report.stdout)
    return loaded


def test_the_wheel_runs_doctor_in_a_fresh_environment(
    wheel: Path, tmp_path: Path, require: Require
) -> None:
    report = doctor_in_fresh_environment(Path(sys.executable), wheel, tmp_path / "venv", require)
    assert Path(report["native"]["library"]).is_relative_to(tmp_path)
    assert report["packages"]["torch"] is None
    assert report["problems"] == []


def test_the_wheel_runs_doctor_under_another_python(
    wheel: Path, tmp_path: Path, require: Require
) -> None:
    others = other_pythons()
    if not others:
        require("other-python", "no Python 3.11 or later of another minor version was found")
    report = doctor_in_fresh_environment(others[0], wheel, tmp_path / "venv", require)
    assert not report["python"]["version"].startswith(f"3.{sys.version_info[1]}.")
    assert Path(report["native"]["library"]).is_relative_to(tmp_path)
