"""Golden spools of every layout, and spools of a newer one.

The golden spools were written from the tables of docs/spool-format.md of their time, not by
`tracer.spool`. Zeros at the end of a file are left out. A new layout adds a folder and leaves the
others unchanged.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.runs import read_events
from rankscope.collector.read.spans import read_spans
from rankscope.collector.read.steps import read_microbatches, read_steps
from rankscope.collector.spool.segment import read_open_spans
from rankscope.collector.spool.tail import SegmentPolicy, SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.tracer.spool import SPOOL_VERSION
from tests.faults.checker import content_hash
from tests.support.collector.agent_rig import Rig
from tests.support.collector.fake_collector import FakeCollector
from tests.support.collector.spool_builder import SpoolBuilder
from tests.support.paths import GOLDEN

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.store.store import Store

PROCESS_FOLDER = "e1-r00003-abababababab"
FULL_BYTES = {"process.rsp": 4096 + 4096 * 256, "seg-000000.rsp": 4096 + 64 * 128}
VERSION_OFFSET = 8
EPOCH_NS = 1_700_000_000_000_000_000
"""Unix time of the golden host's monotonic 0."""


def lay_out(spool: Path, version: int, *, as_version: int | None = None) -> Path:
    """Copy a golden process into a spool, with its files in full length; return its folder."""
    folder = spool / "golden" / PROCESS_FOLDER
    folder.mkdir(parents=True)
    for source in (GOLDEN / f"spool-v{version}" / PROCESS_FOLDER).iterdir():
        data = bytearray(source.read_bytes())
        if as_version is not None and source.suffix == ".rsp":
            struct.pack_into("<I", data, VERSION_OFFSET, as_version)
        (folder / source.name).write_bytes(data.ljust(FULL_BYTES.get(source.name, 0), b"\0"))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_there_is_a_golden_spool_of_every_layout() -> None:
    names = {path.name for path in GOLDEN.glob("spool-v*")}

    assert names == {f"spool-v{version}" for version in range(1, SPOOL_VERSION + 1)}


@pytest.mark.slow
def test_the_second_layout_reads_as_it_was_written(store: Store, tmp_path: Path) -> None:
    lay_out(tmp_path, 2)

    progress = SpoolTail(tmp_path, StoreWriter(store)).poll()

    assert (progress.problems, progress.num_unreadable) == ((), 0)
    assert (progress.num_spans, progress.num_torn, progress.num_bad) == (4, 1, 1)
    spans = read_spans(store, "golden").sort_by("start_ns").to_pylist()
    assert [(span["name"], span["start_ns"] - EPOCH_NS, span["duration_ns"]) for span in spans] == [
        ("forward", 10_000, 500),
        ("all-reduce", 11_000, 700),
        ("ünïcödé", 12_000, 1),
        ("forward", 15_000, 250),
    ]
    assert spans[1] == {
        "epoch": 1, "step": 4, "rank": 3, "kind": "dp-comm", "name": "all-reduce", "track": "main",
        "start_ns": EPOCH_NS + 11_000, "duration_ns": 700, "launch_ns": EPOCH_NS + 10_900,
        "group_id": 0x1122334455667788, "seq": 7, "src_rank": -1, "dst_rank": -1,
        "microbatch": -1, "chunk": -1, "num_bytes": 4096, "interval_id": 9, "flags": 16, "depth": 1,
    }  # fmt: skip
    (step,) = read_steps(store, "golden").to_pylist()
    assert (step["step"], step["num_tokens"], step["loss"], step["left_out"]) == (4, 512, 0.5, 3)
    # of fields that were zero when the spool was written
    assert (step["peak_reserved_bytes"], step["num_alloc_retries"]) == (-1, -1)
    (microbatch,) = read_microbatches(store, "golden").to_pylist()
    assert microbatch["sum_windowed_lengths"] == -1
    assert (microbatch["num_tokens"], microbatch["sum_squared_lengths"]) == (49, 2401)
    assert next(event["text"] for event in read_events(store, "golden")) == "began"
    (rank,) = store.rows("SELECT dropped, exit_state FROM ranks FINAL WHERE run_id = 'golden'")
    assert rank == {"dropped": {"spool-full": 5}, "exit_state": "ended"}


@pytest.mark.parametrize("version", [1, SPOOL_VERSION + 1])
def test_an_unsupported_layout_is_reported_and_left_unchanged(
    version: int, store: Store, tmp_path: Path
) -> None:
    folder = lay_out(tmp_path, min(version, SPOOL_VERSION), as_version=version)
    before = contents(folder)
    tail = SpoolTail(tmp_path, StoreWriter(store), segment_policy=SegmentPolicy.DELETE)

    progress = tail.poll()

    (problem,) = progress.problems
    assert f"spool version {version}; this rankscope reads version {SPOOL_VERSION}" in problem
    assert (progress.num_spans, progress.num_unreadable) == (0, 1)
    assert (tail.poll().problems, tail.poll().num_unreadable) == ((), 1)
    assert contents(folder) == before


def test_the_open_table_of_another_layout_is_not_read(tmp_path: Path) -> None:
    spool = SpoolBuilder(tmp_path, run_id="run", version=SPOOL_VERSION + 1)
    spool.open_span(0, "op", start_ns=5, step=1)

    assert read_open_spans(spool.segment) == []


def test_a_downgraded_agent_deletes_nothing_that_it_can_not_read(tmp_path: Path) -> None:
    # GIVEN a process of a newer release, one of this, and one of this with a newer segment
    spool = tmp_path / "spool"
    newer = lay_out(spool, SPOOL_VERSION, as_version=SPOOL_VERSION + 1)
    ours = SpoolBuilder(spool, run_id="golden", rank=0)
    ours.span("fine")
    ours.end()
    mixed = SpoolBuilder(spool, run_id="golden", rank=1)
    mixed.span("fine too")
    mixed.seal()
    mixed.new_segment()
    mixed.span("unreadable")
    data = bytearray(mixed.segment.read_bytes())
    struct.pack_into("<I", data, VERSION_OFFSET, SPOOL_VERSION + 1)
    mixed.segment.write_bytes(data)
    mixed.end()
    kept = contents(newer), mixed.segment.read_bytes()

    # WHEN an agent of this release sends the spool, and another one must then free space
    with FakeCollector() as collector:
        first = Rig(spool, collector.url)
        first.turn_until(lambda: len(collector.stored.rows) >= 2)
        first.close()
        rig = Rig(spool, collector.url, max_spool_bytes=1)
        rig.turn_until(lambda: not ours.folder.exists())
        for _ in range(10):
            rig.turn()
        rig.close()

    # THEN what it can't read is unchanged and reported once, with both versions
    assert (contents(newer), mixed.segment.read_bytes()) == kept
    words = f"spool version {SPOOL_VERSION + 1}; this rankscope reads version {SPOOL_VERSION}"
    reported = [line for line in rig.lines if words in line]
    assert len(reported) == 2
    assert any(str(mixed.segment) in line for line in reported)
    contents_stored = {content for _, content in collector.stored.rows}
    assert contents_stored == {content_hash(name, 0, 10) for name in ("fine", "fine too")}
