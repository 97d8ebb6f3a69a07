from __future__ import annotations

import contextlib
import errno
import importlib
import io
import json
import os
import pkgutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvcache.commands
from kvcache import ConfigError, InvariantError, cli
from kvcache.commands import doctor, output, preflight
from kvcache.core import host_memory, native

HELPERS = {
    "bench_options",
    "chat_engine",
    "chat_history",
    "numbers",
    "output",
    "preflight",
    "replay_words",
}


def cli_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvcache.cli", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A verb `probe` whose `run` the test sets."""
    module = SimpleNamespace(HELP="probe", add_arguments=lambda _: None, run=lambda _: 0)
    monkeypatch.setitem(cli.VERBS, "probe", "a verb for tests")
    monkeypatch.setitem(sys.modules, "kvcache.commands.probe", module)  # type: ignore[arg-type]
    return module


def raises(error: BaseException) -> Any:
    def run(_: object) -> int:
        raise error

    return run


def test_every_verb_is_a_module_and_every_module_a_verb() -> None:
    modules = {m.name for m in pkgutil.iter_modules(kvcache.commands.__path__)}
    assert modules - HELPERS == set(cli.VERBS)
    for name in cli.VERBS:
        module = importlib.import_module(f"kvcache.commands.{name}")
        assert module.HELP
        assert callable(module.add_arguments)
        assert callable(module.run)


