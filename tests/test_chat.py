"""`kvcache chat`: turns, what they found, conversations kept in a folder, interrupts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import CapacityError, ConfigError, InputError
from kvcache.cli import main
from kvcache.commands.chat_history import ChatHistory
from kvcache.connectors.cpu import CpuConnector
from kvcache.core.hashing import Fingerprint
from kvcache.core.layout import Geometry
from kvcache.engine.chat import Message, encode_chat, encode_reply
from kvcache.engine.conversation import DRAFT_TOKENS, Chat, Conversation
from kvcache.engine.model import Model
from kvcache.engine.request import Reason
from kvcache.engine.smollm2 import load_model, load_tokenizer
from kvcache.engine.speculative import joint_fingerprint, joint_geometry
from kvcache.engine.tiny import build_model
from kvcache.engine.tokenizer import ByteTokenizer

torch.set_num_threads(1)

TINY = ("chat", "--model", "tiny", "--threads", "1", "--max-tokens", "4")
COMMAND = (sys.executable, "-m", "kvcache.cli", *TINY)


@pytest.fixture
def chat() -> Iterator[Chat]:
    talk = Chat(build_model(), ByteTokenizer())
    yield talk
    talk.close()


def say(chat: Chat, conversation: Conversation, text: str, max_tokens: int = 4) -> str:
    return "".join(chat.ask(conversation, text, max_tokens=max_tokens))


def talk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *more: str
) -> dict[str, Any]:
    """What `kvcache chat --json` says to lines on stdin."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main([*TINY, *more, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report: dict[str, Any] = json.loads(out)
    return report


def test_a_reply_in_tokens_is_what_the_whole_conversation_encodes_to() -> None:
    tokenizer = ByteTokenizer()
    first = [Message("user", "one")]
    prompt = encode_chat(tokenizer, first)
    answer = tokenizer.encode("two")
    whole = encode_chat(tokenizer, [*first, Message("assistant", "two"), Message("user", "three")])
    cut = np.concatenate([prompt, answer, encode_reply(tokenizer, "three", ended=False)])
    assert cut.tolist() == whole.tolist()
    end = np.array([tokenizer.specials["<|im_end|>"]], np.int32)
    ended = np.concatenate([prompt, answer, end, encode_reply(tokenizer, "three", ended=True)])
    assert ended.tolist() == whole.tolist()


def test_a_turn_hits_what_the_turn_before_it_computed(chat: Chat) -> None:
    conversation = Conversation()
    first = say(chat, conversation, "hello")
    assert chat.answer.text == first == conversation.messages[-1].content
    computed = len(conversation.tokens) - 1
    say(chat, conversation, "and then?")
    usage = chat.answer.usage
    assert usage.device_tokens == computed // 16 * 16
    assert usage.prompt_tokens + usage.output_tokens == len(conversation.tokens)
    assert [m.role for m in conversation.messages] == ["user", "assistant"] * 2


def test_another_conversation_shares_the_system_message(chat: Chat) -> None:
    say(chat, Conversation(), "hello")
    say(chat, Conversation(), "something else")
    opening = encode_chat(ByteTokenizer(), [Message("system", "You are")], answer=False)
    assert chat.answer.usage.device_tokens >= len(opening) // 16 * 16


def test_answers_do_not_depend_on_where_the_prefix_came_from() -> None:
    said = []
    for device_bytes in (None, 200_000):
        model = build_model()
        talk = Chat(
            model,
            ByteTokenizer(),
            device_bytes=device_bytes,
            tier=lambda geometry, _: CpuConnector(geometry, capacity_bytes=8 << 20),
        )
        one, other, restored = Conversation(), Conversation(), 0
        for text in ("a first message", "a second one", "a third"):
            for conversation in (one, other):
                say(talk, conversation, f"{text} {conversation is one}")
                restored += talk.answer.usage.host_tokens
        assert (restored > 0) == (device_bytes is not None)
        said.append([one.messages, other.messages])
        assert talk.close()
    assert said[0] == said[1]


def test_a_full_conversation_says_so_and_stays_as_it_was() -> None:
    model = build_model(context_tokens=200)
    chat = Chat(model, ByteTokenizer())
    assert chat.limit_tokens == 200
    conversation = Conversation()
    say(chat, conversation, "x" * 40, max_tokens=500)
    assert len(conversation.tokens) <= 200
    before = list(conversation.tokens)
    with pytest.raises(CapacityError, match="there is room for 200"):
        say(chat, conversation, "more")
    assert conversation.tokens == before
    assert say(chat, Conversation(), "y", max_tokens=2) == chat.answer.text
    with pytest.raises(ConfigError, match="give it at least"):
        Chat(model, ByteTokenizer(), device_bytes=1)


