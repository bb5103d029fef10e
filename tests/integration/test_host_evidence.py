"""Real processes that hold up, kill and are killed: class and notes of their findings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.hosts.deviations import HostReadings
from rankscope.collector.store.store import open_store
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.job.slow_step_stacks import MIN_STEPS
from tests.integration.watched_job import (
    MANY_STEPS,
    TURN_S,
    Watch,
    drain,
    reach_step,
    spool_of,
    start_ranks,
    watched,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.collector.store.store import Store

MEMORY_LIMIT_BYTES = 640 << 20
"""More than a rank with torch takes, and soon used up by 32 MiB a step."""

HOG = """
import contextlib, os
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
with contextlib.suppress(PermissionError):
    os.nice(-10)
while True: pass
"""

HOG_NS = 6_000_000_000

HUNG_S = 6.0
"""Longer than a job is silent that hangs, and long enough for the stacks of a slow step."""

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"chdb://{tmp_path / 'store'}") as opened:
        yield opened


def analyzed(store: Store) -> RunReport:
    return analyze_run(StoreSource(store), "watched")


def crash_in(store: Store) -> Finding:
    (finding,) = [each for each in analyzed(store).findings if each.cause == "crash"]
    return finding


def notes(finding: Finding) -> dict[str, str]:
    return {note.source: note.text for note in finding.host_notes}


@contextmanager
def memory_group() -> Iterator[Path]:
    """Make a memory cgroup with a limit; skip if that is not permitted."""
    root = Path("/sys/fs/cgroup/memory")
    limit = "memory.limit_in_bytes"
    if not root.is_dir():
        root, limit = Path("/sys/fs/cgroup"), "memory.max"
    group = root / f"rankscope-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / limit).write_text(str(MEMORY_LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no memory cgroup of its own: {error.strerror}")
    try:
        yield group
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:  # its last process is not gone yet
                time.sleep(0.1)


@pytest.mark.nightly
def test_a_process_that_takes_the_cpu_of_a_rank_is_named(tmp_path: Path, store: Store) -> None:
    with watched(store, tmp_path, 3, pinned=1) as (watch, ranks):
        begin_ns = time.time_ns()
        with subprocess.Popen([sys.executable, "-c", HOG]) as hog:
            try:
                while time.time_ns() < begin_ns + HOG_NS:
                    watch.turn()
                    time.sleep(TURN_S)
            finally:
                hog.kill()
        end_ns = time.time_ns()
        for process in ranks:
            process.kill()

    source = StoreSource(store)
    infos = source.run_info("watched").ranks.values()
    readings = HostReadings(
        samples=source.context("watched").samples,
        begin_ns=begin_ns,
        end_ns=end_ns,
        places={info.rank: (info.host, info.local_rank) for info in infos},
    )
    # How much of a processor it gets depends on what else the machine does.
    named = {name for name in readings.samples.names if name.endswith(f"[{hog.pid}]")}
    assert named
    own, others = readings.queue_wait([1])
    assert own is not None
    assert others is not None
    assert own > max(others, 0.1)


def test_a_rank_that_the_kernel_kills_for_want_of_memory_says_so(
    tmp_path: Path, store: Store
) -> None:
    with memory_group() as group, start_ranks(tmp_path, 2, MANY_STEPS) as ranks:
        (group / "cgroup.procs").write_text(str(ranks[1].pid))
        watch = Watch(store, spool_of(tmp_path))
        reach_step(watch, ranks, tmp_path, 5)
        (tmp_path / "grow").touch()
        ranks[1].wait()
        drain(watch, ranks)
        watch.close()

    assert ranks[1].returncode == -signal.SIGKILL
    finding = crash_in(store)
    assert (finding.ranks, finding.end_class) == ((1,), "host-oom")
    if os.access("/dev/kmsg", os.R_OK):
        assert f"killed process {ranks[1].pid}" in finding.evidence
    else:
        assert "out-of-memory killer ended" in finding.evidence


@pytest.mark.nightly
def test_a_rank_that_a_user_kills_has_no_trace_of_the_kernel(tmp_path: Path, store: Store) -> None:
    kernel_log = tmp_path / "kern.log"
    kernel_log.write_text("")
    logs = [str(tmp_path / "logs" / "*.log")]
    with watched(store, tmp_path, 3, kernel_log=kernel_log, logs=logs) as (_, ranks):
        ranks[1].kill()
        ranks[1].wait()

    finding = crash_in(store)
    assert finding.ranks == (1,)
    assert "no trace of the kernel's out-of-memory killer" in finding.evidence
    major, minor = map(int, os.uname().release.split(".")[:2])
    if (major, minor) >= (6, 15):
        assert finding.end_class == "signal-9"
        assert "killed by signal 9 (SIGKILL)" in finding.evidence
    assert "onnection" in notes(finding)["rank logs"]


@pytest.mark.nightly
def test_a_line_of_a_given_kernel_log_classes_the_end_of_its_process(
    tmp_path: Path, store: Store
) -> None:
    kernel_log = tmp_path / "kern.log"
    kernel_log.write_text("")
    with watched(store, tmp_path, 2, kernel_log=kernel_log) as (_, ranks):
        line = f"NVRM: Xid (PCI:0000:3b:00): 79, pid={ranks[1].pid}, name=python3, GPU has fallen"
        with kernel_log.open("a") as file:
            file.write(f"Nov 28 12:00:00 node-1 kernel: [ 77.1] {line} off the bus.\n")
        ranks[1].kill()
        ranks[1].wait()

    finding = crash_in(store)
    assert (finding.ranks, finding.end_class) == ((1,), "xid-79")
    assert "GPU has fallen off the bus" in finding.evidence
    assert "drain the host" in notes(finding)["kernel log"]


STOPS = [
    (2, "loader", "data-loader", "in the data loader"),
    pytest.param(3, "workers", "data-loader", "in the data loader", marks=pytest.mark.nightly),
    (2, "fifo", "storage", "openat "),
    pytest.param(3, "barrier", "other-collective", "barrier", marks=pytest.mark.nightly),
    pytest.param(3, "sleep", "never-joined", "watched_job.py:", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("num_ranks", "fault", "end_class", "words"), STOPS)
def test_a_rank_that_stops_is_named_with_what_it_is_in(
    tmp_path: Path, store: Store, num_ranks: int, fault: str, end_class: str, words: str
) -> None:
    with watched(store, tmp_path, num_ranks, step=MIN_STEPS + 4) as (watch, ranks):
        os.mkfifo(tmp_path / fault) if fault == "fifo" else (tmp_path / fault).touch()
        until_s = time.monotonic() + HUNG_S
        while time.monotonic() < until_s:
            watch.turn()
            time.sleep(TURN_S)
        for process in ranks:  # as a scheduler would, long after
            process.kill()

    top = analyzed(store).top_finding
    assert (top.cause, top.ranks, top.end_class) == ("hang", (1,), end_class)
    assert words in f"{top.evidence} {notes(top)}"
    others = ("rank 0 in the collective", "2 ranks in the collective", "ranks 0 and 2")
    assert any(blocked in notes(top)["stacks"] for blocked in others)


@pytest.mark.nightly
def test_a_rank_that_meets_a_bad_document_is_classed_by_it(tmp_path: Path, store: Store) -> None:
    with watched(store, tmp_path, 3, logs=[str(tmp_path / "logs" / "*.log")]):
        (tmp_path / "raise").write_text('{"text": "a', encoding="utf-8")

    top = analyzed(store).top_finding
    assert (top.cause, top.ranks, top.end_class) == ("crash", (1,), "document")
    assert "JSONDecodeError" in top.evidence
    assert notes(top)["rank logs"].startswith("first error: rank 1 (document), json.decoder.JSON")
