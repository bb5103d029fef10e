"""The whole analysis of a run: read, replay, compare, diagnose, report."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rankscope.tracer.span import NS_PER_S

from .arrays.grouping import sorted_unique
from .breakdown.bandwidth import measure_bandwidths
from .breakdown.mfu import compute_mfu
from .breakdown.starved import find_predecessors, find_starved_ranks
from .breakdown.waterfall import build_waterfall, summarize_waterfall
from .causes.crash import find_crashes
from .causes.detector import Case, Record
from .causes.equal_lengths import equalize_declared_lengths
from .diagnose import combine_findings, diagnose, ends_run, findings_of_record, insufficient
from .price.operation_sets import compare_culprits
from .quality import left_out_sentence, quality_of
from .readers.bytedance.reader import read_bytedance
from .readers.tracer.device_steps import align_steps_to_device
from .readers.tracer.reader import read_traced
from .replay.step_graph import find_cycles
from .replay.what_if import Replayer, ratio, what_if
from .report.report import RankStepExcess, RunReport, StepTimes
from .report.text import format_percent
from .statistics.peers import compare_with_peers
from .trace.errors import CycleError, EmptyRunError
from .trace.rows import select_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from .breakdown.waterfall import Waterfall
    from .replay.model import ComputeItems, Reading
    from .replay.what_if import WhatIf
    from .report.report import Finding
    from .statistics.peers import ComputeProfile
    from .trace.context import RunContext
    from .trace.tables import RunInfo, SpanSource, SpanTable, StepTable

K = TypeVar("K")

MOST_OVERRUNS_RATIO = 0.05
"""Overrun paced segments beyond which a paced run proves nothing. Source: design.md section 6."""


def analyze_run(
    source: SpanSource, run_id: str, *, first: int | None = None, last: int | None = None
) -> RunReport:
    """Analyse a run, or the steps ``first`` to ``last`` of it.

    Args:
        source: The store.
        run_id: The run.
        first: First step to take in; None: from the beginning.
        last: Last step to take in; None: to the end.

    Raises:
        UnknownRunError: The store holds no such run.
        EmptyRunError: The run has no spans in these steps.
    """
    return analyze_known(source, source.run_info(run_id), first=first, last=last)


def analyze_known(
    source: SpanSource, run: RunInfo, *, first: int | None = None, last: int | None = None
) -> RunReport:
    """Analyse a run whose description is at hand already, as `analyze_run` does.

    Args:
        source: The store.
        run: The run, as the store described it.
        first: First step to take in; None: from the beginning.
        last: Last step to take in; None: to the end.

    Raises:
        EmptyRunError: The run has no spans in these steps.
    """
    run_id = run.run_id
    steps = source.steps(run_id, first=first, last=last)
    spans = source.spans(run_id, first=first, last=last)
    context = source.context(run_id, first=first, last=last)
    if not len(spans) and first is None and last is None:
        record = Record(run=run, spans=spans, steps=steps, context=context)
        told = findings_of_record(record)
        if any(ends_run(finding) for finding in told):
            return _nothing_to_replay(run, spans, steps, told)
    if not len(spans):
        died = "; ".join(finding.evidence for finding in find_crashes(run, context))
        raise EmptyRunError(
            f"run {run_id!r} has no spans in the steps asked for; "
            + (f"it died: {died}" if died else "see `rankscope runs`")
        )
    steps = align_steps_to_device(spans, steps)
    return _report_of(run, spans, steps, _read_run(run, spans, steps), context)


def read_run(run: RunInfo, spans: SpanTable, steps: StepTable) -> Reading:
    """Turn spans of any known format into operations with their dependencies."""
    return _read_run(run, spans, align_steps_to_device(spans, steps))


def _read_run(run: RunInfo, spans: SpanTable, steps: StepTable) -> Reading:
    """Do so with the steps as the device saw them."""
    if run.source_format == "bytedance":
        return read_bytedance(run, spans)
    return read_traced(run, spans, steps)


def _report_of(
    run: RunInfo, spans: SpanTable, steps: StepTable, reading: Reading, context: RunContext
) -> RunReport:
    """Do so with the steps as the device saw them."""
    coords = {info.rank: info.coords for epoch in run.epochs for info in epoch.ranks}
    reading, replayer = _replayable(run, spans, steps, reading)
    told = findings_of_record(
        Record(
            run=run,
            spans=spans,
            steps=steps,
            context=context,
            reading=None if replayer is None else reading,
        )
    )
    if replayer is None:
        return _nothing_to_replay(run, spans, steps, told, reading)
    ranks = {info.rank: info for epoch in run.epochs for info in epoch.ranks}
    # numpy lets other threads go on while it works on long arrays.
    with ThreadPoolExecutor(1) as aside:
        recorded = aside.submit(_as_recorded, run, spans, steps, reading, replayer)
        result = what_if(replayer)
        slowdown = result.slowdown(result.replayed_ns)
        equalized = equalize_declared_lengths(reading.items, context.microbatches)
        profile = _profile(reading.items, coords, equalized)

        def case(compared: ComputeProfile) -> Case:
            return Case(
                reading=reading,
                profile=compared,
                replayer=replayer,
                ranks=ranks,
                steps=steps,
                context=context,
                slowdown=slowdown,
                equalized=equalized,
            )

        findings = combine_findings(_findings(run, profile, case), told)
        predecessors = find_predecessors(reading.model)
        rank_times = dict.fromkeys(coords, int(reading.actual_ns.sum()))
        starved = find_starved_ranks(
            reading.model, reading.waits, rank_times, predecessors=predecessors
        )
        full, waterfall = recorded.result()
    actual = float(reading.actual_ns.mean())
    replayed, ideal = float(result.replayed_ns.mean()), float(result.ideal_ns.mean())
    return RunReport(
        run=run.run_id,
        source_format=run.source_format,
        epochs=tuple(epoch.epoch for epoch in run.epochs),
        world_size=run.world_size,
        layout=run.layout,
        coords=coords,
        steps=reading.steps,
        num_spans=len(spans),
        step_time_s=StepTimes(
            actual=actual / NS_PER_S, replayed=replayed / NS_PER_S, ideal=ideal / NS_PER_S
        ),
        launch_slowdown=ratio(actual, replayed),
        replay_error_ratio=abs(full / actual - 1.0) if actual > 0 else None,
        slowdown=slowdown,
        waste_ratio=None if slowdown is None else 1.0 - 1.0 / slowdown,
        slowdown_by_kind=_slowdowns(result, result.by_kind_ns),
        slowdown_by_dp=_slowdowns(result, result.by_dp_ns),
        slowdown_by_stage=_slowdowns(result, result.by_stage_ns),
        slowdown_by_worker={key: result.worker_slowdown(*key) for key in result.by_worker_ns},
        exact_slowdown_by_worker=_slowdowns(result, result.by_worker_ns),
        slowdown_by_step={
            step: ratio(float(result.replayed_ns[k]), float(result.ideal_ns[k]))
            for k, step in enumerate(reading.steps)
        },
        actual_s_by_step=_seconds_by_step(reading.steps, reading.actual_ns),
        ideal_s_by_step=_seconds_by_step(reading.steps, result.ideal_ns),
        m_w=result.m_w,
        m_s=result.m_s,
        findings=findings,
        starved=starved,
        mfu=compute_mfu(run, steps),
        quality=quality_of(run, steps, reading, isolated=bool(result.by_dp_ns)),
        excess=_excess(profile),
        paced=run.paced,
        bandwidth=measure_bandwidths(reading.transfers, {rank: ranks[rank].host for rank in ranks}),
        waterfall=summarize_waterfall(reading.model, waterfall, predecessors=predecessors),
        culprits=compare_culprits(result) if result.by_worker_ns else None,
    )


def _as_recorded(
    run: RunInfo, spans: SpanTable, steps: StepTable, reading: Reading, replayer: Replayer
) -> tuple[float, Waterfall]:
    """Return the mean step of the full replay, in ns, and where the recorded time went."""
    full_ns = float(replayer.full_recorded().mean())
    ideal = replayer.full_ideal_times() if run.layout.pp > 1 else None
    return full_ns, build_waterfall(run, reading, spans, steps, ideal=ideal)


def _replayable(
    run: RunInfo, spans: SpanTable, steps: StepTable, reading: Reading
) -> tuple[Reading, Replayer | None]:
    """Leave out the steps whose operations wait for each other in a circle, or that have none.

    Returns:
        The rest, and its replay; None where nothing is left.
    """
    while reading.steps:
        if not len(reading.model.rank):
            astray = dict.fromkeys(reading.steps, "its spans lie in other steps")
            return replace(reading, left_out=reading.left_out | astray), None
        try:
            return reading, Replayer(reading.model)
        except CycleError:
            found = find_cycles(reading.model)
            if not found:
                raise
        kept = sorted(set(reading.steps) - set(found))
        rest = _read_run(
            run,
            select_rows(spans, np.isin(spans.step, kept)),
            select_rows(steps, np.isin(steps.step, kept)),
        )
        reading = replace(rest, left_out=reading.left_out | rest.left_out | found)
    return reading, None


def _profile(
    items: ComputeItems, coords: Mapping[int, Coords], equalized: ComputeItems | None
) -> ComputeProfile | None:
    """Compare the ranks' compute, as if micro-batches were of equal length where that is known."""
    if not len(items):
        return None
    return compare_with_peers(
        items if equalized is None else equalized, coords, is_equalized=equalized is not None
    )


