"""The command line in this process."""

from __future__ import annotations

import pytest

from kvcache import cli


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    status = cli.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return status, out, err
