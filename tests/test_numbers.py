"""Numbers of the command line: what each suffix is, what is refused, and that all verbs say the same."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from kvcache import cli
from kvcache.commands.numbers import (
    SUFFIXES,
    byte_count,
    pool_size,
    retention,
    token_count,
    token_number,
    whole_number,
)
from kvcache.core.alike import alike


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("512", 512),
        ("1_000_000", 10**6),
        ("32k", 32_000),
        ("32K", 32_000),
        ("32Ki", 32_768),
        ("2.56M", 2_560_000),
        ("1Mi", 2**20),
        ("1.5Ki", 1536),
        ("1G", 10**9),
        ("1Gi", 2**30),
    ],
)
def test_suffixes_of_tokens(text: str, tokens: int) -> None:
    for parse in (token_count, token_number, pool_size, retention):
        assert parse(text) == tokens


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GB", 80 * 10**9),
        ("141 GB", 141 * 10**9),
        ("24GiB", 24 * 2**30),
        ("1KB", 1000),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("12 B", 12),
        ("85899345920", 85_899_345_920),
    ],
)
def test_suffixes_of_bytes(text: str, count: int) -> None:
    assert byte_count(text) == count


@pytest.mark.parametrize(
    ("parse", "texts", "message"),
    [
        (
            token_count,
            ("0", "-5", "1.5", "1T", "1m", "1ki", "1KI", "1kB", "12 k", "", "k", "9" * 40, "0.1Ki"),
            "is not a number of tokens",
        ),
        (
            byte_count,
            (
                "0",
                "0.5",
                "0.0004kB",
                "80G",
                "80gb",
                "B",
                "GB",
                " 5GB",
                "5 5GB",
                "1kib",
                "80GiBB",
                "nan",
                "0.1MBB",
            ),
            "is not a number of bytes",
        ),
        (whole_number, ("", "x", "1.0", "1k", "\u0665", "0x1"), "is not a whole number"),
        (whole_number, ("9" * 40, "-" + "9" * 5000), "digits: give a smaller number"),
        (token_number, ("9" * 40,), "digits: give a smaller number"),
    ],
)
def test_what_is_no_number_is_refused(
    parse: Callable[[str], Any], texts: tuple[str, ...], message: str
) -> None:
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError) as refused:
            parse(text)
        assert message in str(refused.value)
        if parse is token_count:
            assert SUFFIXES in str(refused.value)


def test_plain_numbers_of_a_benchmark_are_left_to_it() -> None:
    assert [token_number(text) for text in ("0", "-16", "16Ki")] == [0, -16, 16_384]
    assert (whole_number("0"), whole_number("-4")) == (0, -4)


@pytest.mark.parametrize("verb", [["size"], ["replay"], ["bench"]])
def test_every_help_that_takes_tokens_says_what_suffixes_are(
    verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*verb, "--help"]) == 0
    assert SUFFIXES in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("llama3-8b", "llama-3-8b"),
        ("KIMI_K3", "kimi-k3"),
        ("lama-3-8b", "llama-3-8b"),
        ("foo", None),
        ("", None),
        ("x" * 10_000, None),
    ],
)
def test_a_name_like_a_known_one_is_asked_for(name: str, meant: str | None) -> None:
    known = ("llama-3-8b", "kimi-k3", "glm-5")
    assert alike(name, known) == (f" (did you mean {meant!r}?)" if meant else "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rplay"], "there is no verb 'rplay' (did you mean 'replay'?): choose from"),
        (["size", "llama3-8b"], "there is no preset 'llama3-8b' (did you mean 'llama-3-8b'?)"),
        (["bench", "agents", "--preset", "gpt-oss"], "'gpt-oss' (did you mean 'gptoss'?): choose"),
        (["--json", "size", "llama-3-8b"], "--json comes after the verb: kvcache VERB --json"),
        (["size", "kimi-k3", "--tp", "x"], "argument --tp: 'x' is not a whole number"),
        (
            ["size", "deepseek-v4-pro", "--block-tokens", "64"],
            "--block-tokens 64: Compressed.block_tokens is 64: it must be a multiple",
        ),
        (["size", "llama-3-8b", "--block-tokens", "64", "--kv-dtype", "fp8_ds_mla"], "kv_dtype"),
    ],
)
def test_slips_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err
