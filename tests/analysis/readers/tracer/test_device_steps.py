from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.breakdown.mfu import compute_mfu
from rankscope.analysis.readers.tracer.device_steps import align_steps_to_partners, measure_steps
from rankscope.analysis.readers.tracer.reader import read_traced
from rankscope.analysis.replay.model import COMPUTE_KINDS
from rankscope.analysis.replay.program import Change
from rankscope.analysis.replay.replayer import Replayer
from rankscope.analysis.trace.context import empty_microbatches
from rankscope.analysis.trace.rows import concatenate, select_rows
from rankscope.analysis.trace.tables import StepTable
from rankscope.tracer.span import KIND_CODES, NONE, SpanKind
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import (
    MS,
    TRANSFER,
    Action,
    Begin,
    Cluster,
    Collective,
    Compute,
    End,
    Recv,
    Send,
    Source,
    source_of,
)
from tests.support.analysis.tables import table_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankscope.analysis.replay.model import Reading, ReplayModel

STAGES = 4
FORWARD, BACKWARD, OPTIMIZER = 10 * MS, 20 * MS, 8 * MS


def pipeline(num_steps: int, *, slow: dict[int, float] | None = None) -> Source:
    """Return a pipeline without a data-parallel axis: nothing joins the stages between steps.

    The first stage ends a step when the gradients of its first micro-batch have come back. The
    last one has sent them long before, and begins the next step.
    """

    def script(rank: int, _: int) -> Iterator[Action]:
        factor = (slow or {}).get(rank, 1.0)
        for mb in range(2):
            if rank > 0:
                yield Recv(rank - 1)
            yield Begin(SpanKind.FORWARD, mb)
            yield Compute(int(factor * FORWARD))
            yield End()
            if rank < STAGES - 1:
                yield Send(rank + 1)
        for mb in range(2):
            if rank < STAGES - 1:
                yield Recv(rank + 1)
            yield Begin(SpanKind.BACKWARD, mb)
            yield Compute(int(factor * BACKWARD))
            yield End()
            if rank > 0:
                yield Send(rank - 1)

    layout = Layout(pp=STAGES)
    cluster = Cluster(layout, {1 << 40: (SpanKind.OTHER, tuple(range(STAGES)))})
    cluster.run(num_steps, script)
    return source_of(cluster)


INTERVAL = 5 * (FORWARD + BACKWARD) + 10 * TRANSFER
"""Two micro-batches through four stages and back: five of each in a row, and a hop after each."""


def steps_of(*rows: tuple[int, int, int, int]) -> StepTable:
    """Return step rows of (epoch, step, begin, end), each of a rank of its own."""
    epoch, step, start, end = np.array(rows, dtype=np.int64).T
    ranks = range(len(rows))
    return table_of(StepTable, epoch=epoch, step=step, rank=ranks, start_ns=start, end_ns=end)


def test_time_that_two_steps_share_belongs_to_the_earlier_one() -> None:
    steps = measure_steps(
        steps_of((0, 1, 0, 90), (0, 1, 5, 100), (0, 2, 90, 180), (0, 2, 100, 200))
    )

    assert steps.duration_ns.tolist() == [100, 100]
    assert steps.overlap_ns.tolist() == [0, 10]


@pytest.mark.parametrize(
    "later",
    [(0, 2, 130, 200), (0, 3, 90, 160), (1, 2, 90, 160)],
    ids=["a pause between them", "a step between them", "another epoch"],
)
def test_steps_that_do_not_follow_each_other_last_from_their_first_begin(
    later: tuple[int, int, int, int],
) -> None:
    assert measure_steps(steps_of((0, 1, 0, 100), later)).duration_ns.tolist() == [100, 70]


def test_a_step_that_ends_before_the_one_before_it_lasts_from_its_first_begin() -> None:
    steps = measure_steps(steps_of((0, 1, 0, 500), (0, 2, 90, 200)))

    assert steps.duration_ns.tolist() == [500, 110]


