"""What is asked of the kernel for host memory, where it cannot do it right now."""

from __future__ import annotations

import subprocess
import sys

import pytest

REFUSED = """
import ctypes, errno, mmap, platform, struct, sys
from kvcache.core import memory_calls, native
memory = mmap.mmap(-1, 1 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
memory_calls.populate(address, 4096)
madvise = {"x86_64": 28, "aarch64": 233}[platform.machine()]
def line(code, true, false, value):
    return struct.pack("HBBI", code, true, false, value)
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
lines = [
    line(LOAD, 0, 0, 0), line(EQUAL, 0, 3, madvise),  # the number of the call
    line(LOAD, 0, 0, 32), line(EQUAL, 0, 1, 23),  # its third argument: MADV_POPULATE_WRITE
    line(RETURN, 0, 0, 0x00050000 | errno.EAGAIN), line(RETURN, 0, 0, 0x7FFF0000),
]
code = ctypes.create_string_buffer(b"".join(lines))
program = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit(77)
try:
    memory_calls.populate(address, 1 << 20)
except OSError as error:
    print(errno.errorcode[error.errno])
"""
"""A process whose kernel answers EAGAIN to each such call, for ever."""


def test_memory_that_the_kernel_never_has_is_an_error_and_not_waited_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], check=False, capture_output=True, text=True, timeout=60
    )
    if done.returncode == 77:
        pytest.skip("this system lets no process filter its own calls (seccomp)")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "EAGAIN\n"
