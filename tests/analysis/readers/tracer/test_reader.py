from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.arrays.grouping import NO_GROUP
from rankscope.analysis.readers.tracer.reader import read_traced
from rankscope.analysis.replay.model import Place
from rankscope.analysis.replay.replayer import Replayer
from rankscope.analysis.trace.rows import concatenate
from rankscope.analysis.trace.tables import (
    EpochInfo,
    GroupInfo,
    RankInfo,
    RunInfo,
    SpanTable,
    StepTable,
)
from rankscope.tracer.span import KIND_CODES, NONE, Span, SpanFlag, SpanKind, UnixNs
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.cluster import Source
from tests.support.analysis.tables import table_of
from tests.support.dashboard.builders import span_table

PAIR = 9
P2P = {SpanKind.PP_SEND, SpanKind.PP_RECV}

Row = tuple[int, SpanKind, int, int, bool, int]
"""(rank, kind, start, end, whether it is communication of the pair, flags)."""


def spans_of(rows: list[Row], *, epoch: int = 0, step: int = 0) -> SpanTable:
    spans = [
        Span(
            rank=rank,
            step=step,
            kind=kind,
            name=kind.value,
            start_ns=UnixNs(start),
            duration_ns=end - start,
            group_id=PAIR if is_pair else 0,
            seq=0 if is_pair else NONE,
            src_rank=0 if kind in P2P else NONE,
            dst_rank=1 if kind in P2P else NONE,
            microbatch=0,
            chunk=0,
            flags=SpanFlag(flags),
        )
        for rank, kind, start, end, is_pair, flags in rows
    ]
    return span_table(spans, epoch=epoch)


def steps_of(*rows: tuple[int, int, int, int, int]) -> StepTable:
    """Return steps, given (epoch, step, rank, start, end)."""
    epoch, step, rank, start, end = np.array(rows, np.int64).T
    return table_of(StepTable, epoch=epoch, step=step, rank=rank, start_ns=start, end_ns=end)


TWO_STAGES = RunInfo(
    run_id="two",
    source_format="rankscope",
    layout=Layout(pp=2),
    world_size=2,
    clock_error_ns=0,
    epochs=(
        EpochInfo(
            epoch=0,
            ranks=tuple(RankInfo(rank=r, coords=Coords(pp=r)) for r in range(2)),
            groups=(GroupInfo(group_id=PAIR, kind="other", name="pp", members=(0, 1)),),
        ),
    ),
)


def test_send_that_ended_before_its_receive_began_does_not_wait() -> None:
    rows: list[Row] = [
        (0, SpanKind.FORWARD, 0, 10, False, 0),
        (0, SpanKind.PP_SEND, 10, 12, True, SpanFlag.ASYNC),
        (1, SpanKind.PP_RECV, 20, 25, True, 0),
        (1, SpanKind.FORWARD, 25, 45, False, 0),
    ]
    reading = read_traced(TWO_STAGES, spans_of(rows), steps_of((0, 0, 0, 0, 45), (0, 0, 1, 0, 45)))

    operations = reading.model.operations
    kinds = [reading.model.kinds[kind] for kind in reading.model.kind]
    send, receive = kinds.index("pp-send"), kinds.index("pp-recv")
    assert operations.group[send] == NO_GROUP
    assert operations.duration_ns[[send, receive]].tolist() == [2, 5]
    assert (send, receive) in zip(operations.src, operations.dst, strict=True)
    assert Replayer(reading.model).full_recorded().tolist() == [45]
    assert len(reading.waits.rank) == 0


def test_receive_waits_for_a_later_send() -> None:
    rows: list[Row] = [
        (0, SpanKind.FORWARD, 0, 30, False, 0),
        (0, SpanKind.PP_SEND, 30, 34, True, 0),
        (1, SpanKind.PP_RECV, 5, 33, True, 0),
        (1, SpanKind.FORWARD, 33, 50, False, 0),
    ]
    reading = read_traced(TWO_STAGES, spans_of(rows), steps_of((0, 0, 0, 0, 34), (0, 0, 1, 0, 50)))

    waits = reading.waits
    assert (waits.rank.tolist(), waits.start_ns.tolist(), waits.end_ns.tolist()) == ([1], [5], [30])
    assert Replayer(reading.model).full_recorded().tolist() == [50]