def test_the_step_of_a_pipeline_lasts_from_end_to_end() -> None:
    source = pipeline(6)
    extent = source.step_table.end_ns.reshape(6, STAGES).max(axis=1)
    extent -= source.step_table.start_ns.reshape(6, STAGES).min(axis=1)

    report = analyze_run(source, "tiny")

    assert extent.tolist()[1:] == [pytest.approx(1.5 * INTERVAL, rel=0.2)] * 5
    assert report.actual_s_by_step == dict.fromkeys(range(6), INTERVAL / 1e9)
    assert report.replay_error_ratio == pytest.approx(0.0, abs=1e-9)


def test_a_finding_is_priced_by_the_time_between_the_ends_of_steps() -> None:
    healthy = read(pipeline(6))
    slow = read(pipeline(6, slow={2: 2.0}))
    replayer = Replayer(slow.model)
    is_slow = slow.model.rank == 2
    fixed = np.where(
        is_slow, slow.model.operations.duration_ns / 2, slow.model.operations.duration_ns
    )

    assert replayer.full_recorded() == pytest.approx(slow.actual_ns.astype(float))
    # The two transfers of the rank are halved too.
    assert replayer.full_with(fixed)[1:] == pytest.approx(healthy.actual_ns[1:], rel=0.02)


def begun_by_forwards(source: Source) -> Source:
    """Return a run whose steps begin with a forward: what ranks received before is in the last one.

    So a tracer records a pipeline without a library.
    """
    spans, steps = source.span_table, source.step_table
    step, start, end = spans.step.copy(), steps.start_ns.copy(), steps.end_ns.copy()
    is_forward = spans.kind == KIND_CODES[SpanKind.FORWARD]
    for row in np.flatnonzero(steps.step > 0).tolist():
        rank, number = steps.rank[row], steps.step[row]
        mine = (spans.rank == rank) & (spans.step == number)
        begin_ns = spans.start_ns[mine & is_forward].min()
        step[mine & (spans.start_ns < begin_ns)] -= 1
        start[row] = end[(steps.rank == rank) & (steps.step == number - 1)] = begin_ns
    order = np.lexsort((spans.start_ns, spans.rank, step))
    return replace(
        source,
        span_table=select_rows(replace(spans, step=step), order),
        step_table=replace(steps, start_ns=start, end_ns=end),
    )


def test_what_a_stage_receives_before_its_first_forward_belongs_to_the_step_of_its_sender() -> None:
    whole = analyze_run(pipeline(6, slow={2: 2.0}), "tiny")
    source = begun_by_forwards(pipeline(6, slow={2: 2.0}))

    report = analyze_run(source, "tiny")

    assert not any("in different steps" in text for text in report.quality.warnings)
    assert [(each.cause, each.ranks) for each in report.findings] == [
        (each.cause, each.ranks) for each in whole.findings
    ]
    assert report.top_finding.saved_s == pytest.approx(whole.top_finding.saved_s, rel=1e-6)
    assert report.actual_s_by_step == pytest.approx(whole.actual_s_by_step)


def test_a_communication_of_the_step_behind_it_keeps_a_step_together() -> None:
    source = begun_by_forwards(pipeline(3))
    spans, steps = source.span_table, source.step_table
    mine = np.flatnonzero((spans.rank == 1) & (spans.step == 0))
    behind = select_rows(spans, mine[-1:])
    behind = replace(
        behind,
        kind=np.array([KIND_CODES[SpanKind.OTHER]], dtype=spans.kind.dtype),
        start_ns=behind.start_ns + 1,
        group_id=np.array([7], dtype=spans.group_id.dtype),
        src_rank=np.array([NONE], dtype=spans.src_rank.dtype),
        dst_rank=np.array([NONE], dtype=spans.dst_rank.dtype),
    )
    logged = select_rows(
        concatenate(spans, behind), np.insert(np.arange(len(spans)), mine[-1] + 1, len(spans))
    )

    moved, kept = align_steps_to_partners(spans, steps), align_steps_to_partners(logged, steps)

    of_rank_1 = (steps.rank == 1) & (steps.step == 0)
    assert moved.end_ns[of_rank_1] < steps.end_ns[of_rank_1]
    assert kept.end_ns[of_rank_1] == steps.end_ns[of_rank_1]


