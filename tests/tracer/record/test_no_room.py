"""Recording with a full disk or without memory: rows A9 and A10 of the fault matrix."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.record.segment_pool import NUM_STARTERS
from rankscope.tracer.spool import DropReason
from tests.support.tracer.mounts import MAY_NOT_MOUNT, run_with_mounts
from tests.support.tracer.reading import count_dropped, dropped, only_folder, read_spans
from tests.support.tracer.recording import NUM_IN_STARTER, recorder_in, run_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


# -- A9: the disk -----------------------------------------------------------------------


def is_each_written_or_counted(folder: Path, num_spans: int) -> bool:
    return len(read_spans(folder)) + count_dropped(folder) == num_spans


def test_a_full_file_system_drops_records_and_counts_them(tmp_path: Path) -> None:
    # Files are limited to 1,060,864 bytes: enough for the names and the first records, not for a
    # segment of 2 MiB.
    done = run_script(
        """
        import gc, resource
        from rankscope import tracer
        gc.disable()  # a pause of a millisecond would be a span too
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_060_864, 1_060_864))
        tracer.install()
        for _ in range(20_000):
            with tracer.span("x"):
                pass
        """,
        tmp_path,
        RANKSCOPE_SEGMENT_BYTES=str(2 << 20),
    )

    assert done.returncode == 0
    assert (
        done.stderr
        == "rankscope: rank 0 drops new spans and counts them: [Errno 27] File too large\n"
    )
    folder = only_folder(tmp_path)
    stored = len(read_spans(folder))
    assert stored >= NUM_STARTERS * NUM_IN_STARTER  # small segments still fit
    assert dropped(folder) == {DropReason.SPOOL_FULL: 20_000 - stored}
    assert "File too large" in (folder / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("end", "code", "state", "message"),
    [
        ("pass", 0, "ended", ""),
        ("raise KeyError('why')", 1, "failed", "KeyError: 'why'"),
        # Escaped, its message and traceback take more than the reserved bytes.
        ("exec('\\n' * 9 + 'raise KeyError(chr(0x4e00) * 60_000)')", 1, "failed", ""),
    ],
)
def test_the_exit_record_is_written_on_a_full_disk(
    tmp_path: Path, end: str, code: int, state: str, message: str
) -> None:
    script = tmp_path / "job.py"
    script.write_text(f"""
import os
from rankscope import tracer
recorder = tracer.install()
try:
    with (recorder.folder / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
except OSError:
    for _ in range(20_000):  # otherwise a spare segment that is removed at the end frees space
        with tracer.span("x"):
            pass
    {end}
""")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=4m tmpfs {disk} || exit {MAY_NOT_MOUNT}"
    run, keep = f"{sys.executable} {script}", f"cp {disk}/run/*/exit.json {tmp_path}"
    done = run_with_mounts(
        ["sh", "-c", f"{mount}; {run}; code=$?; {keep}; exit $code"],
        disk,
        RANKSCOPE_SEGMENT_BYTES=str(1 << 20),
    )

    assert done.returncode == code, done.stderr
    record = json.loads((tmp_path / "exit.json").read_text())
    assert record["state"] == state
    assert record.get("exception", {}).get("traceback", "").strip().endswith(message)


def test_a_disk_that_is_full_at_the_start_gets_no_process_folder(tmp_path: Path) -> None:
    done = run_script(
        """
        import resource
        from rankscope import tracer
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        print(tracer.install().enabled)
        """,
        tmp_path,
    )

    assert (done.returncode, done.stdout) == (0, "False\n")
    assert "not tracing this process: OSError(27" in done.stderr
    assert list((tmp_path / "run").iterdir()) == []


def test_recording_continues_once_the_disk_has_space_again(tmp_path: Path) -> None:
    done = run_script(
        """
        import gc, resource
        from rankscope import tracer
        gc.disable()
        from tests.support.tracer.reading import dropped
        from tests.support.waiting import wait_until
        from rankscope.tracer.spool import DropReason

        def record(name, num_spans):
            for _ in range(num_spans):
                with tracer.span(name):
                    pass

        recorder = tracer.install()
        before, limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit))
        num_spans = 0
        while DropReason.SPOOL_FULL not in dropped(recorder.folder):
            record("while full", 100)
            num_spans += 100
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, limit))
        wait_until(recorder._pool._has_whole)
        record("with room", 100)
        print(num_spans + 100)
        """,
        tmp_path,
        RANKSCOPE_SEGMENT_BYTES=str(1 << 16),
    )

    assert done.returncode == 0, done.stderr
    folder = only_folder(tmp_path)
    names = [row.name for row in read_spans(folder)]
    assert names.count("with room") == 100
    assert len(set(dropped(folder)) - {DropReason.SPOOL_FULL, DropReason.NO_SEGMENT}) == 0
    assert is_each_written_or_counted(folder, int(done.stdout))


def test_a_mapped_file_is_read_only(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("*.rsp")}
    recorder.shutdown()

    assert set(modes) >= {"process.rsp", "seg-000000.rsp"}
    assert set(modes.values()) == {0o440}


# -- A10: memory ---------------------------------------------------------------------------


def test_a_memory_error_of_the_job_is_passed_on_and_recording_continues(tmp_path: Path) -> None:
    done = run_script(
        """
        import resource
        from rankscope import tracer
        tracer.install()
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), used + (16 << 20)))
        hoard, caught = [], 0
        for size in [1 << 22] * 20 + [1 << 16] * 300 + [1 << 10] * 20_000:
            try:
                with tracer.span("allocate"):
                    hoard.append(bytearray(size))
            except MemoryError:
                caught += 1
        num_spans = 20 + 300 + 20_000
        hoard.clear()
        print(caught, num_spans)
        """,
        tmp_path,
        RANKSCOPE_SEGMENT_BYTES=str(1 << 18),
    )

    assert done.returncode == 0, done.stderr
    caught, num_spans = map(int, done.stdout.split())
    assert caught > 0
    folder = only_folder(tmp_path)
    assert is_each_written_or_counted(folder, num_spans)
    assert DropReason.INTERNAL_ERROR not in dropped(folder)
