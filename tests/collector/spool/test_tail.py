from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.collector.read.runs import read_run
from rankscope.collector.read.spans import read_spans
from rankscope.collector.read.steps import read_steps
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.span import KIND_CODES, SpanKind
from tests.support.collector.spool_builder import OFFSET_NS, SpoolBuilder
from tests.support.collector.stored import names_of

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.store.store import Store


def test_a_span_without_communication_has_unknown_communication_fields(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span("forward")
    spool.end()

    SpoolTail(tmp_path, StoreWriter(store)).poll()

    (row,) = read_spans(store, run_id).to_pylist()
    assert (row["group_id"], row["seq"], row["src_rank"], row["dst_rank"]) == (0, -1, -1, -1)
    assert (row["num_bytes"], row["interval_id"], row["launch_ns"]) == (-1, 0, -1)


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
def test_an_impossible_record_goes_to_bad_rows_and_its_neighbours_are_stored(
    store: Store, run_id: str, tmp_path: Path, fault: dict[str, Any], reason: str
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span("before")
    spool.span("impossible", **fault)
    spool.span("after", start_ns=9)
    spool.end()

    progress = SpoolTail(tmp_path, StoreWriter(store)).poll()

    assert progress.num_bad == 1
    assert names_of(store, run_id) == ["before", "after"]
    assert read_run(store, run_id).bad == [{"reason": reason, "num_rows": 1}]


def test_hostile_names_are_stored_escaped_and_short(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    hostile = ["\x1b[31mred\r\n", "\u202edrowssap", "null\0byte", "😀 ünïcödé", "\ud800", "n" * 400]
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    for at, name in enumerate(hostile):
        spool.span(name, start_ns=at)
    spool.end()

    SpoolTail(tmp_path, StoreWriter(store)).poll()

    assert names_of(store, run_id) == [
        "\\x1b[31mred\\r\\n",
        "\\u202edrowssap",
        "null\\x00byte",
        "😀 ünïcödé",
        "\ufffd\ufffd\ufffd",  # a lone surrogate is no UTF-8
        "n" * 254,  # a slot of the spool holds no more
    ]


def test_a_child_has_the_row_of_its_parent_in_the_same_cut(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    # A lane writes a span when it ends: children come before their parent.
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span("child", start_ns=10, duration_ns=5, depth=1)
    spool.span("parent", start_ns=0, duration_ns=50, depth=0)
    spool.span("orphan", start_ns=60, duration_ns=5, depth=1)
    spool.span("unrelated", start_ns=70, duration_ns=5, depth=0)
    spool.end()

    SpoolTail(tmp_path, StoreWriter(store)).poll()

    found = store.rows(
        "SELECT name, row, parent_row FROM spans WHERE run_id = {r:String} ORDER BY row",
        {"r": run_id},
    )
    assert [(row["name"], row["row"], row["parent_row"]) for row in found] == [
        ("child", 0, 1),
        ("parent", 1, None),
        ("orphan", 2, None),
        ("unrelated", 3, None),
    ]


def test_ranks_that_are_decoded_together_keep_their_names_and_parents(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    first, second = (SpoolBuilder(tmp_path, run_id=run_id, rank=rank) for rank in (0, 1))
    first.span("of the first", start_ns=10, duration_ns=5, depth=1)
    second.span("of the second", start_ns=0, duration_ns=50, depth=0)
    for spool in (first, second):
        spool.end()

    SpoolTail(tmp_path, StoreWriter(store)).poll()

    found = store.rows(
        "SELECT rank, name, parent_row FROM spans WHERE run_id = {r:String} ORDER BY rank",
        {"r": run_id},
    )
    assert [(row["rank"], row["name"], row["parent_row"]) for row in found] == [
        (0, "of the first", None),
        (1, "of the second", None),
    ]


def test_ranks_of_one_host_share_one_clock(store: Store, run_id: str, tmp_path: Path) -> None:
    # The anchor of the second process is off by 7 ns. On one host that must not show.
    boot_id = os.urandom(16)
    first = SpoolBuilder(tmp_path, run_id=run_id, rank=0, boot_id=boot_id)
    second = SpoolBuilder(
        tmp_path, run_id=run_id, rank=1, boot_id=boot_id, anchor_unix_ns=OFFSET_NS + 1_007
    )
    for spool in (first, second):
        spool.span(start_ns=40)
        spool.end()

    SpoolTail(tmp_path, StoreWriter(store)).poll()

    assert len(set(read_spans(store, run_id)["start_ns"].to_pylist())) == 1
    assert StoreSource(store).run_info(run_id).clock_error_ns == 0


def test_the_error_between_two_hosts_is_unknown(store: Store, run_id: str, tmp_path: Path) -> None:
    for rank, host in enumerate(("host-a", "host-b")):
        spool = SpoolBuilder(tmp_path, run_id=run_id, rank=rank, host=host)
        spool.span()
        spool.end()

    SpoolTail(tmp_path, StoreWriter(store)).poll()

    assert StoreSource(store).run_info(run_id).clock_error_ns is None


def test_a_step_that_was_not_sampled_is_left_out_of_the_replay_with_a_warning(
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

    SpoolTail(tmp_path, StoreWriter(store)).poll()

    assert read_steps(store, run_id)["left_out"].to_pylist() == [
        *(0, 0, forward_and_host, forward_and_host, host_alone, host_alone)
    ]
    report = analyze_run(StoreSource(store), run_id)
    assert report.steps == (0, 2)
    (warning,) = [text for text in report.quality.warnings if "not recorded" in text]
    assert "step 1" in warning
    assert "forward" in warning


def test_a_spool_folder_that_does_not_exist_yet_is_no_error(store: Store, tmp_path: Path) -> None:
    progress = SpoolTail(tmp_path / "later", StoreWriter(store)).poll()

    assert (progress.num_processes, progress.problems) == (0, ())