def test_a_stopped_answer_is_part_of_the_conversation(chat: Chat) -> None:
    conversation, steps = Conversation(), iter([False, False, True])
    text = "".join(
        chat.ask(conversation, "go on", max_tokens=100, stopped=lambda: next(steps, True))
    )
    assert chat.answer.reason is Reason.ABORT
    assert 0 < chat.answer.usage.output_tokens < 100
    assert conversation.messages[-1] == Message("assistant", text)
    assert not conversation.ended
    say(chat, conversation, "again")
    assert chat.answer.usage.device_tokens > 0


def test_what_was_said_is_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a folder that others may look into, and where a file of an earlier version was."""
    tmp_path.chmod(0o755)
    for _ in range(2):
        talk(monkeypatch, capsys, "hello\n", "--disk", str(tmp_path))
        file = tmp_path / "chat.json"
        assert file.stat().st_mode & 0o777 == 0o600
        file.chmod(0o644)


def test_an_answer_that_nobody_hears_to_its_end_is_in_no_other_one(chat: Chat) -> None:
    expected = say(chat, Conversation(), "second question", max_tokens=12)
    left = Conversation()
    hearing = chat.ask(left, "first question", max_tokens=40)
    next(hearing)
    hearing.close()
    assert left == Conversation()
    for _ in range(2):
        asked = Conversation()
        assert say(chat, asked, "second question", max_tokens=12) == expected
        assert chat.answer.usage.output_tokens == 12
        assert asked.messages[-1].content == expected


def test_a_conversation_survives_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ("--disk", str(tmp_path / "chats"))
    unbroken = talk(monkeypatch, capsys, "one\ntwo\n/new\nother\n/go 01\nthree\n")["turns"]
    first = talk(monkeypatch, capsys, "one\ntwo\n/new\nother\n/go 1\n", *folder)
    assert [t["conversation"] for t in first["turns"]] == [1, 1, 2]
    assert first["conversations"] == 2
    again = talk(monkeypatch, capsys, "/go 1\nthree\n", *folder)
    (turn,) = again["turns"]
    assert (turn["conversation"], turn["turn"]) == (1, 3)
    assert turn["answer"] == unbroken[-1]["answer"]
    assert turn["prompt_tokens"] == unbroken[-1]["prompt_tokens"]
    assert turn["device_tokens"] == 0
    assert turn["restored_tokens"] == unbroken[-1]["device_tokens"] > 0
    assert (
        sum(turn[f"{n}_tokens"] for n in ("device", "restored", "computed"))
        == (turn["prompt_tokens"])
    )
    through = talk(monkeypatch, capsys, "four\n", *folder, "--host-memory", "1MiB")["turns"]
    assert through[0]["conversation"] == 1
    assert through[0]["restored_tokens"] > 0


def test_people_see_what_a_turn_cost_and_which_conversation_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for expected in ("computed", "conversation 1 of 1 goes on: 1 turns so far"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n/quit\nnever read\n"))
        assert main([*TINY, "--disk", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert expected in out
        assert out.count("[conversation") == 1
    assert " restored + " in out


@contextlib.contextmanager
def started(command: list[str], **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A chat, killed at the end if it still runs: a failed test must not wait for it.

    It hears Ctrl-C also where the tests run in a shell's background, which is deaf to it.
    """

    def hear() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, preexec_fn=hear, **pipes) as process:  # noqa: PLW1509
        try:
            yield process
        finally:
            process.kill()