def _findings(
    run: RunInfo,
    profile: ComputeProfile | None,
    case: Callable[[ComputeProfile], Case],
) -> tuple[Finding, ...]:
    overruns = run.pace_overrun_ratio
    if run.paced and overruns is not None and overruns > MOST_OVERRUNS_RATIO:
        return (
            insufficient(
                f"{format_percent(overruns, digits=1)} of a rank's paced segments overran their"
                f" target by more than 10 % (at most {format_percent(MOST_OVERRUNS_RATIO)} may):"
                " the machine is too busy for this pace, so use a longer one (--pace-ms) or fewer"
                " ranks"
            ),
        )
    if profile is None:
        return (insufficient("the run holds no forward or backward compute to compare"),)
    return diagnose(case(profile))


def _nothing_to_replay(
    run: RunInfo,
    spans: SpanTable,
    steps: StepTable,
    told: tuple[Finding, ...],
    reading: Reading | None = None,
) -> RunReport:
    """Report a run of which no step can be replayed: what was recorded, and why no more.

    Args:
        run: Layout, ranks and groups.
        spans: Its spans, if any.
        steps: Its steps, if any.
        told: What is known without a replay.
        reading: The same as operations; None: there are no spans.
    """
    numbers = sorted_unique(spans.step)
    actual = [
        int((rows.start_ns + rows.duration_ns).max() - rows.start_ns.min())
        for rows in (_step_of(spans, int(step)) for step in numbers)
    ]
    left_out = {} if reading is None else reading.left_out
    why = left_out_sentence(left_out) or "nothing of it was recorded"
    actual_s = float(np.mean(actual)) / NS_PER_S if actual else None
    coords = {info.rank: info.coords for epoch in run.epochs for info in epoch.ranks}
    return RunReport(
        run=run.run_id,
        source_format=run.source_format,
        epochs=tuple(epoch.epoch for epoch in run.epochs),
        world_size=run.world_size,
        layout=run.layout,
        coords=coords,
        steps=tuple(numbers.tolist()),
        num_spans=len(spans),
        step_time_s=StepTimes(actual=actual_s, replayed=None, ideal=None),
        launch_slowdown=None,
        replay_error_ratio=None,
        slowdown=None,
        waste_ratio=None,
        slowdown_by_kind={},
        slowdown_by_dp={},
        slowdown_by_stage={},
        slowdown_by_worker={},
        exact_slowdown_by_worker={},
        slowdown_by_step={},
        actual_s_by_step=_seconds_by_step(tuple(numbers.tolist()), np.array(actual)),
        ideal_s_by_step={},
        m_w=None,
        m_s=None,
        findings=told or (insufficient(f"no step can be replayed: {why}"),),
        starved=(),
        mfu=compute_mfu(run, steps),
        quality=quality_of(run, steps, reading),
        excess=_excess(None),
        paced=run.paced,
    )


def _step_of(spans: SpanTable, step: int) -> SpanTable:
    return select_rows(spans, spans.step == step)


def _slowdowns(result: WhatIf, times: Mapping[K, NDArray[np.float64]]) -> dict[K, float | None]:
    return {key: result.slowdown(value) for key, value in times.items()}


def _seconds_by_step(
    steps: tuple[int, ...], times_ns: NDArray[np.int64] | NDArray[np.float64]
) -> dict[int, float]:
    return {step: float(time) / NS_PER_S for step, time in zip(steps, times_ns, strict=True)}


def _excess(profile: ComputeProfile | None) -> RankStepExcess:
    if profile is None:
        return RankStepExcess(ranks=(), steps=(), excess_ns=np.zeros((0, 0)))
    return RankStepExcess(
        ranks=tuple(profile.ranks.tolist()),
        steps=tuple(profile.steps.tolist()),
        excess_ns=profile.total_ns - np.nanmedian(profile.total_ns, axis=0),
    )
