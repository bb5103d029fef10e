from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.spool.liveness import Liveness, read_liveness
from rankscope.collector.spool.process import ProcessFiles
from tests.support.collector.spool_builder import SpoolBuilder, this_host

if TYPE_CHECKING:
    from pathlib import Path


def liveness(tmp_path: Path, identity: dict[str, Any]) -> Liveness:
    spool = SpoolBuilder(tmp_path, run_id="r", **identity)
    return read_liveness(ProcessFiles(spool.folder).identity)


def test_this_process_is_alive(tmp_path: Path) -> None:
    assert liveness(tmp_path, this_host()) is Liveness.ALIVE


def test_a_process_of_another_host_is_unknown(tmp_path: Path) -> None:
    assert liveness(tmp_path, this_host() | {"host": "elsewhere"}) is Liveness.UNKNOWN


def test_a_process_of_an_earlier_boot_is_gone(tmp_path: Path) -> None:
    assert liveness(tmp_path, this_host() | {"boot_id": bytes(15) + b"x"}) is Liveness.GONE


def test_a_process_that_reuses_the_pid_of_another_does_not_count(tmp_path: Path) -> None:
    # The spool is an hour old, this process is not.
    anchor_ns = time.monotonic_ns() - 3600 * 10**9
    assert liveness(tmp_path, this_host() | {"anchor_monotonic_ns": anchor_ns}) is Liveness.GONE


@pytest.mark.multiproc
def test_a_zombie_and_a_reaped_process_are_gone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "print()"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read()  # returns when the process ends
        deadline = time.monotonic() + 60
        while (seen := liveness(tmp_path, this_host() | {"pid": process.pid})) is Liveness.ALIVE:
            assert time.monotonic() < deadline
        assert seen is Liveness.GONE  # a zombie: not waited for yet
    assert liveness(tmp_path, this_host() | {"pid": process.pid}) is Liveness.GONE


def test_a_name_that_a_rehearsal_gives_this_host_is_no_other_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKSCOPE_HOST", "demo-host-1,demo-host-2")

    assert liveness(tmp_path, this_host() | {"host": "demo-host-2"}) is Liveness.ALIVE