def test_a_line_that_cannot_be_answered_ends_a_script_after_what_was_said(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [*COMMAND, "--json"], input=b"fine\n\xff\n", capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert b"line 2: the text has no UTF-8 form" in done.stderr
    assert [t["message"] for t in json.loads(done.stdout)["turns"]] == ["fine"]
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_ends_it_and_keeps_the_conversation(tmp_path: Path) -> None:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with started([*COMMAND, "--disk", str(tmp_path)], **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        while b"first token" not in process.stdout.readline():
            pass
        process.stdout.close()
        process.stdin.write(b"again\n")
        process.stdin.close()
        assert process.wait(120) == 1
        assert process.stderr.read() == b""
    stored = json.loads((tmp_path / "chat.json").read_text())
    assert stored["conversations"][0]["messages"][0] == ["user", "hello"]


def test_ctrl_c_ends_an_answer_in_a_terminal_and_the_chat_at_its_prompt() -> None:
    ours, theirs = pty.openpty()
    with started([*COMMAND[:-1], "20000"], stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen = b""

        def until(text: bytes) -> None:
            nonlocal seen
            while text not in seen:
                seen += os.read(ours, 1 << 16)
            seen = seen[seen.index(text) + len(text) :]

        until(b"> ")
        os.write(ours, b"hello\n")
        until(b"hello\r\n")
        while len(seen) < 8:  # it answers
            seen += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        until(b"; stopped]")
        until(b"> ")
        # One that comes before readline waits for keys is seen with the next key.
        for _ in range(20):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
                break
        assert process.poll() == 130
    os.close(ours)


def test_a_folder_is_for_one_chat_at_a_time_and_for_one_model(tmp_path: Path) -> None:
    with ChatHistory(str(tmp_path), "a", 300) as history:
        history.save([Conversation([1, 2], [Message("user", "x")], ended=False)], 0)
        with pytest.raises(ConfigError, match="in use by another chat"):
            ChatHistory(str(tmp_path), "a", 300)
    with ChatHistory(str(tmp_path), "a", 300) as history:
        (found,), current = history.load()
        assert (found.tokens, found.messages, found.ended) == (
            [1, 2], [Message("user", "x")], False,
        )  # fmt: skip
        assert current == 0
    with (
        ChatHistory(str(tmp_path), "b", 300) as history,
        pytest.raises(ConfigError, match="has conversations with a, this is b"),
    ):
        history.load()


GOOD: dict[str, Any] = {
    "schema": "kvcache/chat/1",
    "model": "a",
    "current": 0,
    "conversations": [{"tokens": [1], "ended": True, "messages": [["user", "x"]]}],
}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("no json", "JSONDecodeError"),
        ("[1]", "TypeError"),
        ("{}", "KeyError: 'schema'"),
        ("[" * 100_000, "RecursionError"),
        (json.dumps(GOOD | {"schema": "other"}), "schema 'other'"),
        (json.dumps(GOOD | {"current": 1}), "the current conversation is 1 of 1"),
        (json.dumps(GOOD | {"current": True}), "the current conversation is True"),
        (json.dumps(GOOD).replace("[1]", "[300]"), "tokens that the model does not have"),
        (json.dumps(GOOD).replace("[1]", "[true]"), "tokens that the model does not have"),
        (json.dumps(GOOD).replace("[1]", "7"), "TypeError"),
        (json.dumps(GOOD).replace('["user", "x"]', "[1]"), "ValueError"),
        (json.dumps(GOOD).replace('"ended": true', '"ended": 1'), "'ended' is 1"),
    ],
)
def test_a_damaged_file_is_named_and_stays(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "chat.json").write_text(content)
    with (
        ChatHistory(str(tmp_path), "a", 300) as history,
        pytest.raises(InputError, match="is no file of conversations") as error,
    ):
        history.load()
    assert why in str(error.value)
    assert (tmp_path / "chat.json").read_text() == content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--threads", "0"], "--threads is 0"),
        (["--model", "huge"], "invalid choice: 'huge'"),
        (["--disk", ""], "--disk is empty"),
        (["--disk", "file"], "--disk file: File exists"),
        (["--lazy", "1MiB"], "--lazy says when pages go below: give --host-memory or --disk"),
        (["--draft", "9"], "--draft 9: 9 layers of 4: give 1 at least"),
        (["--draft", "1"], "--draft 1: group 'gdn' of the draft model is of kind 'mamba'"),
        (["--kv-dtype", "int4"], "invalid choice: 'int4'"),
        (["--disk-memory", "1GiB"], "--disk-memory is the size of --disk"),
        (["--disk", "new", "--disk-memory", "1"], "--disk-memory is 1"),
        (["--host-memory", "1"], "--host-memory is 1"),
        (["--device-memory", "1"], "the device pool holds 0 tokens"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main([*TINY, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_no_input_at_all_is_the_end_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main([*TINY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["turns"] == []


def test_smollm2_goes_on_where_it_was(smollm2_path: Path) -> None:
    model, tokenizer = load_model(smollm2_path), load_tokenizer(smollm2_path)
    conversation = Conversation()
    for text, found in (("What is the capital of France?", 0), ("And of Italy?", 32)):
        chat = Chat(
            model,
            tokenizer,
            device_bytes=256 * model.geometry.slab_bytes,
            tier=lambda geometry, _: CpuConnector(geometry, capacity_bytes=64 << 20),
        )
        if found:  # a new engine, as after a restart without a tier that outlives it
            say(chat, Conversation(), "What is the capital of France?", max_tokens=1)
        answer = say(chat, conversation, text, max_tokens=8)
        assert chat.answer.usage.cached_tokens >= found
        chat.close()
        if not found:
            assert "Paris" in answer


def play(draft: Model | None, lazy_bytes: int | None) -> tuple[list[list[Message]], Chat]:
    """Two conversations by turns over a device too small for both; the chat is closed."""
    names: list[Fingerprint] = []

    def tier(geometry: Geometry, fingerprint: Fingerprint) -> CpuConnector:
        names.append(fingerprint)
        return CpuConnector(geometry, capacity_bytes=8 << 20)

    model = build_model()
    geometry = model.geometry
    if draft is not None:
        geometry = joint_geometry(model, draft, DRAFT_TOKENS)
    chat = Chat(
        model,
        ByteTokenizer(),
        device_bytes=geometry.slabs_needed(240) * geometry.slab_bytes,
        tier=tier,
        draft=draft,
        lazy_bytes=lazy_bytes,
    )
    one, other, restored = Conversation(), Conversation(), 0
    for text in ("a first message", "a second one", "a third"):
        for conversation in (one, other):
            say(chat, conversation, f"{text} {conversation is one}", max_tokens=8)
            assert chat.settle()
            restored += chat.answer.usage.host_tokens
    assert restored > 0
    expected = model.fingerprint() if draft is None else joint_fingerprint(model, draft)
    assert names == [expected]
    assert chat.close()
    return [one.messages, other.messages], chat


def test_guesses_and_lazy_stores_change_no_answer() -> None:
    weights = build_model().weights
    draft = Model(replace(weights, name="attention", layers=weights.layers[1:2]))
    alone, plain = play(None, None)
    guessed, chat = play(draft, None)
    lazy, _ = play(draft, 1 << 17)
    assert alone == guessed == lazy
    assert plain.counters.proposed_tokens == 0
    assert chat.counters.proposed_tokens > 0


def test_lazy_stores_wait_for_the_end_where_the_device_has_room() -> None:
    stored = []
    for lazy_bytes in (None, 4096):
        chat = Chat(
            build_model(),
            ByteTokenizer(),
            tier=lambda geometry, _: CpuConnector(geometry, capacity_bytes=8 << 20),
            lazy_bytes=lazy_bytes,
        )
        say(chat, Conversation(), "a message of some length", max_tokens=40)
        assert chat.settle()
        offload = chat._offload
        assert offload is not None
        stored.append(offload.stats().stored_pages)
        assert chat.close()
        assert offload.stats().stored_pages >= max(stored)
    assert stored[0] > 0
    assert stored[1] == 0


def test_a_lazy_chat_on_disk_goes_on_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--disk", str(tmp_path), "--lazy", "1MiB", "--kv-dtype", "bf16")
    first = talk(monkeypatch, capsys, "hello\n", *options)
    again = talk(monkeypatch, capsys, "and again\n", *options)
    assert again["turns"][0]["restored_tokens"] > 0
    assert (again["kv_dtype"], again["draft_layers"], again["proposed_tokens"]) == ("bf16", None, 0)
    whole = talk(monkeypatch, capsys, "")
    assert first["device_pool_bytes"] < whole["device_pool_bytes"]
    other = talk(monkeypatch, capsys, "once more\n", "--disk", str(tmp_path))
    assert other["turns"][0]["restored_tokens"] == 0


def test_the_first_layers_of_smollm2_guess_for_it(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del smollm2_path
    answers = []
    for more in ((), ("--draft", "2")):
        said = talk(
            monkeypatch, capsys, "What is the capital of France?\n", "--model", "smollm2",
            "--max-tokens", "6", *more,
        )  # fmt: skip
        answers.append(said["turns"][0]["answer"])
        assert said["draft_layers"] == (2 if more else None)
        assert (said["proposed_tokens"] > 0) is bool(more)
    assert answers[0] == answers[1]
    assert "capital of France" in answers[0]


@pytest.mark.parametrize(
    "number", ["0", "2", "02", "-1", "", "x", "9" * 5000, "\u0660", "\uff10", "\u0661"]
)
def test_a_conversation_that_is_not_there_is_one_line_and_exit_2(
    number: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"/go {number}\n"))
    assert main(TINY) == 2
    err = capsys.readouterr().err
    assert "there are conversations 1 to 1" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/nwe", "/nwe is no command"),
        ("/help me", "/help is no command"),
        ("/go2", "/go2 is no command"),
        ("/go-1", "/go-1 is no command"),
        ("/new x", "/new stands alone"),
        ("/quit x", "/quit stands alone"),
    ],
)
def test_a_command_that_there_is_not_is_no_message(
    line: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"hi\n{line}\n"))
    assert main(TINY) == 2
    assert f"line 2: {said}: there are /new, /go N, /quit" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["chat.json", "lock"])
def test_a_history_that_is_a_pipe_is_not_waited_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / name)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main([*TINY, "--disk", str(tmp_path)]) == 2
    assert "no plain file" in capsys.readouterr().err
