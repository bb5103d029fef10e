"""Starters and spares of the segment pool, and the mapping of files."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.record.process_file import map_file, map_without_descriptor
from rankscope.tracer.record.segment_pool import NUM_STARTERS, STARTER_BYTES
from tests.support.tracer.reading import dropped, read_spans
from tests.support.tracer.recording import NUM_IN_STARTER, recorder_in
from tests.support.waiting import LONGEST_S, wait_until

if TYPE_CHECKING:
    from rankscope.tracer.record.recorder import Recorder

NUM_BYTES = 1 << 14


def record(recorder: Recorder, name: str) -> None:
    with recorder.span(name):
        pass


def record_and_stay(recorder: Recorder, until_all_have: threading.Barrier) -> None:
    for _ in range(90):
        record(recorder, "x")
    until_all_have.wait()  # threads at once need a lane each


def finish(recorder: Recorder, threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()
    recorder.shutdown()


def recorder_with_starters_only(folder: Path) -> Recorder:
    """Return a recorder whose spool limit leaves no space for a whole segment."""
    return recorder_in(folder, segment_bytes=1 << 20, spool_bytes=1 << 20)


def num_kept(folder: Path) -> dict[str, int]:
    tracks = [row.track for row in read_spans(folder)]
    return {track: tracks.count(track) for track in tracks}


def mapped_and_held(folder: Path) -> tuple[int, int]:
    """Return how many files of ``folder`` this process has mapped and how many it has open."""
    maps = Path("/proc/self/maps").read_text()
    held = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            held += descriptor.readlink().is_relative_to(folder)
    return maps.count(f"{folder}/"), held


def test_a_thread_that_begins_while_no_segment_is_ready_loses_nothing(tmp_path: Path) -> None:
    recorder = recorder_with_starters_only(tmp_path)
    all_have = threading.Barrier(2 * NUM_STARTERS, timeout=LONGEST_S)
    threads = [
        threading.Thread(target=record_and_stay, args=(recorder, all_have), name=f"worker-{number}")
        for number in range(2 * NUM_STARTERS)
    ]
    for thread in threads:
        wait_until(lambda: not recorder._pool._needs_starter())
        thread.start()
    finish(recorder, threads)

    assert num_kept(tmp_path) == {thread.name: 90 for thread in threads}
    assert dropped(tmp_path) == {}


def test_threads_that_begin_at_the_same_moment_lose_nothing(tmp_path: Path) -> None:
    recorder = recorder_with_starters_only(tmp_path)
    together = threading.Barrier(NUM_STARTERS, timeout=LONGEST_S)

    def work() -> None:
        together.wait()
        record_and_stay(recorder, together)

    threads = [
        threading.Thread(target=work, name=f"worker-{number}") for number in range(NUM_STARTERS)
    ]
    for thread in threads:
        thread.start()
    finish(recorder, threads)

    assert num_kept(tmp_path) == {thread.name: 90 for thread in threads}
    assert dropped(tmp_path) == {}


def test_a_full_lane_continues_in_a_starter_if_no_whole_segment_is_ready(tmp_path: Path) -> None:
    recorder = recorder_with_starters_only(tmp_path)
    num_records = NUM_STARTERS * NUM_IN_STARTER  # what is ready without the background thread
    for _ in range(num_records):
        record(recorder, "x")
    recorder.shutdown()

    assert num_kept(tmp_path) == {"main": num_records}
    assert dropped(tmp_path) == {}


def test_a_small_spool_limit_is_used_for_whole_segments(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, segment_bytes=1 << 16, spool_bytes=(1 << 20) - 1)
    record(recorder, "x")

    sizes = {path.stat().st_size for path in tmp_path.glob("seg-*.rsp")}
    assert sizes == {1 << 16}
    recorder.shutdown()


def test_segments_that_were_not_taken_are_removed_at_shutdown(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, segment_bytes=1 << 16)
    record(recorder, "x")
    recorder.shutdown()

    (segment,) = tmp_path.glob("seg-*.rsp")
    assert segment.stat().st_size == STARTER_BYTES
    assert [row.name for row in read_spans(tmp_path)] == ["x"]


def test_a_mapping_holds_no_file_descriptor(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    for _ in range(1_000):
        record(recorder, "x")
    wait_until(lambda: not recorder._pool.needs_segments())  # then no mapping is in progress
    num_mapped, num_held = mapped_and_held(tmp_path)
    with (tmp_path / "process.rsp").open("rb"):
        assert mapped_and_held(tmp_path) == (num_mapped, num_held + 1)
    recorder.shutdown()

    assert num_mapped >= 2 + NUM_STARTERS  # the process file and the current segment
    assert num_held == 0


def test_a_mapping_shows_the_file_and_is_unmapped(tmp_path: Path) -> None:
    mapped = map_file(tmp_path / "file", NUM_BYTES)
    mapped[:5] = b"begin"
    mapped[-3:] = b"end"

    written = (tmp_path / "file").read_bytes()
    assert (written[:5], written[-3:], len(written)) == (b"begin", b"end", NUM_BYTES)
    assert mapped_and_held(tmp_path) == (1, 0)
    del mapped
    assert mapped_and_held(tmp_path) == (0, 0)


def test_a_file_that_cannot_be_mapped_raises_and_maps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(NUM_BYTES))
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(PermissionError):
        map_without_descriptor(descriptor, NUM_BYTES)
    os.close(descriptor)

    assert mapped_and_held(tmp_path) == (0, 0)
