"""Where in its step a rank that did nothing is said to have stood."""

from __future__ import annotations

import pytest

from rankscope.analysis.readers.tracer.reader import read_traced
from rankscope.analysis.replay.model import Place
from rankscope.analysis.trace.tables import EpochInfo, RankInfo, RunInfo
from rankscope.tracer.span import NONE, SpanKind
from rankscope.tracer.topology import Coords, Layout
from tests.analysis.readers.tracer.test_match_waits import DP, MS, tables


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
        epochs=(EpochInfo(epoch=0, ranks=(RankInfo(rank=0, coords=Coords()),), groups=(DP,)),),
    )

    gaps = read_traced(run, spans, steps, clock_error_ns=0).gaps

    assert [
        (Place(where), gap // MS) for where, gap in zip(gaps.place, gaps.gap_ns, strict=True)
    ] == [(place, 20)]
