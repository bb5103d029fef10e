"""`rankscope agent` as a process: refusals, signals, end."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.faults.checker import Oracle, check
from tests.faults.proxy import FaultProxy, Faults
from tests.integration.programs import COMMAND, TIMEOUT_S, environment, rankscope
from tests.support.collector.agent_rig import state_of, write_spans
from tests.support.collector.fake_collector import TOKEN, FakeCollector
from tests.support.collector.spool_builder import SpoolBuilder, this_host
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


@contextmanager
def shipping(
    spool: Path, url: str, *arguments: str, token: str = TOKEN
) -> Iterator[subprocess.Popen[str]]:
    """Run an agent until the block ends, and kill it if it still runs."""
    process = subprocess.Popen(
        [*COMMAND, "agent", "--spool", str(spool), "--collector", url, *arguments],
        env=environment(spool, RANKSCOPE_TOKEN=token),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def stop(agent: subprocess.Popen[str]) -> str:
    """Terminate an agent and return its output."""
    agent.send_signal(signal.SIGTERM)
    return "".join(agent.communicate(timeout=TIMEOUT_S))


def test_an_agent_sends_the_spool_of_a_host_and_resumes_after_a_restart(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    with Oracle(tmp_path / "oracle", is_synced=False) as oracle, FakeCollector() as collector:
        builder = SpoolBuilder(spool, run_id="run")
        write_spans(builder, oracle, 50)
        with shipping(spool, collector.url) as agent:
            wait_until(lambda: len(collector.stored.rows) >= 49)
            wait_until(lambda: bool(collector.stored.described.get("samples")))
            err = stop(agent)
            assert agent.returncode == 0
            assert "stopped" in err
        write_spans(builder, oracle, 50)
        builder.end()
        with shipping(spool, collector.url, "--no-samples"):
            wait_until(lambda: len(collector.stored.rows) >= 100)

        assert check(tmp_path / "oracle", collector.stored.rows).is_clean
        names = {row["name"] for row in collector.stored.described["samples"]}
        assert {"disk-free-bytes:/", "sampler-cpu-ns"} <= names


def kinds(collector: FakeCollector) -> set[str]:
    return {row["kind"] for row in collector.stored.described.get("events", ())}


def open_files(pid: int) -> set[str]:
    return {os.path.realpath(file) for file in Path(f"/proc/{pid}/fd").iterdir()}


def test_an_agent_sends_the_progress_of_its_ranks_and_what_the_logs_say(tmp_path: Path) -> None:
    spool, kernel_log = tmp_path / "spool", tmp_path / "kern.log"
    builder = SpoolBuilder(spool, run_id="run", rank=3, **this_host())
    builder.span(step=41)
    kernel_log.write_text("")
    logs = ("--kernel-log", str(kernel_log), "--logs", str(tmp_path / "rank-*.log"))
    with FakeCollector() as collector:
        with shipping(spool, collector.url, *logs) as agent:
            wait_until(lambda: bool(collector.stored.described.get("heartbeats")))
            wait_until(lambda: str(kernel_log) in open_files(agent.pid))  # it begins at the end
            with kernel_log.open("a") as file:
                file.write(f"NVRM: Xid (PCI:0000:3b:00): 79, pid={os.getpid()}, GPU has fallen\n")
                file.write("not allow-listed\n")
            (tmp_path / "rank-3.log").write_text("CUDA error: unspecified launch failure\n")
            wait_until(lambda: {"kernel", "log"} <= kinds(collector))
            stop(agent)
        events = {row["kind"]: row for row in collector.stored.described["events"]}
        beat = collector.stored.described["heartbeats"][0]

    assert (beat["run_id"], beat["rank"], beat["step"]) == ("run", 3, 41)
    assert beat["host"] == os.uname().nodename
    for kind in ("kernel", "log"):
        assert (events[kind]["run_id"], events[kind]["rank"]) == ("run", 3)
    assert events["kernel"]["text"] == "Xid 79: GPU has fallen off the bus"


def test_an_agent_that_waits_for_an_answer_ends_within_seconds(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    SpoolBuilder(spool, run_id="run").end()
    with FakeCollector() as collector, FaultProxy(collector.port) as proxy:
        proxy.faults = Faults(is_blackholed=True)
        with shipping(spool, f"http://localhost:{proxy.port}", "--no-samples") as agent:
            wait_until(lambda: proxy.traffic.num_connections >= 2)
            begun_s = time.monotonic()
            stop(agent)

            assert agent.returncode == 0
            assert time.monotonic() - begun_s < 45  # It would wait 50 s for the answer.


def signal_another_thread(pid: int) -> None:
    """Send SIGTERM to the oldest thread of ``pid`` that accepts it, except for the main thread.

    That thread exists before the agent starts and until its end. A thread of a single request may
    be ending: the kernel delivers the signal to it and loses it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    others = [task for task in Path(f"/proc/{pid}/task").iterdir() if int(task.name) != pid]
    oldest = min((began_ticks(task), int(task.name)) for task in others if takes_sigterm(task))
    assert libc.tgkill(pid, oldest[1], signal.SIGTERM) == 0


