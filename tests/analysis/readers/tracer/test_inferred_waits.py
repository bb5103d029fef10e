"""Waits without a record, distinguished from hosts that stalled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.readers.tracer.matched_waits import match_waits
from rankscope.analysis.readers.waits import split_waits
from rankscope.analysis.trace.tables import GroupInfo, SpanTable, StepTable
from rankscope.tracer.span import NONE, Span, SpanFlag, SpanKind, UnixNs
from tests.support.analysis.tables import table_of
from tests.support.dashboard.builders import span_table

if TYPE_CHECKING:
    from collections.abc import Callable

MS = 1_000_000
GROUP, STEP_MS = 7, 100
ON_DEVICE = int(SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN)

Row = tuple[int, int, SpanKind, float, float, int]
"""(rank, step, kind, start and end in the step in ms, seq); seq is -1 if it is no communication."""


def waits_ms(
    *rows: Row, num_ranks: int = 2, num_steps: int = 3, flags: int = int(SpanFlag.HOST_CLOCK)
) -> list[tuple[int, int, float, float, int]]:
    """Return (rank, step, start, end in the step, seq) of each wait that was found."""
    spans, steps = tables(rows, num_ranks, num_steps, flags)
    group = GroupInfo(group_id=GROUP, kind="dp-comm", name="dp", members=tuple(range(num_ranks)))
    split = split_waits(spans, [group], clock_error_ns=0)
    matched, _ = match_waits(spans, steps, np.arange(num_steps, dtype=np.int32), split)
    found = []
    for start, end, comm in zip(
        matched.line.time_at(matched.wait_start).tolist(),
        matched.line.time_at(matched.wait_end).tolist(),
        matched.comm[matched.wait_comm].tolist(),
        strict=True,
    ):
        step = int(spans.step[comm])
        begin = step * STEP_MS
        found.append(
            (int(spans.rank[comm]), step, start / MS - begin, end / MS - begin,
             int(spans.seq[comm]))
        )  # fmt: skip
    return sorted(found)


def tables(
    rows: tuple[Row, ...], num_ranks: int, num_steps: int, flags: int
) -> tuple[SpanTable, StepTable]:
    spans = span_table(
        [
            Span(
                rank=rank,
                step=step,
                kind=kind,
                name="",
                track="compute" if seq == NONE else "comm",
                start_ns=UnixNs(round((start + STEP_MS * step) * MS)),
                duration_ns=round((end - start) * MS),
                group_id=0 if seq == NONE else GROUP,
                seq=seq,
                flags=SpanFlag(flags if seq == NONE else flags | SpanFlag.ASYNC),
            )
            for rank, step, kind, start, end, seq in rows
        ]
    )
    step_of_row, rank_of_row = (each.ravel() for each in np.mgrid[:num_steps, :num_ranks])
    steps = table_of(
        StepTable,
        step=step_of_row,
        rank=rank_of_row,
        start_ns=step_of_row * STEP_MS * MS,
        end_ns=(step_of_row + 1) * STEP_MS * MS,
    )
    return spans, steps


def step_of(
    rank: int, step: int, *, ends: float, resumes: float, computed: float = 40
) -> list[Row]:
    """Return a backward, its reduction and the optimizer."""
    return [
        (rank, step, SpanKind.BACKWARD, 0, computed, NONE),
        (rank, step, SpanKind.DP_COMM, 30, ends, step),
        (rank, step, SpanKind.OPTIMIZER, resumes, resumes + 5, NONE),
    ]


def rows_of(num_steps: int, resumes: Callable[[int, int], float]) -> list[Row]:
    """Return steps of two ranks whose reduction ends at 50 ms, given rank and step."""
    return [
        row
        for rank in (0, 1)
        for step in range(num_steps)
        for row in step_of(rank, step, ends=50, resumes=resumes(rank, step))
    ]


@pytest.mark.parametrize("flags", [int(SpanFlag.HOST_CLOCK), ON_DEVICE])
def test_rank_that_resumes_with_the_end_of_a_communication_waited_for_it(flags: int) -> None:
    # GIVEN two ranks whose optimizer begins 0.03 ms after their reduction ends, in three steps,
    # at 50, 60 and 70 ms
    rows = [
        row
        for rank in (0, 1)
        for step, ends in enumerate((50, 60, 70))
        for row in step_of(rank, step, ends=ends, resumes=ends + 0.03)
    ]

    # THEN both waited from the end of their backward
    assert waits_ms(*rows, flags=flags) == [
        (0, 0, 40.0, 50.0, 0),
        (0, 1, 40.0, 60.0, 1),
        (0, 2, 40.0, 70.0, 2),
        (1, 0, 40.0, 50.0, 0),
        (1, 1, 40.0, 60.0, 1),
        (1, 2, 40.0, 70.0, 2),
    ]


def test_delay_of_the_host_after_the_end_is_not_part_of_the_wait() -> None:
    # GIVEN two ranks that resume with the end; in the last of four steps rank 1 is 8 ms late
    rows = rows_of(4, lambda rank, step: 58 if (rank, step) == (1, 3) else 50)

    # THEN it waited until the end in that step too, and no longer
    assert waits_ms(*rows, num_steps=4)[-1] == (1, 3, 40.0, 50.0, 3)


def test_host_that_stalls_past_the_end_does_not_wait() -> None:
    # GIVEN two ranks that resume at any time after the end, once by chance with it
    late = {(0, 0): 0.0, (0, 1): 7.0, (0, 2): 3.0, (1, 0): 4.0, (1, 1): 9.0, (1, 2): 1.0}
    rows = rows_of(3, lambda rank, step: 50 + late[rank, step])

    assert waits_ms(*rows) == []


def test_rank_that_once_resumed_before_the_end_does_not_wait_there() -> None:
    # GIVEN four steps in three of which the optimizer begins with the end, and one in which the
    # reduction ends only while it computes
    rows = rows_of(4, lambda _, step: 48 if step == 3 else 50)

    assert waits_ms(*rows, num_steps=4) == []


def test_two_steps_are_too_few() -> None:
    assert waits_ms(*rows_of(2, lambda *_: 50), num_steps=2) == []


def test_one_rank_of_a_group_is_not_enough() -> None:
    # GIVEN a rank that resumes with the end in each step, and another that resumes 5 ms after it
    assert waits_ms(*rows_of(3, lambda rank, _: 55 if rank else 50)) == []


def test_time_of_the_host_is_not_a_wait() -> None:
    # GIVEN garbage collection until 46 ms, and then a wait until 50
    pauses = [(rank, step, SpanKind.GC, 41, 46, NONE) for rank in (0, 1) for step in range(3)]
    found = waits_ms(*rows_of(3, lambda *_: 50), *pauses)

    assert {(start, end) for _, _, start, end, _ in found} == {(46.0, 50.0)}


def test_reduction_that_leaves_its_queue_is_not_a_launch_by_its_host() -> None:
    # GIVEN a host that stalls from 40 to 80 ms in each step, during a reduction from 30 to 50 ms
    # and one that queued behind it until 60
    rows = [
        row
        for rank in (0, 1)
        for step in range(3)
        for row in (
            (rank, step, SpanKind.BACKWARD, 0, 40, NONE),
            (rank, step, SpanKind.DP_COMM, 30, 50, 2 * step),
            (rank, step, SpanKind.DP_COMM, 50, 60, 2 * step + 1),
            (rank, step, SpanKind.OPTIMIZER, 80, 90, NONE),
        )
    ]

    # THEN it did not resume at 50 ms
    assert waits_ms(*rows) == []
