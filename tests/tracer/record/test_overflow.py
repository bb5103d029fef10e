"""Overflow: no agent, a disk that turns read-only, a runaway loop (rows A8, A9 and A11)."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

from rankscope.tracer.record.segment_pool import NUM_STARTERS
from rankscope.tracer.spool import PROCESS_FILE, DropReason, RecordType, SpoolCounts, read_counts
from tests.support.tracer.mounts import run_with_mounts
from tests.support.tracer.reading import dropped, only_folder, read_rows
from tests.support.tracer.recording import NUM_IN_STARTER, recorder_in, run_script
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.tracer.record.recorder import Recorder

SEGMENT_BYTES = 4096 + 512 * 128
"""A segment of 512 records."""

NO_ROOM = frozenset({DropReason.SPOOL_FULL, DropReason.NO_SEGMENT})


def counts_of(folder: Path) -> SpoolCounts:
    return read_counts((folder / PROCESS_FILE).read_bytes())


def record(recorder: Recorder, num_spans: int) -> None:
    for _ in range(num_spans):
        with recorder.span("x"):
            pass


def test_without_an_agent_the_oldest_records_are_kept_and_the_newest_dropped_and_counted(
    tmp_path: Path,
) -> None:
    recorder = recorder_in(tmp_path, segment_bytes=SEGMENT_BYTES, spool_bytes=3 * SEGMENT_BYTES)
    recorder.begin_steps()
    for step in range(1000):
        record(recorder, 9)
        recorder.step()
        if step == 100:  # 1,010 records: 14 rows of two segments are left
            wait_until(lambda: len(recorder._pool.spares) == 1)
    recorder.shutdown()

    counts, rows = counts_of(tmp_path), read_rows(tmp_path)
    assert counts.num_produced == 10_000
    assert counts.num_written == len(rows) == 3 * 512
    assert set(dropped(tmp_path)) <= NO_ROOM
    assert sum(dropped(tmp_path).values()) == 10_000 - 3 * 512
    # The beginning of the run is kept without a gap: ten records per step, 153 steps ended.
    kept = [row.step for row in rows if row.record == RecordType.STEP]
    assert kept == list(range(153))


BURST = """
    import gc, os
    from rankscope import tracer
    gc.disable()  # a pause of a millisecond would be a span too
    tracer.install()

    def record(num_spans):
        for _ in range(num_spans):
            with tracer.span("x"):
                pass

    def resident_bytes():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    record(10_000)  # the spool is full from here on
    before_bytes = resident_bytes()
    record(990_000)
    print(resident_bytes() - before_bytes)
    """


def test_a_burst_of_a_million_spans_takes_no_memory_and_each_is_written_or_counted(
    tmp_path: Path,
) -> None:
    # A separate process: in this one, memory of other tests may grow at the same time.
    done = run_script(
        BURST,
        tmp_path,
        RANKSCOPE_SEGMENT_BYTES=str(SEGMENT_BYTES),
        RANKSCOPE_SPOOL_BYTES=str(2 * SEGMENT_BYTES),
    )

    folder = only_folder(tmp_path)
    counts = counts_of(folder)
    assert counts.num_produced == 1_000_000
    assert counts.num_written == len(read_rows(folder)) == 2 * 512
    assert set(dropped(folder)) <= NO_ROOM
    assert sum(dropped(folder).values()) == 1_000_000 - 2 * 512
    assert int(done.stdout) < 1 << 20  # just over one byte per span would fail


READ_ONLY = """
    import gc, subprocess, sys, time
    from rankscope import tracer
    gc.disable()
    from tests.support.tracer.reading import dropped
    from rankscope.tracer.spool import DropReason
    folder = tracer.install().folder
    # A read-only mount over the folder: mapped files keep the former one, as on a disk that the
    # kernel has turned read-only, and every access by name fails.
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    if subprocess.run(["mount", "-o", "remount,bind,ro", folder]).returncode:
        sys.exit(77)
    num_spans, until_s = 0, time.monotonic() + 20
    while DropReason.SPOOL_FULL not in dropped(folder) and time.monotonic() < until_s:
        for _ in range(1_000):
            with tracer.span("x"):
                pass
        num_spans += 1_000
    tracer.event("note", "goes nowhere")
    print(num_spans)
    """


def test_a_spool_that_turns_read_only_drops_records_and_counts_them(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(READ_ONLY))
    spool = tmp_path / "spool"
    done = run_with_mounts(
        [sys.executable, script], spool, RANKSCOPE_SEGMENT_BYTES=str(SEGMENT_BYTES)
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
    assert "Read-only file system" in done.stderr
    (folder,) = (spool / "run").iterdir()
    counts = counts_of(folder)
    assert counts.num_produced == int(done.stdout)
    assert counts.num_written == len(read_rows(folder))
    assert counts.num_written == NUM_STARTERS * NUM_IN_STARTER + 2 * 512  # ready at the start
    assert sum(dropped(folder).values()) == counts.num_produced - counts.num_written
    assert set(dropped(folder)) <= NO_ROOM
    assert not (folder / "exit.json").exists()