def test_step_in_which_a_rank_left_before_the_other_entered_is_left_out() -> None:
    rows: list[Row] = [
        (0, SpanKind.PP_SEND, 30, 34, True, 0),
        (1, SpanKind.PP_RECV, 5, 20, True, 0),
    ]
    steps = steps_of((0, 0, 0, 0, 34), (0, 0, 1, 0, 50))

    reading = read_traced(replace(TWO_STAGES, clock_error_ns=9), spans_of(rows), steps)
    tolerated = read_traced(replace(TWO_STAGES, clock_error_ns=10), spans_of(rows), steps)

    assert reading.left_out == {0: "a rank left a communication before the last one entered it"}
    assert tolerated.left_out == {}


def test_steps_of_an_undescribed_rank_are_left_out() -> None:
    rows: list[Row] = [
        (0, SpanKind.FORWARD, 0, 30, False, 0),
        (1, SpanKind.FORWARD, 0, 22, False, 0),
    ]
    steps = steps_of((0, 0, 0, 0, 30), (0, 0, 1, 0, 22))
    (epoch,) = TWO_STAGES.epochs
    one = replace(TWO_STAGES, epochs=(replace(epoch, ranks=epoch.ranks[:1]),))
    none = replace(TWO_STAGES, epochs=(replace(epoch, ranks=()),))

    reading = read_traced(one, spans_of(rows), steps)
    neither = read_traced(none, spans_of(rows), steps)

    assert reading.left_out == {0: "no description of rank 1 was received"}
    assert neither.left_out == {0: "no description of ranks 0 and 1 was received"}


def test_ranks_that_record_no_step_are_named_with_what_to_do() -> None:
    # GIVEN a job whose second rank generates, and has no optimizer that would count its steps
    rows: list[Row] = [(0, SpanKind.FORWARD, 0, 30, False, 0)]
    first, *later = (spans_of(rows, step=step) for step in range(3))
    spans = reduce(concatenate, later, first)
    steps = steps_of(*((0, step, 0, 40 * step, 40 * step + 30) for step in range(3)))

    reading = read_traced(TWO_STAGES, spans, steps)

    reason = (
        "1 of 2 ranks have no record of it (rank 1 recorded none: a rank without an optimizer marks"
        " its steps with `tracer.step`)"
    )
    assert reading.left_out == dict.fromkeys(range(3), reason)


@pytest.mark.parametrize(
    "kind", [SpanKind.GC, SpanKind.DATA, SpanKind.CHECKPOINT, SpanKind.HOST, SpanKind.OTHER]
)
def test_host_time_inside_a_forward_is_not_the_ranks_compute(kind: SpanKind) -> None:
    rows: list[Row] = [
        (0, SpanKind.FORWARD, 0, 30, False, 0),
        (0, kind, 10, 18, False, 0),
        (1, SpanKind.FORWARD, 0, 22, False, 0),
    ]
    reading = read_traced(TWO_STAGES, spans_of(rows), steps_of((0, 0, 0, 0, 30), (0, 0, 1, 0, 22)))

    assert reading.items.self_ns.tolist() == [22, 22]


def test_the_innermost_of_two_spans_of_the_job_names_what_it_takes() -> None:
    # GIVEN a span of 2 ns in a span of 8 ns of the job's own in a forward, both in one around all
    rows: list[Row] = [
        (0, SpanKind.HOST, 0, 40, False, 0),
        (0, SpanKind.FORWARD, 5, 35, False, 0),
        (0, SpanKind.HOST, 10, 18, False, 0),
        (0, SpanKind.OTHER, 12, 14, False, 0),
        (1, SpanKind.FORWARD, 5, 27, False, 0),
    ]
    reading = read_traced(TWO_STAGES, spans_of(rows), steps_of((0, 0, 0, 0, 40), (0, 0, 1, 0, 40)))

    # What encloses the forward takes none of it
    assert reading.items.self_ns.tolist() == [22, 22]
    gaps = reading.gaps
    assert gaps.name is not None
    mine = (gaps.rank == 0) & (gaps.place == Place.SPAN)
    names = [gaps.names[code] for code in gaps.name[mine].tolist()]
    assert list(zip(names, gaps.gap_ns[mine].tolist(), strict=True)) == [
        ("host", 5),
        ("host", 2),
        ("other", 2),
        ("host", 4),
        ("host", 5),
    ]


