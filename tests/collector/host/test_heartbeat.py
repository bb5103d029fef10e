from __future__ import annotations

import os
import shutil
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rankscope.collector.host.heartbeat import (
    STEP_READINGS,
    Heartbeat,
    HeartbeatSource,
    heartbeat_sink,
    host_address,
    newest_step,
)
from rankscope.collector.host.sample import Sample
from rankscope.collector.ingest.rows import ROW_TABLES
from rankscope.tracer.spool import COUNTS, COUNTS_OFFSET, PROCESS_FILE
from tests.support.collector.spool_builder import SpoolBuilder, this_host

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.identity import Row


NOW_NS = 10**15

BEAT = Heartbeat(
    at_ns=9,
    host=os.uname().nodename,
    address="10.0.0.7",
    pod="job-0",
    hardware="NVIDIA H200",
    run_id="run",
    epoch=0,
    rank=9,
    local_rank=1,
    pid=os.getpid(),
    state="training",
    step=42,
    rdma_sent_bytes=700,
    rdma_received_bytes=600,
)


def rank(spool: Path, *, number: int = 0, **manifest: Any) -> SpoolBuilder:  # noqa: ANN401
    content = {"local_rank": number, "pod": "job-0", "device": {"name": "NVIDIA H200"}, **manifest}
    return SpoolBuilder(
        spool, run_id="run", rank=8 + number, world_size=16, manifest=content, **this_host()
    )


def account(builder: SpoolBuilder, at_ns: int) -> None:
    with (builder.folder / PROCESS_FILE).open("r+b") as file:
        file.seek(COUNTS_OFFSET)
        file.write(COUNTS.pack(1, 1, at_ns, 0, -1))


class Beats:
    def __init__(self) -> None:
        self.rounds: list[list[Heartbeat]] = []

    def __call__(self, beats: Any) -> None:  # noqa: ANN401
        self.rounds.append(list(beats))


def source(spool: Path, beats: Beats, **settings: Any) -> HeartbeatSource:  # noqa: ANN401
    given = {"monotonic_ns": lambda: NOW_NS, "address": "10.0.0.7", **settings}
    return HeartbeatSource(spool, sink=beats, **given)


def test_a_heartbeat_has_rank_host_device_and_step(tmp_path: Path) -> None:
    builder = rank(tmp_path, number=1)
    builder.span(step=41)
    builder.open_span(0, "forward", start_ns=5, step=42)
    account(builder, NOW_NS - 500_000_000)
    beats = Beats()

    samples = source(tmp_path, beats, traffic_bytes=lambda: (700, 600)).read(9)

    assert beats.rounds == [[BEAT]]
    assert samples == [Sample(9, "training-is-alive", 1.0, 1), Sample(9, "training-step", 42.0, 1)]


def test_a_rank_without_a_step_is_starting(tmp_path: Path) -> None:
    rank(tmp_path)
    beats = Beats()

    samples = source(tmp_path, beats).read(9)

    assert (beats.rounds[0][0].state, beats.rounds[0][0].step) == ("starting", -1)
    assert beats.rounds[0][0].rdma_sent_bytes is None
    assert samples == [Sample(9, "training-is-alive", 1.0, 0)]


def test_a_rank_whose_tracer_stopped_writing_is_silent(tmp_path: Path) -> None:
    builder = rank(tmp_path)
    builder.span(step=3)
    beats = Beats()
    account(builder, NOW_NS - 5_000_000_000)
    looking = source(tmp_path, beats)
    looking.read(1)

    account(builder, NOW_NS - 5_000_000_001)
    samples = looking.read(2)

    assert [each[0].state for each in beats.rounds] == ["training", "silent"]
    assert samples[0] == Sample(2, "training-is-alive", 0.0, 0)


def test_a_rank_that_ended_is_reported_once_more_and_forgotten(tmp_path: Path) -> None:
    builder = rank(tmp_path)
    beats = Beats()
    looking = source(tmp_path, beats)
    looking.read(1)

    builder.write_json("exit.json", {"state": "ended"})
    looking.read(2)
    looking.read(3)

    assert [[beat.state for beat in each] for each in beats.rounds] == [["starting"], ["ended"], []]


