from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankscope.tracer.job.system_calls import NAMES, PAGE_FAULT, blocking_call

needs_the_kernel = pytest.mark.skipif(
    not Path("/proc/self/syscall").exists() or platform.machine() not in NAMES,
    reason="the kernel does not say in which call a process is",
)


def call_of(program: str) -> str:
    """Return the call in which a program is once it is in one, within 10 s."""
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            call = ""
            for _ in range(1_000):
                call = blocking_call(f"/proc/{process.pid}")
                if str(os.getpid()) in call:
                    break
                time.sleep(0.01)
            return call
        finally:
            process.send_signal(signal.SIGKILL)


@needs_the_kernel
def test_a_file_that_can_not_be_opened_is_named(tmp_path: Path) -> None:
    pipe = tmp_path / f"shard-{os.getpid()}.tar"
    os.mkfifo(pipe)

    assert call_of(f"open({str(pipe)!r}).read()") == f"openat {pipe}"


@needs_the_kernel
def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    pipe = tmp_path / f"shard-{os.getpid()}.tar"
    os.mkfifo(pipe)

    program = f"import os; os.read(os.open({str(pipe)!r}, os.O_RDWR), 1)"

    assert call_of(program) == f"read {pipe}"


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("running\n", ""),
        ("-1 0x7ffc 0x7f3d\n", PAGE_FAULT),
        ("0 0x63 0x7f 0x1 0x0 0x0 0x0 0x7ffc 0x7f3d\n", "read"),
        ("202 0x7f 0x80 0x0 0x0 0x0 0xffffffff 0x7ffc 0x7f3d\n", ""),
        ("257 0xffffff9c 0xdead0000 0x0 0x0 0x0 0x0 0x7ffc 0x7f3d\n", "openat"),
        ("", ""),
        ("257\n", ""),
        ("nonsense\n", ""),
    ],
)
def test_what_the_kernel_says_in_one_line(
    tmp_path: Path, text: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    (tmp_path / "syscall").write_text(text)
    (tmp_path / "mem").write_bytes(b"")

    assert blocking_call(str(tmp_path)) == call


def test_a_kernel_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    assert blocking_call(str(tmp_path)) == ""