def test_steps_that_partners_share_stay_as_they_are() -> None:
    source = pipeline(3)

    assert align_steps_to_partners(source.span_table, source.step_table) is source.step_table


def updated_pipeline(num_steps: int, *, factor: float) -> Source:
    """Return two stages, joined before their optimizers; the second one computes slowly.

    It begins each step late by what its optimizer takes longer, while the first computes forward.
    """

    def script(rank: int, _: int) -> Iterator[Action]:
        own = factor if rank == 1 else 1.0
        if rank == 1:
            yield Recv(0)
        yield from compute(SpanKind.FORWARD, own * FORWARD)
        if rank == 0:
            yield Send(1)
            yield Recv(1)
        yield from compute(SpanKind.BACKWARD, own * BACKWARD)
        if rank == 1:
            yield Send(0)
        yield Collective(1 << 40, SpanKind.OTHER)
        yield from compute(SpanKind.OPTIMIZER, own * OPTIMIZER)

    cluster = Cluster(Layout(pp=2), {1 << 40: (SpanKind.OTHER, (0, 1))})
    cluster.run(num_steps, script)
    return source_of(cluster)


def compute(kind: SpanKind, duration_ns: float) -> Iterator[Action]:
    yield Begin(kind, NONE if kind is SpanKind.OPTIMIZER else 0)
    yield Compute(int(duration_ns))
    yield End()


def test_a_rank_that_no_longer_ends_steps_late_begins_none_late() -> None:
    healthy_ns = read(updated_pipeline(6, factor=1.0)).actual_ns
    slow = read(updated_pipeline(6, factor=1.5)).model
    operations = slow.operations
    rows = np.flatnonzero((slow.rank == 1) & np.isin(slow.kind, compute_codes(slow)))
    fix = Change(rows, operations.duration_ns[rows] / 1.5, operations.gap_ns[rows])
    replayer = Replayer(slow)
    fixed_ns = operations.duration_ns.copy()
    fixed_ns[rows] = fix.duration_ns

    assert slow.overlap_ns is not None
    assert slow.overlap_ns.tolist() == [0, *[OPTIMIZER / 2] * 5]
    assert replayer.full_with(fixed_ns).tolist() == healthy_ns.tolist()
    (changed_ns,) = replayer.full_with_each(operations.duration_ns, operations.gap_ns, [fix])
    assert changed_ns.tolist() == healthy_ns.tolist()


def test_a_rank_that_would_end_steps_late_begins_the_next_ones_late() -> None:
    healthy = read(updated_pipeline(6, factor=1.0)).model
    slow_ns = read(updated_pipeline(6, factor=1.5)).actual_ns
    is_slow = (healthy.rank == 1) & np.isin(healthy.kind, compute_codes(healthy))
    duration_ns = healthy.operations.duration_ns

    times = Replayer(healthy).full_with(np.where(is_slow, duration_ns * 1.5, duration_ns))

    assert times.tolist()[1:] == slow_ns.tolist()[1:]


def compute_codes(model: ReplayModel) -> list[int]:
    return [code for code, kind in enumerate(model.kinds) if kind in COMPUTE_KINDS]


def test_the_ideal_delay_of_a_stage_that_begins_after_the_others_is_its_own() -> None:
    replayer = Replayer(read(pipeline(6)).model)

    assert replayer.full_ideal() == pytest.approx(np.full(6, float(INTERVAL)), rel=1e-9)


def test_mfu_counts_shared_time_once() -> None:
    source = pipeline(6)
    epoch = source.info.epochs[0]
    ranks = tuple(replace(rank, peak_flops_per_s=1e12) for rank in epoch.ranks)
    run = replace(source.info, flops_per_token=1e6, epochs=(replace(epoch, ranks=ranks),))

    found = compute_mfu(run, source.step_table, empty_microbatches())

    assert found is not None
    expected = 1e6 * 1024 / (4 * 1e12 * INTERVAL / 1e9)
    assert found.by_step == pytest.approx(dict.fromkeys(range(6), expected))


def read(source: Source) -> Reading:
    return read_traced(source.info, source.span_table, source.step_table)
