from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.spool.deaths import DeathWatch
from rankscope.collector.spool.process import ProcessFiles
from tests.support.collector.spool_builder import SpoolBuilder, this_host
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.tracer.spool import SpoolIdentity


def identity(folder: Path, pid: int, *, rank: int = 0) -> SpoolIdentity:
    spool = SpoolBuilder(folder, run_id="r", rank=rank, **{**this_host(), "pid": pid})
    return ProcessFiles(spool.folder).identity


@pytest.mark.multiproc
def test_the_order_of_killed_processes_is_known_though_no_one_waits_for_them(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", "input()"]
    watch = DeathWatch()
    with ExitStack() as running:
        processes = [
            running.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
            for _ in range(3)
        ]
        followed = [
            watch.follow(identity(tmp_path, process.pid, rank=rank))
            for rank, process in enumerate(processes)
        ]
        known = [pidfd for pidfd in followed if pidfd is not None]
        assert len(known) == 3
        assert [watch.died_ns(pidfd) for pidfd in known] == [None] * 3

        for rank in (2, 0, 1):
            processes[rank].kill()
            wait_until(lambda rank=rank: watch.died_ns(known[rank]) is not None)  # type: ignore[misc]

    died = [watch.died_ns(pidfd) or 0 for pidfd in known]
    assert sorted(range(3), key=died.__getitem__) == [2, 0, 1]
    for pidfd in known:
        watch.leave(pidfd)
    watch.close()


@pytest.mark.multiproc
def test_an_end_is_known_at_once_to_a_caller_that_is_before_the_thread(tmp_path: Path) -> None:
    watch = DeathWatch()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pidfd = watch.follow(identity(tmp_path, process.pid))
        assert pidfd is not None
        process.kill()
    first_ns = watch.died_ns(pidfd)

    assert first_ns is not None
    assert watch.died_ns(pidfd) == first_ns
    watch.leave(pidfd)
    watch.close()


def test_what_is_gone_is_not_watched_and_no_thread_runs(tmp_path: Path) -> None:
    watch = DeathWatch()

    assert watch.follow(identity(tmp_path, 2**22 - 1)) is None
    assert watch.follow(identity(tmp_path, 2**32 - 1, rank=2)) is None  # of a damaged file
    watch.close()
    assert watch.follow(identity(tmp_path, os.getpid(), rank=1)) is not None
    watch.close()


@pytest.mark.multiproc
@pytest.mark.parametrize(("code", "status"), [("input()", -9), ("import os; os._exit(3)", 3)])
def test_how_a_process_ended_is_known_if_the_kernel_says_so(
    tmp_path: Path, code: str, status: int
) -> None:
    watch = DeathWatch()
    with subprocess.Popen(
        [sys.executable, "-c", f"input(); {code}"], stdin=subprocess.PIPE, text=True
    ) as process:
        pidfd = watch.follow(identity(tmp_path, process.pid))
        assert pidfd is not None
        assert watch.exit_status(pidfd) is None
        if status < 0:
            process.kill()
        else:
            process.communicate("\n")
    found = watch.exit_status(pidfd)
    watch.leave(pidfd)
    watch.close()

    major, minor = map(int, os.uname().release.split(".")[:2])
    if (major, minor) < (6, 15):
        assert found is None
    else:
        assert found is not None
        assert os.waitstatus_to_exitcode(found) == status