def test_a_rank_that_is_gone_without_an_exit_record_is_lost(tmp_path: Path) -> None:
    builder = SpoolBuilder(tmp_path, run_id="run", **this_host() | {"boot_id": bytes(15) + b"x"})
    builder.span(step=5)
    beats = Beats()

    source(tmp_path, beats).read(1)

    assert (beats.rounds[0][0].state, beats.rounds[0][0].step) == ("lost", 5)


def test_the_step_of_a_running_rank_is_at_most_a_few_readings_old(tmp_path: Path) -> None:
    builder = rank(tmp_path)
    beats = Beats()
    looking = source(tmp_path, beats)

    # WHEN: a step ends before each reading, and the process after the last one
    for step in range(4 * STEP_READINGS):
        builder.span(step=step)
        looking.read(1 + step)
    builder.span(step=99)
    builder.write_json("exit.json", {"state": "ended"})
    looking.read(100)

    found = [beat.step for (beat,) in beats.rounds]
    assert all(0 <= now - seen < STEP_READINGS for now, seen in enumerate(found[:-1]))
    assert found[-1] == 99


def test_ranks_of_other_hosts_are_ignored(tmp_path: Path) -> None:
    SpoolBuilder(tmp_path, run_id="run")
    (tmp_path / "run" / "broken").mkdir()
    (tmp_path / "run" / "broken" / PROCESS_FILE).write_bytes(b"not a spool")
    beats = Beats()

    source(tmp_path, beats).read(1)

    assert beats.rounds == [[]]


def test_a_deleted_process_folder_is_forgotten(tmp_path: Path) -> None:
    builder = rank(tmp_path)
    beats = Beats()
    looking = source(tmp_path, beats)
    looking.read(1)

    shutil.rmtree(builder.folder)
    looking.read(2)

    assert [len(each) for each in beats.rounds] == [1, 0]


def test_devices_and_processes_have_their_local_rank(tmp_path: Path) -> None:
    builder = rank(tmp_path, number=3, derived={"device_uuid": "AAAA-11"})
    looking = source(tmp_path, Beats())
    looking.read(1)
    assert looking.local_rank_of_device() == {"aaaa-11": 3}
    assert looking.local_rank_of_process() == {os.getpid(): 3}

    builder.write_json("exit.json", {"state": "ended"})
    looking.read(2)

    assert looking.local_rank_of_device() == {}


def test_the_newest_row_is_found_for_any_number_of_rows(tmp_path: Path) -> None:
    builder = rank(tmp_path)
    assert newest_step(builder.folder) == -1
    for step in range(builder.capacity):
        builder.span(step=step)
        assert newest_step(builder.folder) == step

    builder.new_segment()
    assert newest_step(builder.folder) == builder.capacity - 1


def test_a_truncated_segment_returns_the_rows_that_it_has(tmp_path: Path) -> None:
    builder = rank(tmp_path)
    builder.span(step=6)
    builder.span(step=7)
    os.truncate(builder.segment, 4096 + 128 + 10)

    assert newest_step(builder.folder) == 6


def test_a_missing_spool_has_no_ranks(tmp_path: Path) -> None:
    beats = Beats()
    assert source(tmp_path / "later", beats).read(1) == []


def test_this_hosts_address_is_not_a_loopback() -> None:
    assert not host_address().startswith(("127.", "::1", "fe80"))


def test_a_heartbeats_row_has_printable_texts_and_every_column_of_its_table() -> None:
    table = ROW_TABLES["heartbeats"]
    rows: list[Row] = []

    heartbeat_sink(rows.extend)([replace(BEAT, host="node\x1b7", rdma_received_bytes=None)])

    assert rows == [{**asdict(BEAT), "host": "node\\x1b7", "rdma_received_bytes": None}]
    assert rows[0].keys() == table.identity.keys() | table.others.keys()