def began_ticks(task: Path) -> int:
    """Return the start of a thread; far in the future if it has ended."""
    try:
        return int((task / "stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 2**63


def takes_sigterm(task: Path) -> bool:
    """Return whether a thread exists and does not block the signal, as the allocator's does."""
    try:
        lines = (task / "status").read_text().splitlines()
    except OSError:
        return False
    (blocked,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))
    return not blocked >> (signal.SIGTERM - 1) & 1


def test_a_signal_to_another_thread_ends_the_agent(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    SpoolBuilder(spool, run_id="run").end()
    with FakeCollector() as collector, shipping(spool, collector.url, "--no-samples") as agent:
        wait_until(lambda: collector.num_requests("/v1/resume") > 0)
        signal_another_thread(agent.pid)
        _, err = agent.communicate(timeout=TIMEOUT_S)

    assert agent.returncode == 0
    assert "stopped" in err


def test_a_second_agent_on_a_spool_is_refused(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    with FakeCollector() as collector, shipping(spool, collector.url, "--no-samples"):
        wait_until(lambda: any(state_of(spool).rglob("journal")))
        second = rankscope(
            "agent", "--spool", str(spool), "--collector", collector.url, store=spool
        )

    assert second.returncode == 2
    assert "another agent uses" in second.stderr


def test_the_token_is_in_no_command_line_and_no_output(tmp_path: Path) -> None:
    secret = "canary-4f1c"
    spool = tmp_path / "spool"
    SpoolBuilder(spool, run_id="run").end()
    with (
        FakeCollector() as collector,
        shipping(spool, collector.url, "--no-samples", token=secret) as agent,
    ):
        wait_until(lambda: collector.num_requests("/v1/rows/processes") > 0)
        said = stop(agent)

    assert "does not know the token" in said
    assert secret not in said
    files = [file for file in state_of(spool).rglob("*") if file.is_file()]
    assert {"journal", "journal.db", "lock"} <= {file.name for file in files}
    for file in files:
        assert secret.encode() not in file.read_bytes()


def test_state_in_the_spool_is_neither_trusted_nor_written(tmp_path: Path) -> None:
    spool, victim = tmp_path / "spool", tmp_path / "victim"
    victim.write_text("precious")
    (spool / ".agent").mkdir(parents=True)
    for name in ("journal", "journal.db"):
        (spool / ".agent" / name).symlink_to(victim)
    with Oracle(tmp_path / "oracle", is_synced=False) as oracle, FakeCollector() as collector:
        builder = SpoolBuilder(spool, run_id="run")
        write_spans(builder, oracle, 50)
        builder.end()
        with shipping(spool, collector.url, "--no-samples") as agent:
            wait_until(lambda: len(collector.stored.rows) >= 50)
            err = stop(agent)

    assert victim.read_text() == "precious"
    assert "state of an earlier release" in err