@pytest.mark.parametrize(("name", "compute_ns"), [("recompile", 22), ("retrieval", 30)])
def test_only_a_compilation_interrupts_what_a_device_computes(name: str, compute_ns: int) -> None:
    device = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN
    rows: list[Row] = [
        (0, SpanKind.FORWARD, 0, 30, False, device),
        (0, SpanKind.HOST, 10, 18, False, 0),
        (1, SpanKind.FORWARD, 0, 22, False, device),
    ]
    spans = spans_of(rows)
    spans = replace(spans, names=tuple(name if each == "host" else each for each in spans.names))

    reading = read_traced(TWO_STAGES, spans, steps_of((0, 0, 0, 0, 30), (0, 0, 1, 0, 22)))

    assert reading.items.self_ns.tolist() == [compute_ns, 22]


def test_step_that_ends_before_it_begins_is_empty_and_left_out() -> None:
    # On the device step 1 came first, then step 0, whose waits were not recorded.
    device = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN
    early, late = ((100 * k, 100 * k + 90) for k in (0, 10))
    first, second = (
        spans_of([(rank, SpanKind.FORWARD, *at, False, device) for rank in (0, 1)], step=step)
        for step, at in ((0, late), (1, early))
    )
    steps = steps_of((0, 0, 0, 0, 50), (0, 0, 1, 0, 50), (0, 1, 0, 50, 99), (0, 1, 1, 50, 99))
    left_out = np.array([1 << KIND_CODES[SpanKind.WAIT], 0, 0, 0], np.uint32)

    report = analyze_run(
        Source(TWO_STAGES, concatenate(first, second), replace(steps, left_out=left_out)), "two"
    )

    (finding,) = report.findings
    assert finding.cause == "insufficient-evidence"
    assert "its spans are in other steps" in finding.evidence


def test_step_without_a_needed_kind_of_one_rank_is_unknown_not_empty() -> None:
    rows: list[Row] = [
        (0, SpanKind.FORWARD, 0, 30, False, 0),
        (1, SpanKind.FORWARD, 0, 30, False, 0),
    ]
    backward, host, other = (
        np.uint32(1 << KIND_CODES[kind])
        for kind in (SpanKind.BACKWARD, SpanKind.HOST, SpanKind.OTHER)
    )
    steps = steps_of((0, 0, 0, 0, 34), (0, 0, 1, 0, 50))

    def left_out(run: RunInfo, *masks: np.uint32) -> dict[int, str]:
        declared = replace(steps, left_out=np.array(masks, np.uint32))
        return read_traced(run, spans_of(rows), declared).left_out

    alone = replace(TWO_STAGES, epochs=(replace(TWO_STAGES.epochs[0], groups=()),))
    reason = "spans were not recorded: "
    assert left_out(alone, np.uint32(0), backward | host) == {0: f"{reason}backward"}
    assert left_out(alone, host, host | other) == {}
    # With a group of kind "other", spans of that kind are collectives.
    assert left_out(TWO_STAGES, np.uint32(0), other) == {0: f"{reason}other"}


def test_last_execution_of_a_repeated_step_is_used() -> None:
    first = spans_of([(r, SpanKind.FORWARD, 0, 10, False, 0) for r in range(2)])
    again = spans_of([(r, SpanKind.FORWARD, 100, 130, False, 0) for r in range(2)], epoch=1)
    steps = steps_of((0, 0, 0, 0, 10), (0, 0, 1, 0, 10), (1, 0, 0, 100, 130), (1, 0, 1, 100, 130))

    reading = read_traced(TWO_STAGES, concatenate(first, again), steps)

    assert reading.items.self_ns.tolist() == [30, 30]
    assert reading.warnings == ("1 step repeated in a later epoch; the last epoch counts",)


def test_member_may_leave_a_broadcast_before_another_enters() -> None:
    # Rank 0, the root, has sent and left before rank 1 enters.
    rows: list[Row] = [
        (0, SpanKind.DP_COMM, 10, 12, True, 0),
        (1, SpanKind.DP_COMM, 20, 25, True, 0),
        (1, SpanKind.FORWARD, 25, 45, False, 0),
    ]
    spans = spans_of(rows)
    broadcast = replace(spans, names=("broadcast",) * len(spans.names))
    steps = steps_of((0, 0, 0, 0, 30), (0, 0, 1, 0, 45))

    reading = read_traced(TWO_STAGES, broadcast, steps)
    all_reduce = read_traced(TWO_STAGES, spans, steps)

    assert reading.left_out == {}
    assert Replayer(reading.model).full_recorded().tolist() == [45]
    assert all_reduce.left_out == {0: "a rank left a communication before the last one entered it"}
