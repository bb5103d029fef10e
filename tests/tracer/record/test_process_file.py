from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rankscope.tracer.spool import PROCESS_FILE, SpoolCounts, read_counts
from tests.support.tracer.reading import dropped, read_rows
from tests.support.tracer.recording import recorder_in
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path


def counts_in(folder: Path) -> SpoolCounts:
    return read_counts((folder / PROCESS_FILE).read_bytes())


def test_produced_is_written_plus_dropped(tmp_path: Path) -> None:
    # Two segments of 8 records.
    segment_bytes = 4096 + 8 * 128
    recorder = recorder_in(tmp_path, segment_bytes=segment_bytes, spool_bytes=2 * segment_bytes)
    for _ in range(30):
        with recorder.span("x"):
            pass
    recorder.step()  # begins step 0, ends none
    recorder.step(tokens="many")  # type: ignore[arg-type]  # an invalid argument drops no record
    recorder.shutdown()

    counts = counts_in(tmp_path)
    assert counts.num_produced == 31
    assert counts.num_written == len(read_rows(tmp_path)) == 16
    assert sum(dropped(tmp_path).values()) == 15 + 1


def test_the_counters_are_updated_while_the_process_runs(tmp_path: Path) -> None:
    begun_ns = time.monotonic_ns()
    recorder = recorder_in(tmp_path)
    for _ in range(5):
        with recorder.span("x"):
            pass
    recorder.resolver_lag_ns = 70
    wait_until(lambda: counts_in(tmp_path).num_written == 5)
    wait_until(lambda: counts_in(tmp_path).own_cpu_ns > 0)
    counts = counts_in(tmp_path)
    recorder.shutdown()

    assert begun_ns < counts.at_ns <= time.monotonic_ns()
    assert counts.resolver_lag_ns == 70
    assert counts.num_produced == 5
