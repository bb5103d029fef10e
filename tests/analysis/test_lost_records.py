"""Ranks that lack spans of a step, told by what they have in other steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from analysis.analyze import analyze_run
from analysis.lost_records import losses_of
from analysis.source import rows_of_spans
from tests.analysis.cluster import MS, Source, source_of
from tests.analysis.one_group import ALL_REDUCE, trained, work
from tracer.span import KIND_CODES, SpanKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.analysis.cluster import Action

NUM_STEPS = 8
FORWARD = KIND_CODES[SpanKind.FORWARD]


def job() -> Source:
    """Train four ranks for 8 steps of three micro-batches; step 6 has two."""

    def script(_: int, step: int) -> Iterator[Action]:
        for microbatch in range(2 if step == 6 else 3):
            for kind in (SpanKind.FORWARD, SpanKind.BACKWARD):
                yield from work(kind, 100 * MS, microbatch=microbatch)
        yield ALL_REDUCE

    return source_of(trained(script, num_steps=NUM_STEPS))


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
    ("lost", "told"),
    [
        ((), ()),
        (((1, 2),), ((1, 2),)),
        (((1, 2), (3, 5)), ((1, 2), (3, 5))),
        # Two are usual on rank 1 then, in six of its eight steps.
        (tuple((1, step) for step in (0, 2, 3, 5, 7)), ()),
    ],
)
def test_a_rank_that_lacks_a_forward_of_a_step_is_told(
    lost: tuple[tuple[int, int], ...], told: tuple[tuple[int, int], ...]
) -> None:
    # Step 6 has fewer on most ranks: nothing of it was lost.
    source = without_a_forward(job(), *lost, num_dropped=2)

    found = losses_of(source.span_table, source.step_table, np.arange(NUM_STEPS, dtype=np.int32))

    assert tuple(map(tuple, np.argwhere(found.lacks).tolist())) == told
    assert len(found.warnings()) == bool(told)


def test_steps_that_take_no_part_tell_what_is_usual() -> None:
    source = without_a_forward(job(), (1, 2), num_dropped=1)

    found = losses_of(source.span_table, source.step_table, np.array([2, 3], dtype=np.int32))

    assert np.argwhere(found.lacks).tolist() == [[1, 0]]


def test_dropped_compute_is_no_pause() -> None:
    # GIVEN forwards of 100 ms that three ranks dropped in turn
    lost = ((0, 1), (1, 3), (2, 5))
    report = analyze_run(without_a_forward(job(), *lost, num_dropped=3), "run")

    # THEN nobody is said to have stood still, and all steps are still replayed
    assert [finding.cause for finding in report.findings] == ["healthy"]
    assert report.quality.coverage_ratio == 1.0
    (warning,) = report.quality.warnings
    assert "3 times a rank lacks compute or waits of a step, first 0 in 1;" in warning


def test_the_same_holes_without_a_dropped_record_are_pauses() -> None:
    report = analyze_run(without_a_forward(job(), (0, 1), (1, 3), (2, 5), num_dropped=0), "run")

    assert [finding.cause for finding in report.findings] == ["gc-pause"]
