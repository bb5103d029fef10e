"""Launches of communications on the device's clock, and transfers with unknown ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rankscope.analysis.readers.tracer.matched_waits import MatchedWaits, match_waits
from rankscope.analysis.readers.tracer.reader import read_traced
from rankscope.analysis.readers.waits import split_waits
from rankscope.analysis.trace.tables import StepTable
from rankscope.tracer.span import NONE, SpanKind
from tests.support.analysis.exit_builders import run_of
from tests.support.analysis.one_rank import DP, MS, Row, tables
from tests.support.analysis.tables import table_of


def match(*rows: Row) -> MatchedWaits:
    """Match one rank's spans, all of step 0 and one group."""
    spans, steps = tables(*rows)
    split = split_waits(spans, [DP], clock_error_ns=0)
    return match_waits(spans, steps, np.zeros(1, dtype=np.int32), split)[0]


def launches_ms(found: MatchedWaits) -> list[int]:
    order = np.argsort(found.spans.seq[found.comm])
    return [int(at) // MS for at in found.line.time_at(found.launch)[order]]


def test_idle_stream_begins_new_work_at_once() -> None:
    # GIVEN a host that launches a backward of 40 ms and two reductions within 3 ms, and a device
    # that reaches the reductions after 20 and 40 ms, each of which ends before the next
    found = match(
        (SpanKind.BACKWARD, 10, 50, 1, NONE),
        (SpanKind.DP_COMM, 30, 36, 2, 0),
        (SpanKind.DP_COMM, 50, 56, 3, 1),
    )

    # THEN they were launched where they began, not 1 and 2 ms into the backward
    assert launches_ms(found) == [30, 50]


def test_queued_communication_was_launched_between_its_neighbours() -> None:
    # GIVEN a reduction that begins as the one before on its stream ends, launched by the host
    # halfway between that one and the next backward
    found = match(
        (SpanKind.BACKWARD, 10, 40, 1, NONE),
        (SpanKind.DP_COMM, 20, 38, 2, 0),
        (SpanKind.DP_COMM, 38, 50, 4, 1),
        (SpanKind.BACKWARD, 40, 70, 6, NONE),
    )

    # THEN the device reached it halfway between the two: at (20 + 40) / 2
    assert launches_ms(found) == [20, 30]


def test_queued_communication_was_launched_before_it_began() -> None:
    # GIVEN one that queued, and no known launch after it
    found = match(
        (SpanKind.BACKWARD, 10, 40, 1, NONE),
        (SpanKind.DP_COMM, 20, 22, 2, 0),
        (SpanKind.DP_COMM, 22, 30, 9, 1),
    )

    # THEN the device reached it as much after the one before as the host launched it, at 27, but
    # not after it began
    assert launches_ms(found) == [20, 22]


def test_transfer_with_an_unknown_end_is_that_of_alike_ones_or_its_bound() -> None:
    # GIVEN four reductions: one known to take 6 ms, two hidden ones that had ended after 30 ms
    # and after 4 ms at the latest, and one known to take 8 ms
    spans, steps = tables(
        (SpanKind.BACKWARD, 0, 90, 0, NONE),
        (SpanKind.DP_COMM, 1, 7, 0, 0),
        (SpanKind.DP_COMM, 10, 40, 0, 1),
        (SpanKind.DP_COMM, 50, 54, 0, 2),
        (SpanKind.DP_COMM, 60, 68, 0, 3),
        bounds=(1, 2),
    )

    model = read_traced(run_of(1, groups=(DP,), clock_error_ns=0), spans, steps).model

    # THEN the first hidden one took the median of the known ones, 7, the second its bound
    comm = np.array([model.kinds[kind] == "dp-comm" for kind in model.kind])
    assert (model.operations.duration_ns[comm] / MS).tolist() == [6.0, 7.0, 4.0, 8.0]


def test_a_wait_for_a_communication_of_the_start_up_is_for_no_unknown_one() -> None:
    # GIVEN a job that waits in each step for the reduction that it launched in the step before, and
    # a first step that is left out
    spans, _ = tables(
        (SpanKind.DP_COMM, 1, 7, 0, 0),
        (SpanKind.WAIT, 12, 13, 0, 0),
        (SpanKind.DP_COMM, 14, 18, 0, 1),
        (SpanKind.WAIT, 22, 23, 0, 1),
        (SpanKind.WAIT, 24, 25, 0, 7),
    )
    spans = replace(spans, step=np.array([0, 1, 1, 2, 2], np.int32))
    steps = table_of(StepTable, step=[0, 1, 2], start_ns=np.array([0, 10, 20]) * MS,
                     end_ns=np.array([10, 20, 30]) * MS)  # fmt: skip
    split = split_waits(spans, [DP], clock_error_ns=0)

    _, warnings = match_waits(spans, steps, np.array([1, 2], np.int32), split)

    assert warnings == ["1 waits name a communication that was not recorded"]