def test_help_lists_every_verb_and_imports_none() -> None:
    program = (
        "import sys; from kvcache.cli import main; status = main(['--help']);"
        " print([m for m in sys.modules if m.startswith('kvcache.commands') or m == 'numpy']);"
        " sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    *text, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    for name, line in cli.VERBS.items():
        assert f"{name} " in "\n".join(text)
        assert line in "\n".join(text)


def test_only_the_chosen_verb_is_imported() -> None:
    program = (
        "import sys; from kvcache.cli import main; main(['doctor', '--help']);"
        " print(sorted(m for m in sys.modules if m.startswith('kvcache.commands.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == str(
        [f"kvcache.commands.{m}" for m in ("doctor", "numbers", "output", "preflight")]
    )


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version_is_the_packages(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([flag]) == 0
    assert capsys.readouterr().out == f"kvcache {kvcache.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["--json"],
        ["doctor", "--seed", "-1"],
        ["doctor", "--seed", "x"],
        ["doctor", "--nonsense"],
        ["doctor", "extra"],
    ],
)
def test_wrong_usage_is_one_line_on_stderr_and_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvcache")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("pages is -1: it must be above 0\nor UNLIMITED"), 2),
        (FileNotFoundError(errno.ENOENT, "No such file", "trace.jsonl"), 2),
        (InvariantError("page 3 has 2 references, 1 counted"), 1),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_is_one_line_on_stderr_with_its_exit_status(
    verb: SimpleNamespace,
    error: BaseException,
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    verb.run = raises(error)
    assert cli.main(["probe"]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


def test_a_missing_extra_names_what_to_install(
    verb: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.run = raises(ModuleNotFoundError("No module named 'torch'", name="torch"))
    cli.main(["probe"])
    assert "pip install 'kvcache[engine]'" in capsys.readouterr().err


def test_a_fault_of_the_program_is_not_hidden(verb: SimpleNamespace) -> None:
    verb.run = raises(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_common_options_reach_the_verb(verb: SimpleNamespace) -> None:
    seen = []
    verb.run = lambda args: seen.append((args.json, args.seed)) or 0
    assert cli.main(["probe"]) == 0
    assert cli.main(["probe", "--json", "--seed", "18446744073709551615"]) == 0
    assert seen == [(False, 0), (True, 2**64 - 1)]


def test_a_reader_that_leaves_ends_the_program_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = cli_process("doctor", stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_full_disk_behind_stdout_is_bad_input() -> None:
    with Path("/dev/full").open("w") as full:
        done = cli_process("doctor", "--json", stdout=full)
    assert (done.returncode, done.stderr) == (2, "kvcache: stdout: No space left on device\n")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    target.write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(target)
    output.write_atomically(link, "new")
    assert target.read_text() == "new"
    assert link.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "out.json"]


def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.json"
    target.write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*out\.json"):
        output.write_atomically(target, "new")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_a_device_is_written_to_and_never_replaced() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        output.write_atomically("/dev/full", "text")
    assert Path("/dev/full").is_char_device()


def test_json_has_no_infinities_and_plain_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    np = pytest.importorskip("numpy")
    output.emit_json({"a": float("inf"), "b": [np.float64("nan"), np.int64(3)], 4: np.arange(2)})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 3], "4": [0, 1]}


def test_progress_is_silent_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    with output.Progress() as line:
        line.update("half way")
    assert capsys.readouterr().err == ""


def test_progress_rewrites_one_line_of_a_terminal() -> None:
    keyboard, screen = os.openpty()
    expected = b"\r\x1b[Khalf way\r\x1b[K"
    with os.fdopen(screen, "w") as stream:
        with output.Progress(stream) as line:
            line.update("half way")
        shown = b""
        while len(shown) < len(expected):  # a terminal hands on what is written piece by piece
            shown += os.read(keyboard, 1000)
    os.close(keyboard)
    assert shown == expected


def test_progress_ends_where_its_terminal_does() -> None:
    keyboard, screen = os.openpty()
    with os.fdopen(screen, "w") as stream, output.Progress(stream) as line:
        os.close(keyboard)
        line.update("half way")
        line.update("further")


def test_what_nobody_can_be_told_changes_no_status(verb: SimpleNamespace) -> None:
    verb.run = raises(ConfigError("wrong"))

    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    with contextlib.redirect_stderr(Gone()):
        assert cli.main(["probe"]) == 2


def test_a_pipe_without_a_path_is_written_to() -> None:
    reader, writer = os.pipe()
    output.write_atomically(f"/dev/fd/{writer}", "text")
    os.close(writer)
    with os.fdopen(reader) as stream:
        assert stream.read() == "text"


def test_doctor_reports_what_it_found() -> None:
    done = cli_process("doctor", "--json", stdout=subprocess.PIPE)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report["problems"]
    assert done.stderr == ""
    assert report["kvcache"]["version"] == kvcache.__version__
    assert report["kvcache"]["import_milliseconds"] > 0
    assert report["native"]["abi_version"] == 1
    assert report["native"]["sha256_path"] in ("sha-ni", "portable")
    assert Path(report["native"]["library"]).is_file()
    assert report["host_memory"]["available_bytes"] > 0
    assert "cpu" in [c["name"] for c in report["connectors"]]


def test_doctor_for_people_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "native core" in text
    assert "problem:" not in text


def test_doctor_names_a_missing_library_and_fails(tmp_path: Path) -> None:
    environment = {**os.environ, "KVCACHE_NATIVE_DIR": str(tmp_path)}
    done = cli_process("doctor", "--json", stdout=subprocess.PIPE, env=environment)
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert str(tmp_path) in report["native"]["error"]
    assert report["problems"] == [report["native"]["error"]]


def test_doctor_says_what_a_host_pool_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the pool's own rules: a control group may have less room than the machine."""
    machine, group = 64 * preflight.GIB, 4 * preflight.GIB
    limits = [host_memory.GroupLimit(tmp_path, group, group // 2)]
    monkeypatch.setattr(host_memory, "machine", lambda *_: {"MemTotal": machine})
    monkeypatch.setattr(host_memory, "group_limits", lambda *_: limits)
    memory = preflight.measure()
    assert (memory.total_bytes, memory.cgroup_limit_bytes) == (machine, group)
    assert memory.available_bytes == host_memory.available()[0] == group // 2 - group // 32


def test_doctor_tries_a_pool_on_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain pool that would be refused is a problem; a shared or locked one is advice."""
    monkeypatch.setattr(host_memory, "available", lambda *_: (8 * preflight.GIB, "somebody"))
    monkeypatch.setattr(preflight.host_limits, "lockable_bytes", lambda: preflight.GIB)
    refused = preflight.refusals(2**60)
    assert [line.split(" asks for")[0] for line in refused] == [
        "--pool",
        "--pool (shared)",
        "--pool (locked)",
    ]
    for line, words in zip(refused, ("somebody leaves", "--shm-size", "ulimit -l"), strict=True):
        assert "1152921504606846976 bytes" in line
        assert words in line
    assert preflight.refusals(2**20) == []
    assert cli.main(["doctor", "--pool", "100GB"]) == 1
    report = doctor.examine(2 * preflight.GIB)
    assert report["ok"]
    assert [line for line in report["advice"] if line.startswith("--pool (locked) asks for")]
    memory = report["host_memory"]
    assert memory["available_limit"] == "somebody"
    assert memory["largest_shared_bytes"] == min(8 * preflight.GIB, memory["shm_free_bytes"])
    assert next(iter(memory["numa_free_bytes"])) == 0


def test_doctor_looks_for_the_model_without_loading_torch() -> None:
    code = (
        "import sys; from kvcache.commands import doctor; doctor.model_file();"
        " sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_each_memory_problem_has_its_line_of_advice() -> None:
    good = preflight.HostMemory(
        total_bytes=64 * preflight.GIB,
        available_bytes=60 * preflight.GIB,
        cgroup_limit_bytes=None,
        memlock_limit_bytes=None,
        shm_total_bytes=32 * preflight.GIB,
        shm_free_bytes=32 * preflight.GIB,
        transparent_huge_pages="madvise",
    )
    assert preflight.advice(good) == []
    bad = preflight.HostMemory(
        total_bytes=64 * preflight.GIB,
        available_bytes=preflight.GIB,
        cgroup_limit_bytes=2 * preflight.GIB,
        memlock_limit_bytes=65536,
        lockable_bytes=4096,
        shm_total_bytes=64 * 2**20,
        shm_free_bytes=0,
        transparent_huge_pages="never",
    )
    words = ("available", "cgroup", "memlock", "--shm-size", "huge pages")
    assert len(preflight.advice(bad)) == len(words)
    for word, line in zip(words, preflight.advice(bad), strict=True):
        assert word in line
    may_lock_all = replace(good, memlock_limit_bytes=65536)  # as root: the limit is none
    assert preflight.advice(may_lock_all) == []


def test_streams_closed_from_the_start_are_no_fault_of_the_program() -> None:
    done = cli_process("doctor", preexec_fn=lambda: os.close(1))
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
    both = cli_process("--nonsense", preexec_fn=lambda: (os.close(1), os.close(2)))
    assert both.returncode == 2


@pytest.mark.parametrize("verb_and_input", [("replay", "missing.jsonl"), ("bench", "engine")])
@pytest.mark.parametrize(
    ("path", "message"),
    [("", "is a folder"), (".", "is a folder"), ("no/such/x.json", "there is no folder")],
)
def test_an_output_that_cannot_be_written_is_named_before_any_work(
    verb_and_input: tuple[str, str], path: str, message: str
) -> None:
    done = cli_process(*verb_and_input, "--output", path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "--output" in done.stderr


def test_an_output_is_none_of_the_inputs(tmp_path: Path) -> None:
    source, other = tmp_path / "in", tmp_path / "out"
    source.write_text("text")
    for name in (other, tmp_path, tmp_path / "no" / "such"):
        output.require_apart(str(name), [source, tmp_path / "missing", "", "\0"])
    output.require_apart("\0", [source])
    output.require_apart("/dev/null", ["/dev/null"])
    other.symlink_to(source)
    with pytest.raises(ConfigError, match=f"--output {other} is {source}, which is read"):
        output.require_apart(str(other), [tmp_path / "missing", source])


def test_the_model_of_a_benchmark_is_not_replaced_by_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.gguf"
    model.write_text("weights")
    monkeypatch.setattr("kvcache.commands.bench.find_model_file", lambda: model)
    assert cli.main(["bench", "engine", "--output", str(model)]) == 2
    assert f"--output {model} is {model}, which is read" in capsys.readouterr().err
    assert model.read_text() == "weights"


def test_a_locale_without_the_character_is_no_fault_of_the_program(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = cli_process("replay", str(tmp_path / "ü.jsonl"), env=environment)
    assert done.returncode == 2
    assert "\\xfc.jsonl" in done.stderr


def test_json_is_ascii_whatever_it_says() -> None:
    text = output.as_json({"name": "ü\udcff"})
    assert text.isascii()
    assert json.loads(text) == {"name": "ü\udcff"}


def test_a_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    path.chmod(0o600)
    output.write_atomically(path, "new")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == "new"


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"int32_t ???;"])
def test_a_damaged_header_is_one_line(tmp_path: Path, damage: bytes) -> None:
    library = native.find(native.LIBRARY)
    (tmp_path / native.LIBRARY).symlink_to(library)
    (tmp_path / native.HEADER).write_bytes(damage)
    environment = {**os.environ, "KVCACHE_NATIVE_DIR": str(tmp_path)}
    done = cli_process("doctor", env=environment, stdout=subprocess.DEVNULL)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
