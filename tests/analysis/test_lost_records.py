"""Steps that lack spans, told by what their ranks have in other steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from analysis.analyze import analyze_run
from analysis.lost_records import steps_with_losses
from analysis.source import rows_of_spans
from tests.analysis.cluster import (
    MS,
    WORLD,
    Begin,
    Cluster,
    Collective,
    Compute,
    End,
    Source,
    source_of,
)
from tracer.span import KIND_CODES, SpanKind
from tracer.topology import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.analysis.cluster import Action

RANKS, NUM_STEPS = (0, 1, 2, 3), 8
FORWARD = KIND_CODES[SpanKind.FORWARD]


def job() -> Source:
    """Train four ranks for 8 steps of three micro-batches; step 6 has two."""
    cluster = Cluster(Layout(dp=4), {WORLD: (SpanKind.DP_COMM, RANKS)})

    def script(_: int, step: int) -> Iterator[Action]:
        for microbatch in range(2 if step == 6 else 3):
            for kind in (SpanKind.FORWARD, SpanKind.BACKWARD):
                yield Begin(kind, microbatch)
                yield Compute(100 * MS)
                yield End()
        yield Collective(WORLD, SpanKind.DP_COMM)

    cluster.run(NUM_STEPS, script)
    return source_of(cluster)


def without_a_forward(source: Source, *places: tuple[int, int], num_dropped: int) -> Source:
    """Leave out the second forward of each (rank, step)."""
    spans = source.span_table
    keep = np.ones(len(spans), dtype=np.bool_)
    for rank, step in places:
        mine = (spans.rank == rank) & (spans.step == step) & (spans.kind == FORWARD)
        keep[np.flatnonzero(mine)[1]] = False
    info = replace(source.info, num_dropped=num_dropped)
    return replace(source, info=info, span_table=rows_of_spans(spans, keep))


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ((), ()),
        (((1, 2),), (2,)),
        (((1, 2), (3, 5)), (2, 5)),
        # Rank 1 has no number that most of its steps have.
        (tuple((1, step) for step in (0, 2, 3, 5, 7)), ()),
    ],
)
def test_a_step_that_lacks_a_forward_of_one_rank_is_told(
    places: tuple[tuple[int, int], ...], told: tuple[int, ...]
) -> None:
    # Step 6 has fewer on most ranks: nothing of it was lost.
    source = without_a_forward(job(), *places, num_dropped=2)

    assert steps_with_losses(source.span_table, source.step_table, range(NUM_STEPS)) == told


def test_dropped_compute_is_no_pause() -> None:
    # GIVEN forwards of 100 ms that three ranks dropped in turn
    lost = ((0, 1), (1, 3), (2, 5))
    report = analyze_run(without_a_forward(job(), *lost, num_dropped=3), "run")

    # THEN these steps are left out and named, and nobody is said to have stood still
    assert [finding.cause for finding in report.findings] == ["healthy"]
    assert report.quality.warnings == (
        "steps 1, 3, 5 left out: records were dropped, and a rank lacks compute or waits of it",
    )
