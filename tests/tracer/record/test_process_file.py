from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

from rankscope.tracer.spool import PROCESS_FILE, SpoolCounts, read_counts
from tests.support.tracer.reading import dropped, read_rows
from tests.support.tracer.recording import recorder_in, wait_until

if TYPE_CHECKING:
    from pathlib import Path


def account_in(folder: Path) -> SpoolCounts:
    return read_counts((folder / PROCESS_FILE).read_bytes())


def test_what_was_produced_was_stored_or_dropped(tmp_path: Path) -> None:
    # Segments of 8 records, room for two.
    segment_bytes = 4096 + 8 * 128
    recorder = recorder_in(tmp_path, segment_bytes=segment_bytes, spool_bytes=2 * segment_bytes)
    for _ in range(30):
        with recorder.span("x"):
            pass
    recorder.step()  # begins step 0, ends none
    recorder.step(tokens="many")  # type: ignore[arg-type]  # a bad argument loses no record
    recorder.shutdown()

    account = account_in(tmp_path)
    assert account.num_produced == 31
    assert account.num_written == len(read_rows(tmp_path)) == 16
    assert sum(dropped(tmp_path).values()) == 15 + 1


def test_the_account_is_renewed_while_the_process_runs(tmp_path: Path) -> None:
    begun_ns = time.monotonic_ns()
    recorder = recorder_in(tmp_path)
    for _ in range(5):
        with recorder.span("x"):
            pass
    recorder.resolver_lag_ns = 70
    wait_until(lambda: account_in(tmp_path).num_written == 5)
    wait_until(lambda: account_in(tmp_path).own_cpu_ns > 0)
    account = account_in(tmp_path)
    recorder.shutdown()

    assert begun_ns < account.at_ns <= time.monotonic_ns()
    assert account.resolver_lag_ns == 70
    assert account.num_produced == 5


def test_the_account_lies_where_the_page_says(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    with recorder.span("x"):
        pass
    recorder.shutdown()

    data = (tmp_path / PROCESS_FILE).read_bytes()
    produced, stored, at_ns, own_cpu_ns, lag_ns = struct.unpack_from("<QQqqq", data, 392)
    assert (produced, stored, lag_ns) == (1, 1, -1)
    assert at_ns > 0
    assert own_cpu_ns > 0
