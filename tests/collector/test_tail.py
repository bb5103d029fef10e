from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from analysis.analyze import analyze_run
from analysis.exits import crashes
from collector.errors import StoreError
from collector.places import read_places
from collector.read import (
    may_repeat,
    read_events,
    read_microbatches,
    read_run,
    read_spans,
    read_steps,
)
from collector.store import Store
from collector.tail import SegmentFate, SpoolTail
from rankscope.source import StoreSource
from tests.collector.spool_builder import OFFSET_NS, SpoolBuilder, this_host
from tests.deploy.servers import url_of
from tracer.span import KIND_CODES, NONE, SpanKind
from tracer.spool import DropReason
from tracer.topology import Coords, Layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from tests.collector.conftest import FakeClock


def names_of(store: Store, run_id: str) -> list[str]:
    return [str(name) for name in read_spans(store, run_id)["name"].to_pylist()]


def test_a_span_arrives_with_every_field_on_the_unix_clock(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, rank=1, epoch=3)
    spool.span(
        "all_reduce",
        kind=SpanKind.DP_COMM,
        start_ns=5_000,
        duration_ns=700,
        step=4,
        microbatch=2,
        chunk=1,
        track="comm",
        launch_ns=4_900,
        comm=(0xFEED, 17, NONE, NONE, 4096, 9),
    )
    spool.end()

    SpoolTail(tmp_path, store).poll()

    assert read_spans(store, run_id).to_pylist() == [
        {
            "epoch": 3,
            "step": 4,
            "rank": 1,
            "kind": "dp-comm",
            "name": "all_reduce",
            "track": "comm",
            "start_ns": 5_000 + OFFSET_NS,
            "duration_ns": 700,
            "launch_ns": 4_900 + OFFSET_NS,
            "group_id": 0xFEED,
            "seq": 17,
            "src_rank": -1,
            "dst_rank": -1,
            "microbatch": 2,
            "chunk": 1,
            "num_bytes": 4096,
            "interval_id": 9,
            "flags": 16,
            "depth": 0,
        }
    ]


