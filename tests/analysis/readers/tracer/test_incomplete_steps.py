"""Ranks with missing spans of a step, found by comparison with other steps or declared."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.readers.tracer.incomplete_steps import find_missing
from rankscope.analysis.report.report import Severity
from rankscope.analysis.trace.rows import select_rows
from rankscope.tracer.span import KIND_CODES, SpanKind
from tests.support.analysis.cluster import MS, Source, dropping, source_of
from tests.support.analysis.one_group import ALL_REDUCE, trained, work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.analysis.cluster import Action

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


def without_a_forward(source: Source, *rank_steps: tuple[int, int], num_dropped: int) -> Source:
    """Remove the second forward of each (rank, step)."""
    spans = source.span_table
    keep = np.ones(len(spans), dtype=np.bool_)
    for rank, step in rank_steps:
        forwards = (spans.rank == rank) & (spans.step == step) & (spans.kind == FORWARD)
        keep[np.flatnonzero(forwards)[1]] = False
    info = replace(source.info, accounts=dropping(num_dropped))
    return replace(source, info=info, span_table=select_rows(spans, keep))


@pytest.mark.parametrize(
    ("lost", "reported"),
    [
        ((), ()),
        (((1, 2),), ((1, 2),)),
        (((1, 2), (3, 5)), ((1, 2), (3, 5))),
        # Two forwards are usual on rank 1 then, in six of its eight steps.
        (tuple((1, step) for step in (0, 2, 3, 5, 7)), ()),
    ],
)
def test_rank_with_a_missing_forward_is_reported(
    lost: tuple[tuple[int, int], ...], reported: tuple[tuple[int, int], ...]
) -> None:
    # Step 6 has fewer forwards on most ranks, so nothing of it was lost.
    source = without_a_forward(job(), *lost, num_dropped=2)

    found = find_missing(source.span_table, source.step_table, np.arange(NUM_STEPS, dtype=np.int32))

    assert tuple(map(tuple, np.argwhere(found.is_missing).tolist())) == reported


def test_steps_that_are_not_replayed_show_the_usual_number() -> None:
    source = without_a_forward(job(), (1, 2), num_dropped=1)

    found = find_missing(source.span_table, source.step_table, np.array([2, 3], dtype=np.int32))

    assert np.argwhere(found.is_missing).tolist() == [[1, 0]]


def test_dropped_compute_is_not_a_pause() -> None:
    # GIVEN three ranks that each dropped a forward of 100 ms
    lost = ((0, 1), (1, 3), (2, 5))
    report = analyze_run(without_a_forward(job(), *lost, num_dropped=3), "run")

    # THEN no rank is reported as stalled, and all steps are replayed
    assert [finding.cause for finding in report.findings] == ["healthy"]
    assert report.quality.coverage_ratio == 1.0
    (warning,) = report.quality.warnings
    assert "3 times a rank misses compute or waits of a step, first rank 0 in step 1;" in warning


def test_same_gaps_without_dropped_records_are_pauses() -> None:
    report = analyze_run(without_a_forward(job(), (0, 1), (1, 3), (2, 5), num_dropped=0), "run")

    assert [finding.cause for finding in report.findings] == ["healthy", "gc-pause"]
    assert report.findings[1].severity is Severity.MINOR


def slow_on(rank: int | None) -> Source:
    """Train four ranks for 8 steps; one of them takes 50 % longer."""

    def script(at: int, _: int) -> Iterator[Action]:
        for microbatch in range(3):
            for kind in (SpanKind.FORWARD, SpanKind.BACKWARD):
                length_ns = 150 * MS if at == rank else 100 * MS
                yield from work(kind, length_ns, microbatch=microbatch)
        yield ALL_REDUCE

    return source_of(trained(script, num_steps=NUM_STEPS))


def not_recorded(
    source: Source, ranks: tuple[int, ...], kinds: tuple[SpanKind, ...], *, first_step: int
) -> Source:
    """Return the run if some ranks had recorded none of these kinds from a step on."""
    codes = [KIND_CODES[kind] for kind in kinds]
    spans, steps = source.span_table, source.step_table
    gone = np.isin(spans.rank, ranks) & (spans.step >= first_step) & np.isin(spans.kind, codes)
    declares = np.isin(steps.rank, ranks) & (steps.step >= first_step)
    left_out = np.where(declares, sum(1 << code for code in codes), 0).astype(np.uint32)
    return replace(
        source,
        info=replace(source.info, accounts=dropping(1)),
        span_table=select_rows(spans, ~gone),
        step_table=replace(steps, left_out=left_out),
    )


COMPUTE = (SpanKind.FORWARD, SpanKind.BACKWARD)


@pytest.mark.parametrize("kinds", [COMPUTE, (SpanKind.BACKWARD,), (SpanKind.FORWARD,)])
def test_rank_whose_capture_failed_is_not_reported_as_stalled(
    kinds: tuple[SpanKind, ...],
) -> None:
    report = analyze_run(not_recorded(slow_on(None), (2,), kinds, first_step=5), "run")

    assert [finding.cause for finding in report.findings] == ["healthy"]
    assert report.quality.coverage_ratio == 1.0
    (warning,) = report.quality.warnings
    names = " and ".join(kinds)
    assert warning.startswith(f"rank 2 recorded no {names} in steps 5 to 7, by request or because")


def test_another_slow_rank_is_still_named() -> None:
    report = analyze_run(not_recorded(slow_on(1), (2,), COMPUTE, first_step=5), "run")

    assert [(finding.cause, finding.ranks) for finding in report.findings] == [
        ("slow-compute", (1,))
    ]


@pytest.mark.parametrize("slow", [None, 2])
def test_rank_without_recorded_compute_is_not_reported_as_healthy(slow: int | None) -> None:
    first_step = 3 if slow is None else 0
    source = not_recorded(slow_on(slow), (2,), COMPUTE, first_step=first_step)

    report = analyze_run(source, "run")

    (finding,) = report.findings
    assert finding.cause == "insufficient-evidence"
    assert finding.evidence.startswith("rank 2 recorded no compute in most of these steps")


@pytest.mark.parametrize(
    ("ranks", "kinds", "names"),
    [
        ((1, 2), COMPUTE, "forward, backward"),
        ((2,), (SpanKind.WAIT,), "wait"),
        ((0, 1, 2, 3), (SpanKind.DP_COMM, SpanKind.WAIT), "dp-comm, wait"),
    ],
)
def test_steps_without_compute_of_half_the_ranks_or_without_a_wait_are_left_out(
    ranks: tuple[int, ...], kinds: tuple[SpanKind, ...], names: str
) -> None:
    report = analyze_run(not_recorded(slow_on(None), ranks, kinds, first_step=5), "run")

    assert report.steps == tuple(range(5))
    (warning,) = report.quality.warnings
    assert warning == f"steps 5-7 left out: spans were not recorded: {names}"
