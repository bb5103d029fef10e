"""A ring of three ranks, each sending to the next and receiving from the one before in one call."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.readers.tracer.evidence import is_delayed_in_call
from rankscope.analysis.readers.tracer.reader import read_traced
from rankscope.analysis.readers.waits import split_waits
from rankscope.analysis.replay.model import Place
from rankscope.analysis.trace.tables import EpochInfo, GroupInfo, RankInfo, RunInfo
from rankscope.tracer.span import NONE, Span, SpanKind, UnixNs
from rankscope.tracer.topology import Coords, Layout
from tests.analysis.readers.tracer.test_matched_waits import DP, MS, tables
from tests.support.dashboard.builders import span_table

RING = GroupInfo(group_id=9, kind="cp-comm", name="cp", members=(0, 1, 2))
TRANSFER_NS = 100


def ring(*entered_ns: int, is_one_call: bool = True) -> list[Span]:
    """Return both operations of each rank, which end once both partners came and 100 ns passed.

    Without one call, each ends by itself.
    """
    spans = []
    for rank, start in enumerate(entered_ns):
        after, before = (rank + 1) % 3, (rank - 1) % 3
        for src, dst in ((rank, after), (before, rank)):
            peer = dst if src == rank else src
            partners = (after, before) if is_one_call else (peer,)
            end = max(start, *(entered_ns[each] for each in partners)) + TRANSFER_NS
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


def held(spans: list[Span], *, interval_id: int = 5) -> list[tuple[int, int]]:
    """Return (source, destination) of what is told to be held; a rank's spans are one interval."""
    table = span_table(spans)
    table = replace(table, interval_id=np.full(len(table), interval_id))
    split = split_waits(table, [RING], clock_error_ns=0)
    rows = np.flatnonzero(is_delayed_in_call(table, split, np.arange(len(table))))
    return sorted(zip(table.src_rank[rows].tolist(), table.dst_rank[rows].tolist(), strict=True))


def test_a_pair_whose_last_member_waited_for_a_third_rank_tells_no_transfer() -> None:
    # GIVEN rank 2 at 300; between 0 (at 0) and 1 (at 50) all bytes had come at 150, but both
    # stand in the same calls as their operations with rank 2, and leave at 400
    # THEN 0 -> 1 is held by its last member; rank 2 entered both of its own last
    assert held(ring(0, 50, 300)) == [(0, 1)]


@pytest.mark.parametrize("entered_ns", [(0, 0, 0), (300, 297, 300), (0, 300, 300)])
def test_ranks_that_come_together_are_not_held(entered_ns: tuple[int, int, int]) -> None:
    # 3 ns of 103 are less than a twentieth; ranks 1 and 2 at 300 both entered last
    assert held(ring(*entered_ns)) == []


def test_what_ended_by_itself_or_in_a_call_of_its_own_is_not_held() -> None:
    # 0 -> 1 ended at 150, before rank 2 came
    assert held(ring(0, 50, 300, is_one_call=False)) == []
    assert held(ring(0, 50, 300), interval_id=0) == []


@pytest.mark.parametrize(
    ("after", "place"),
    [
        (SpanKind.FORWARD, Place.FORWARD),
        (SpanKind.BACKWARD, Place.BACKWARD),
        (SpanKind.OPTIMIZER, Place.LAUNCH),
    ],
)
def test_a_launch_lies_before_the_compute_that_it_feeds(after: SpanKind, place: Place) -> None:
    # GIVEN a rank that stands for 20 ms, launches a collective, and computes right after that
    spans, steps = tables(
        (SpanKind.FORWARD, 0, 30, 0, NONE),
        (SpanKind.DP_COMM, 50, 60, 50, 0),
        (after, 50, 100, 50, NONE),
    )
    run = RunInfo(
        run_id="run",
        source_format="rankscope",
        layout=Layout(),
        world_size=1,
        clock_error_ns=0,
        epochs=(EpochInfo(epoch=0, ranks=(RankInfo(rank=0, coords=Coords()),), groups=(DP,)),),
    )

    gaps = read_traced(run, spans, steps).gaps

    assert [
        (Place(where), gap // MS) for where, gap in zip(gaps.place, gaps.gap_ns, strict=True)
    ] == [(place, 20)]