def test_a_span_that_is_no_communication_says_unknown_in_its_second_half(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span("forward")
    spool.end()

    SpoolTail(tmp_path, store).poll()

    (row,) = read_spans(store, run_id).to_pylist()
    assert (row["group_id"], row["seq"], row["src_rank"], row["dst_rank"]) == (0, -1, -1, -1)
    assert (row["num_bytes"], row["interval_id"], row["launch_ns"]) == (-1, 0, -1)


def test_steps_and_microbatches_arrive(store: Store, run_id: str, tmp_path: Path) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.microbatch(1, step=7, num_tokens=64, sum_squared_lengths=4096)
    spool.step(7, start_ns=100, duration_ns=50, num_tokens=512, loss=2.5)
    spool.end()

    SpoolTail(tmp_path, store).poll()

    steps = StoreSource(store).steps(run_id)
    assert (steps.step.tolist(), steps.num_tokens.tolist(), steps.loss.tolist()) == (
        [7],
        [512],
        [2.5],
    )
    assert (steps.end_ns - steps.start_ns).tolist() == [50]
    (microbatch,) = read_microbatches(store, run_id).to_pylist()
    assert microbatch == {
        "epoch": 0, "step": 7, "rank": 0, "microbatch": 1,
        "num_tokens": 64, "sum_squared_lengths": 4096,
    }  # fmt: skip


def test_a_segment_read_twice_is_stored_once(store: Store, run_id: str, tmp_path: Path) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    for name in ("a", "b", "c"):
        spool.span(name)
    spool.end()

    first = SpoolTail(tmp_path, store).poll()
    again = SpoolTail(tmp_path, store).poll()

    assert (first.num_spans, again.num_spans) == (3, 0)
    assert names_of(store, run_id) == ["a", "b", "c"]
    assert not may_repeat(store, run_id)


def test_a_restarted_tail_goes_on_in_the_middle_of_a_segment(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span("a", start_ns=1)
    spool.span("b", start_ns=2)
    before = SpoolTail(tmp_path, store, monotonic_ns=clock).poll()
    spool.span("c", start_ns=3)
    spool.end()

    after = SpoolTail(tmp_path, store, monotonic_ns=clock).poll()

    # The newest row of a live segment waits for a second look: "b" came with the restart.
    assert (before.num_spans, after.num_spans) == (1, 2)
    assert names_of(store, run_id) == ["a", "b", "c"]


def test_the_newest_row_of_a_live_segment_is_taken_at_the_second_look(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, **this_host())
    spool.span("a")
    tail = SpoolTail(tmp_path, store, monotonic_ns=clock)

    assert tail.poll().num_spans == 0
    clock.advance_s(0.001)
    assert tail.poll().num_spans == 0  # too soon to count as a second look
    clock.advance_s(0.1)
    assert tail.poll().num_spans == 1


class DyingStore(Store):
    """A store whose power is cut once: when the rows are in and the ledger is to say so."""

    def __init__(self, store: Store) -> None:
        super().__init__(url_of(store))
        self._num_notes = 0

    def insert_rows(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        if table == "ledger":
            self._num_notes += 1
            if self._num_notes == 2:
                raise StoreError("power cut")
        super().insert_rows(table, rows)


def test_rows_whose_confirmation_was_lost_show_once_after_a_restart(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span("a")
    spool.span("b", start_ns=5)
    spool.end()
    with DyingStore(store) as dying, pytest.raises(StoreError, match="power cut"):
        SpoolTail(tmp_path, dying).poll()

    SpoolTail(tmp_path, store).poll()

    copies = "SELECT count() AS n FROM spans WHERE run_id = {r:String} SETTINGS final = 0"
    raw = store.rows(copies, {"r": run_id})
    assert raw == [{"n": 4}]  # the engine holds them twice ...
    assert names_of(store, run_id) == ["a", "b"]  # ... and shows them once
    assert read_run(store, run_id).account[0]["num_spans"] == 2


def test_a_sink_that_fails_once_gets_the_same_cut_again_and_loses_no_words(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span("a")
    spool.event("note", "hello", at_ns=5, data={})
    spool.end()
    with DyingStore(store) as dying:
        tail = SpoolTail(tmp_path, dying)

        with pytest.raises(StoreError, match="power cut"):
            tail.poll()
        tail.poll()

    assert names_of(store, run_id) == ["a"]
    assert [event["kind"] for event in read_events(store, run_id)] == ["exit", "note"]
    assert StoreSource(store).run_info(run_id).epochs[0].ranks[0].exit_state == "ended"


def test_a_row_that_was_never_committed_is_waited_for_then_counted_torn(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, **this_host())
    spool.span("a", start_ns=1)
    torn = spool.claim()
    spool.span("c", start_ns=3)
    spool.span("d", start_ns=4)
    tail = SpoolTail(tmp_path, store, monotonic_ns=clock)

    assert tail.poll().num_spans == 1
    clock.advance_s(1.9)
    assert tail.poll().num_spans == 0
    clock.advance_s(0.2)
    progress = tail.poll()

    assert torn == 1
    assert (progress.num_spans, progress.num_torn) == (1, 1)  # "d" waits for its second look
    clock.advance_s(0.1)
    assert tail.poll().num_spans == 1
    assert names_of(store, run_id) == ["a", "c", "d"]
    assert StoreSource(store).run_info(run_id).num_torn == 1


def test_a_row_committed_within_the_grace_time_is_kept(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, **this_host())
    late = spool.claim()
    spool.span("b", start_ns=2)
    tail = SpoolTail(tmp_path, store, monotonic_ns=clock)
    tail.poll()
    spool.span("late", row=late, start_ns=1)
    spool.end()

    progress = tail.poll()

    assert (progress.num_spans, progress.num_torn) == (2, 0)
    assert names_of(store, run_id) == ["late", "b"]


def test_produced_is_stored_plus_torn_plus_dropped(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span("a")
    spool.claim()
    spool.span("negative", duration_ns=-1)
    spool.step(0, start_ns=0, duration_ns=1)
    spool.microbatch(0, step=0, num_tokens=1, sum_squared_lengths=1)
    spool.drop(DropReason.SPOOL_FULL, 3)
    spool.drop(DropReason.BAD_ARGUMENT, 2)
    spool.end()

    SpoolTail(tmp_path, store).poll()

    rows = read_run(store, run_id)
    (account,) = rows.account
    assert account == {
        "epoch": 0, "rank": 0, "num_spans": 1, "num_steps": 1, "num_microbatches": 1,
        "num_torn": 1, "num_bad": 1, "num_doubtful": 0,
    }  # fmt: skip
    assert rows.ranks[0]["dropped"] == {"spool-full": 3, "bad-argument": 2}
    info = StoreSource(store).run_info(run_id)
    # A bad argument loses no record: it was kept under a harmless name.
    assert (info.num_dropped, info.num_torn) == (3, 1)
    assert info.warnings == ("1 records were set aside: ends before it begins",)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"duration_ns": -5}, "ends before it begins"),
        ({"duration_ns": 2**63 - 1}, "lasts more than 30 days"),
        ({"start_ns": -1}, "begins before the clock"),
        ({"start_ns": 2**63 - 1}, "begins beyond the clock's range"),
        ({"kind": 200}, "unknown kind"),
        ({"record_type": 77}, "unknown record type"),
    ],
)
def test_an_impossible_record_is_set_aside_and_its_neighbours_are_kept(
    store: Store, run_id: str, tmp_path: Path, fault: dict[str, Any], reason: str
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span("before")
    spool.span("impossible", **fault)
    spool.span("after", start_ns=9)
    spool.end()

    progress = SpoolTail(tmp_path, store).poll()

    assert progress.num_bad == 1
    assert names_of(store, run_id) == ["before", "after"]
    assert read_run(store, run_id).bad == [{"reason": reason, "num_rows": 1}]


def test_names_from_hell_are_stored_visible_and_short(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    hostile = ["\x1b[31mred\r\n", "\u202edrowssap", "null\0byte", "😀 ünïcödé", "\ud800", "n" * 400]
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    for at, name in enumerate(hostile):
        spool.span(name, start_ns=at)
    spool.end()

    SpoolTail(tmp_path, store).poll()

    assert names_of(store, run_id) == [
        "\\x1b[31mred\\r\\n",
        "\\u202edrowssap",
        "null\\x00byte",
        "😀 ünïcödé",
        "\ufffd\ufffd\ufffd",  # a lone surrogate is no UTF-8
        "n" * 254,  # a slot of the spool holds no more
    ]


def test_a_child_finds_its_parent_in_the_same_cut(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    # A lane writes a span when it ends: the children stand before their parent.
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span("child", start_ns=10, duration_ns=5, depth=1)
    spool.span("parent", start_ns=0, duration_ns=50, depth=0)
    spool.span("orphan", start_ns=60, duration_ns=5, depth=1)
    spool.span("stranger", start_ns=70, duration_ns=5, depth=0)
    spool.end()

    SpoolTail(tmp_path, store).poll()

    found = store.rows(
        "SELECT name, row, parent_row FROM spans WHERE run_id = {r:String} ORDER BY row",
        {"r": run_id},
    )
    assert [(row["name"], row["row"], row["parent_row"]) for row in found] == [
        ("child", 0, 1),
        ("parent", 1, None),
        ("orphan", 2, None),
        ("stranger", 3, None),
    ]


def test_ranks_of_one_host_share_one_clock(store: Store, run_id: str, tmp_path: Path) -> None:
    # The second process read its anchor 7 ns off; on one host that must not show.
    boot_id = os.urandom(16)
    first = SpoolBuilder(tmp_path, run_id=run_id, rank=0, boot_id=boot_id)
    second = SpoolBuilder(
        tmp_path, run_id=run_id, rank=1, boot_id=boot_id, anchor_unix_ns=OFFSET_NS + 1_007
    )
    for spool in (first, second):
        spool.span(start_ns=40)
        spool.end()

    SpoolTail(tmp_path, store).poll()

    assert len(set(read_spans(store, run_id)["start_ns"].to_pylist())) == 1
    assert StoreSource(store).run_info(run_id).clock_error_ns == 0


def test_the_error_between_two_hosts_is_unknown(store: Store, run_id: str, tmp_path: Path) -> None:
    for rank, host in enumerate(("host-a", "host-b")):
        spool = SpoolBuilder(tmp_path, run_id=run_id, rank=rank, host=host)
        spool.span()
        spool.end()

    SpoolTail(tmp_path, store).poll()

    assert StoreSource(store).run_info(run_id).clock_error_ns is None


def test_a_step_that_was_not_sampled_is_left_out_of_the_replay_and_named(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    forward_and_host = 1 << KIND_CODES[SpanKind.FORWARD] | 1 << KIND_CODES[SpanKind.HOST]
    host_alone = 1 << KIND_CODES[SpanKind.HOST]
    for rank in range(2):
        spool = SpoolBuilder(tmp_path, run_id=run_id, rank=rank)
        for step, left_out in enumerate((0, forward_and_host, host_alone)):
            if step != 1:
                spool.span(
                    "f",
                    kind=SpanKind.FORWARD,
                    start_ns=1_000 * (step + 1),
                    duration_ns=500,
                    step=step,
                    microbatch=0,
                    chunk=0,
                )
            spool.step(step, start_ns=1_000 * (step + 1), duration_ns=900, left_out=left_out)
        spool.end()

    SpoolTail(tmp_path, store).poll()

    assert read_steps(store, run_id)["left_out"].to_pylist() == [
        *(0, 0, forward_and_host, forward_and_host, host_alone, host_alone)
    ]
    report = analyze_run(StoreSource(store), run_id)
    assert report.steps == (0, 2)
    (warning,) = [text for text in report.quality.warnings if "by request" in text]
    assert "step 1" in warning
    assert "forward" in warning


def test_the_manifest_becomes_the_run(store: Store, run_id: str, tmp_path: Path) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, rank=1)
    spool.span()
    spool.group(0xABCD, kind="dp-comm", name="dp", members=[1, 0])
    spool.end()

    SpoolTail(tmp_path, store).poll()

    info = StoreSource(store).run_info(run_id)
    assert (info.source_format, info.world_size, info.layout.dp) == ("rankscope", 2, 2)
    assert (info.model, info.flops_per_token, info.flops_convention) == ("tiny", 6e3, "6 N")
    (rank,) = info.epochs[0].ranks
    assert (rank.rank, rank.coords.dp, rank.device_name, rank.dtype) == (1, 1, "cpu", "float32")
    assert rank.peak_flops_per_s == 5e9
    (group,) = info.epochs[0].groups
    assert (group.group_id, group.kind, group.members) == (0xABCD, "dp-comm", (0, 1))


def test_ranks_of_a_known_layout_that_tell_no_position_stand_nowhere_not_at_0(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    layout = {"dp": 2, "tp": 1, "pp": 2, "cp": 1, "ep": 1, "dsp": 1, "vpp": 1}
    for rank, coords in enumerate(({"dp": 0, "pp": 1}, None)):
        spool = SpoolBuilder(
            tmp_path, run_id=run_id, rank=rank, manifest={"layout": layout, "coords": coords}
        )
        spool.span()
        spool.end()

    SpoolTail(tmp_path, store).poll()

    rows = read_run(store, run_id).ranks
    places = [[row[axis] for axis in ("dp", "pp", "tp", "cp", "ep")] for row in rows]
    assert places == [[0, 1, 0, 0, 0], [-1, -1, 0, 0, 0]]
    info = StoreSource(store).run_info(run_id)
    assert (info.layout, info.world_size) == (Layout(), 2)
    assert [rank.coords for rank in info.epochs[0].ranks] == [Coords(), Coords()]
    (warning,) = info.warnings
    assert "not where its ranks stand in it (coords)" in warning
    assert [place.rank for place in read_places(store, run_id, 0)] == [0]


def test_the_pace_is_that_of_the_worst_rank(store: Store, run_id: str, tmp_path: Path) -> None:
    for rank, num_overruns in enumerate((1, 8)):
        spool = SpoolBuilder(tmp_path, run_id=run_id, rank=rank)
        spool.write_json("manifest.json", {"paced": {"pace_ms": 10}})
        for at_ns, num_segments in ((5, 50), (9, 100)):
            data = {"num_segments": num_segments, "num_overruns": num_overruns, "pace_ms": 10}
            spool.event("pace", "", at_ns=at_ns, data=data)
        spool.end()

    SpoolTail(tmp_path, store).poll()

    info = StoreSource(store).run_info(run_id)
    assert info.paced
    assert info.pace_overrun_ratio == pytest.approx(8 / 100)


def test_an_exception_becomes_an_event_and_the_runs_state(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, **this_host() | {"pid": 2**22 + 1})
    spool.span("last")
    spool.fail("ValueError", "bad shape", at_ns=77)

    SpoolTail(tmp_path, store).poll()

    (event,) = read_events(store, run_id)
    assert (event["kind"], event["text"], event["at_ns"]) == ("exit", "ValueError: bad shape", 77)
    assert json.loads(event["data"])["exception"]["traceback"] == "Traceback ..."
    assert names_of(store, run_id) == ["last"]
    summary = {run.run_id: run for run in StoreSource(store).runs()}[run_id]
    assert (summary.state, summary.num_spans) == ("failed", 1)


def test_a_process_that_recorded_an_exception_and_still_runs_is_not_over(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, **this_host())
    spool.span("a")
    spool.fail("ValueError", "x")
    tail = SpoolTail(tmp_path, store, monotonic_ns=clock)
    tail.poll()
    spool.span("written by an exit handler", start_ns=5)
    clock.advance_s(1)

    assert tail.poll().num_running == 1
    assert names_of(store, run_id) == ["a"]


KILLED = """
import sys
from pathlib import Path
from tests.collector.spool_builder import SpoolBuilder, this_host
spool = SpoolBuilder(Path(sys.argv[1]), run_id=sys.argv[2], capacity=4096, **this_host())
for step in range(1000):
    spool.span("forward", start_ns=10 * step, step=step)
spool.open_span(0, "all_reduce", start_ns=10_000, step=1000)
spool.span("half written", commit=False)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.multiproc
def test_what_a_killed_process_had_committed_is_all_stored(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), run_id]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        tail = SpoolTail(tmp_path, store)
        assert tail.poll().num_running == 1
        process.send_signal(signal.SIGKILL)
        process.wait()

    progress = tail.poll()

    assert progress.num_running == 0
    assert read_spans(store, run_id)["step"].to_pylist() == list(range(1000))
    info = StoreSource(store).run_info(run_id)
    assert (info.num_torn, info.epochs[0].ranks[0].exit_state) == (1, "lost")
    (event,) = read_events(store, run_id)
    assert (event["kind"], event["text"]) == ("lost", "lost at step 1000, open span = all_reduce")


TERMINATED = """
import signal, sys
import tracer
before = signal.getsignal(signal.SIGTERM)
tracer.install(count_steps=False)
assert signal.getsignal(signal.SIGTERM) is before is signal.SIG_DFL
tracer.begin_steps()
for _ in range(3):
    with tracer.span("work"):
        pass
    tracer.step()
with tracer.span("exchange", microbatch=0):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.multiproc
def test_a_rank_that_its_launcher_terminates_is_lost_at_its_step_by_the_next_look(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    environ = {**os.environ, "RANKSCOPE_TRACE": str(tmp_path), "RANKSCOPE_RUN": run_id}
    command = [sys.executable, "-c", TERMINATED]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, env=environ
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        tail = SpoolTail(tmp_path, store)
        assert tail.poll().num_running == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM

    assert tail.poll().num_running == 0

    source = StoreSource(store)
    info = source.run_info(run_id)
    assert info.epochs[0].ranks[0].exit_state == "lost"
    assert names_of(store, run_id) == ["work", "work", "work"]
    (event,) = [event for event in read_events(store, run_id) if event["kind"] == "lost"]
    assert event["text"] == "lost at step 3, open span = exchange"
    (crash,) = crashes(info, source.context(run_id))
    assert crash.ranks == (0,)
    assert "gone without goodbye (ended by a signal" in crash.evidence


def test_a_spool_of_a_future_version_is_named_and_left_alone_and_others_go_on(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    future = SpoolBuilder(tmp_path, run_id=run_id, rank=1, version=99)
    future.span("unreadable")
    future.end()
    before = {path: path.read_bytes() for path in future.folder.iterdir()}
    spool = SpoolBuilder(tmp_path, run_id=run_id, rank=0)
    spool.span("fine")
    spool.end()
    tail = SpoolTail(tmp_path, store, segment_fate=SegmentFate.FREE)

    (problem,) = tail.poll().problems
    assert "spool version 99" in problem
    assert "upgrade" in problem
    assert tail.poll().problems == ()
    assert names_of(store, run_id) == ["fine"]
    assert {path: path.read_bytes() for path in future.folder.iterdir()} == before


def test_what_the_tracer_finds_out_later_fills_what_the_job_left_open(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    manifest: dict[str, Any] = {"model": {"name": "tiny"}, "device": {"name": "", "dtype": "fp32"}}
    spool = SpoolBuilder(tmp_path, run_id=run_id, manifest=manifest)
    tail = SpoolTail(tmp_path, store)
    tail.poll()
    before = StoreSource(store).run_info(run_id)
    derived = {"flops_per_token": 7.0, "flops_convention": "6 N", "device_name": "H", "dtype": "b"}
    spool.write_json("manifest.json", {**manifest, "derived": derived})
    tail.poll()
    after = StoreSource(store).run_info(run_id)

    assert (before.flops_per_token, before.epochs[0].ranks[0].device_name) == (None, "")
    assert (after.flops_per_token, after.flops_convention) == (7.0, "6 N")
    (rank,) = after.epochs[0].ranks
    assert (rank.device_name, rank.dtype) == ("H", "fp32")


@pytest.mark.parametrize("content", [b"not json", b"[1, 2]", b"{" * 100_000])
def test_a_broken_manifest_is_named_and_left_alone(
    store: Store, run_id: str, tmp_path: Path, content: bytes
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span()
    (spool.folder / "manifest.json").write_bytes(content)

    (problem,) = SpoolTail(tmp_path, store).poll().problems

    assert "manifest.json" in problem


def test_a_manifest_of_strange_types_is_unknown_not_an_error(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    strange = {"layout": 5, "model": "big", "device": [], "coords": {"dp": "x"}, "paced": 1}
    spool = SpoolBuilder(tmp_path, run_id=run_id, manifest=strange)
    spool.span()
    spool.end()

    SpoolTail(tmp_path, store).poll()

    info = StoreSource(store).run_info(run_id)
    assert (info.model, info.flops_per_token, info.paced) == ("", None, False)
    assert info.warnings == ("the job did not tell its parallel layout",)


def test_numbers_that_no_column_can_hold_stop_nothing(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    huge = {"local_rank": 2**40, "layout": {"dp": 2**40}, "started_ns": 2**70, "pid": -(2**80)}
    spool = SpoolBuilder(tmp_path, run_id=run_id, manifest=huge)
    spool.group(2**64 - 1, kind="dp-comm", name="g", members=[2**40])
    spool.append_line("groups.jsonl", '{"group_id": 5, "members": "none"}')
    spool.event("note", "x", at_ns=2**70, data={})
    spool.span()
    spool.end()
    absurd = SpoolBuilder(tmp_path, run_id=run_id, rank=2**31)

    progress = SpoolTail(tmp_path, store).poll()

    assert (progress.num_spans, len(progress.problems)) == (1, 1)
    assert str(absurd.folder) in progress.problems[0]
    assert StoreSource(store).run_info(run_id).epochs[0].groups == ()


def test_an_exit_record_that_is_no_json_counts_as_a_failure(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span()
    (spool.folder / "exit.json").write_text("{")
    tail = SpoolTail(tmp_path, store, monotonic_ns=clock)

    (problem,) = tail.poll().problems
    clock.advance_s(3)  # of another host, so nobody can see whether it still runs
    progress = tail.poll()

    assert "exit.json" in problem
    assert progress.num_running == 0
    assert StoreSource(store).run_info(run_id).epochs[0].ranks[0].exit_state == "failed"


def test_a_folder_taken_away_under_the_tail_is_named_and_others_go_on(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    gone = SpoolBuilder(tmp_path, run_id=run_id, rank=0, **this_host())
    stays = SpoolBuilder(tmp_path, run_id=run_id, rank=1, **this_host())
    tail = SpoolTail(tmp_path, store, monotonic_ns=clock)
    tail.poll()
    shutil.rmtree(gone.folder)
    stays.span("still here")
    stays.end()

    progress = tail.poll()

    assert [str(gone.folder) in problem for problem in progress.problems] == [True]
    assert names_of(store, run_id) == ["still here"]
    ranks = StoreSource(store).run_info(run_id).epochs[0].ranks
    assert [rank.exit_state for rank in ranks] == ["lost", "ended"]


def test_a_half_written_line_waits_for_its_end(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, **this_host())
    spool.append_line("events.jsonl", "this is no JSON")
    spool.append_line("events.jsonl", '{"at_ns": 1, "kind": "note", ', end="")
    tail = SpoolTail(tmp_path, store, monotonic_ns=clock)
    tail.poll()
    assert read_events(store, run_id) == []

    spool.append_line("events.jsonl", '"text": "whole", "data": {}}')
    tail.poll()

    assert [event["text"] for event in read_events(store, run_id)] == ["whole"]


def test_two_processes_of_one_rank_and_epoch_do_not_hide_each_other(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    for name in ("first life", "second life"):
        spool = SpoolBuilder(tmp_path, run_id=run_id)
        spool.span(name)
        spool.end()

    SpoolTail(tmp_path, store).poll()

    assert sorted(names_of(store, run_id)) == ["first life", "second life"]


def test_finished_segments_are_freed_once_stored_and_live_ones_are_kept(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, capacity=2, **this_host())
    spool.span("a")
    spool.span("b", start_ns=1)
    spool.seal()
    finished = spool.segment
    spool.new_segment()
    spool.span("c", start_ns=2)
    tail = SpoolTail(tmp_path, store, segment_fate=SegmentFate.FREE, monotonic_ns=clock)

    tail.poll()
    tail.poll()  # finds that nothing of it is left to store

    assert not finished.exists()
    assert spool.segment.exists()
    assert names_of(store, run_id) == ["a", "b"]


@pytest.mark.parametrize("ended", [False, True])
def test_while_a_process_runs_its_room_is_freed_and_then_its_remains_are_kept(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock, *, ended: bool
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, capacity=1, **this_host())
    spool.span("a")
    spool.seal()
    finished = spool.segment
    spool.new_segment()
    if ended:
        spool.end()
    tail = SpoolTail(
        tmp_path, store, segment_fate=SegmentFate.FREE_WHILE_RUNNING, monotonic_ns=clock
    )

    tail.poll()
    tail.poll()

    assert finished.exists() == ended
    assert names_of(store, run_id) == ["a"]


def test_a_finished_segment_with_an_open_span_is_kept_for_it(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, capacity=1, **this_host())
    spool.open_span(0, "step", start_ns=5, step=0)
    spool.span("a")
    spool.seal()

    SpoolTail(tmp_path, store, segment_fate=SegmentFate.FREE, monotonic_ns=clock).poll()

    assert names_of(store, run_id) == ["a"]
    assert spool.segment.exists()


def test_a_long_segment_is_read_to_its_end_in_one_poll(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    # Longer than the first look (512 rows), with a torn row in its middle.
    spool = SpoolBuilder(tmp_path, run_id=run_id, capacity=3_000)
    for row in range(3_000):
        spool.claim() if row == 600 else spool.span(start_ns=row, step=row)
    spool.end()

    progress = SpoolTail(tmp_path, store).poll()

    assert (progress.num_spans, progress.num_torn) == (2_999, 1)
    assert read_spans(store, run_id)["step"].to_pylist() == [
        step for step in range(3_000) if step != 600
    ]


def test_a_spool_folder_that_is_not_there_yet_is_no_error(store: Store, tmp_path: Path) -> None:
    progress = SpoolTail(tmp_path / "later", store).poll()

    assert (progress.num_processes, progress.problems) == (0, ())
