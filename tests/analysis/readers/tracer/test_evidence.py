"""Transfers of a ring whose ranks send and receive in one call, and places of host gaps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.readers.tracer.evidence import is_delayed_in_call
from rankscope.analysis.readers.tracer.reader import read_traced
from rankscope.analysis.readers.waits import split_waits
from rankscope.analysis.replay.model import Place
from rankscope.analysis.trace.tables import GroupInfo
from rankscope.tracer.span import NONE, Span, SpanKind, UnixNs
from tests.support.analysis.exit_builders import run_of
from tests.support.analysis.one_rank import DP, MS, tables
from tests.support.dashboard.builders import span_table

RING = GroupInfo(group_id=9, kind="cp-comm", name="cp", members=(0, 1, 2))
TRANSFER_NS = 100


def ring(*entered_ns: int, is_one_call: bool = True) -> list[Span]:
    """Return a send to the next and a receive from the previous of three ranks.

    In one call, both end 100 ns after both other ranks have entered; else each ends separately.
    """
    spans = []
    for rank, start in enumerate(entered_ns):
        after, before = (rank + 1) % 3, (rank - 1) % 3
        for src, dst in ((rank, after), (before, rank)):
            peer = dst if src == rank else src
            others = (after, before) if is_one_call else (peer,)
            end = max(start, *(entered_ns[each] for each in others)) + TRANSFER_NS
            spans.append(
                Span(
                    rank=rank,
                    step=0,
                    kind=SpanKind.CP_COMM,
                    name="send" if src == rank else "recv",
                    start_ns=UnixNs(start),
                    duration_ns=end - start,
                    group_id=9,
                    seq=0,
                    src_rank=src,
                    dst_rank=dst,
                )
            )
    return spans


def delayed(spans: list[Span], *, interval_id: int = 5) -> list[tuple[int, int]]:
    """Return (source, destination) of the delayed members; all spans of a rank are one call."""
    table = span_table(spans)
    table = replace(table, interval_id=np.full(len(table), interval_id))
    split = split_waits(table, [RING], clock_error_ns=0)
    rows = np.flatnonzero(is_delayed_in_call(table, split, np.arange(len(table))))
    return sorted(zip(table.src_rank[rows].tolist(), table.dst_rank[rows].tolist(), strict=True))


def test_last_member_that_waited_for_a_third_rank_is_delayed() -> None:
    # GIVEN rank 0 enters at 0, rank 1 at 50 and rank 2 at 300. The transfer between 0 and 1 was
    # done at 150, but both are in one call with their operations with rank 2, and leave at 400
    # THEN the last member of 0 -> 1 is delayed; rank 2 entered last in both of its own
    assert delayed(ring(0, 50, 300)) == [(0, 1)]


@pytest.mark.parametrize("entered_ns", [(0, 0, 0), (300, 297, 300), (0, 300, 300)])
def test_ranks_that_enter_together_are_not_delayed(entered_ns: tuple[int, int, int]) -> None:
    # 3 ns of 103 are less than a twentieth; ranks 1 and 2 both entered last at 300
    assert delayed(ring(*entered_ns)) == []


def test_transfer_that_ended_separately_or_outside_a_call_is_not_delayed() -> None:
    # 0 -> 1 ended at 150, before rank 2 entered
    assert delayed(ring(0, 50, 300, is_one_call=False)) == []
    assert delayed(ring(0, 50, 300), interval_id=0) == []


@pytest.mark.parametrize(
    ("after", "place"),
    [
        (SpanKind.FORWARD, Place.FORWARD),
        (SpanKind.BACKWARD, Place.BACKWARD),
        (SpanKind.OPTIMIZER, Place.LAUNCH),
    ],
)
def test_gap_before_a_launch_has_the_place_of_the_compute_that_it_feeds(
    after: SpanKind, place: Place
) -> None:
    # GIVEN a rank that is idle for 20 ms, launches a collective and computes right after it
    spans, steps = tables(
        (SpanKind.FORWARD, 0, 30, 0, NONE),
        (SpanKind.DP_COMM, 50, 60, 50, 0),
        (after, 50, 100, 50, NONE),
    )

    gaps = read_traced(run_of(1, groups=(DP,), clock_error_ns=0), spans, steps).gaps

    assert [
        (Place(where), gap // MS) for where, gap in zip(gaps.place, gaps.gap_ns, strict=True)
    ] == [(place, 20)]
