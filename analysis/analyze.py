"""The analysis of a run, from its spans to the report: read, replay, compare, diagnose, report."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rankscope.tracer.span import FLIGHT_RECORDER, NS_PER_S

from .arrays.grouping import sorted_unique
from .breakdown.bandwidth import measure_bandwidths
from .breakdown.device_time import summarize_profile
from .breakdown.link_summary import summarize_links
from .breakdown.memory import summarize_memory
from .breakdown.mfu import compute_mfu, count_tokens, explain_missing_mfu, sum_squares
from .breakdown.mfu_shape import with_mfu
from .breakdown.starved import attribute_waits, find_starved_ranks
from .breakdown.wait_graph import sum_direct_waits
from .breakdown.waterfall import build_waterfall, summarize_waterfall
from .causes.common_pause import list_pauses
from .causes.crash import find_crashes
from .causes.detector import Case, Record, insufficient
from .causes.equal_lengths import declared_work, equalize_declared_lengths
from .diagnose import combine_findings, diagnose, find_candidates, findings_of_record
from .evidence import find_step_begins, tabulate_evidence, with_proofs
from .host_evidence import with_host_notes
from .price.operation_sets import compare_culprits
from .proof.cards import with_cards
from .quality import assess_quality, left_out_sentence
from .readers.clocks import align_clocks
from .readers.formats import drop_read_columns, read_run
from .readers.tracer.device_steps import align_steps
from .readers.tracer.job_ends import end_last_steps
from .recurrence import find_placements, name_hosts
from .replay.replayer import Replayer, ratio, what_if
from .replay.step_graph import find_cycles
from .report.network import WaitedLink
from .report.report import RankStepExcess, RunReport, StepTimes
from .report.text import format_count, format_percent
from .severity import ends_run, find_contradictions, grade_findings
from .statistics.peers import compare_with_peers
from .trace.account import INVALID
from .trace.errors import CycleError, EmptyRunError
from .trace.rows import select_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor, Future

    from numpy.typing import NDArray

    from .breakdown.starved import WaitAttribution
    from .breakdown.waterfall import Waterfall
    from .causes.candidate import Candidate
    from .replay.model import Reading, Transfers
    from .replay.replayer import WhatIf
    from .report.report import Finding, Quality, RankPlacements, Starved, WaitsOn
    from .statistics.peers import ComputeProfile
    from .trace.tables import RunInfo, SpanSource, SpanTable, StepTable

    Waiting = tuple[WaitAttribution, tuple[Starved, ...]]
    """Who caused the waits, and the ranks that wait."""

K = TypeVar("K")
Begun = TypeVar("Begun")

NO_STEP_ENDED = "no step has ended: call `optimizer.step()` or `tracer.step()` in each"
MAX_OVERRUN_RATIO = 0.05
"""Share of paced compute that may overrun its target; beyond it a paced run proves nothing.
Source: choice."""


def analyze_run(
    source: SpanSource,
    run_id: str,
    *,
    first: int | None = None,
    last: int | None = None,
    num_earlier_steps: int | None = None,
) -> RunReport:
    """Analyse a run, or the steps ``first`` to ``last`` of it.

    Args:
        first: First step of the analysis; None: the first of the run.
        last: Last step of the analysis; None: the last of the run.
        num_earlier_steps: Steps of the run before these; None: the source has all of them.

    Raises:
        UnknownRunError: The source has no such run.
        EmptyRunError: The run has no spans in these steps.
    """
    run = source.run_info(run_id)
    return analyze_known(source, run, first=first, last=last, num_earlier_steps=num_earlier_steps)


def analyze_known(
    source: SpanSource,
    run: RunInfo,
    *,
    first: int | None = None,
    last: int | None = None,
    num_earlier_steps: int | None = None,
) -> RunReport:
    """Analyse a run whose description has been read already; see `analyze_run`."""
    if num_earlier_steps is None:
        num_earlier_steps = count_earlier_steps(source, run.run_id, first)
    report = _analyze(source, run, (first, last), num_earlier_steps)
    report = grade_findings(with_mfu(report, report.mfu))
    contradictions = tuple(find_contradictions(report))
    if contradictions:
        warnings = (
            *report.quality.warnings,
            *map("the report contradicts itself: {}".format, contradictions),
        )
        report = replace(report, quality=replace(report.quality, warnings=warnings))
    return report


def count_earlier_steps(source: SpanSource, run_id: str, first: int | None) -> int:
    """Return the number of steps before ``first``; 0 if that is None."""
    if first is None:
        return 0
    return len(sorted_unique(source.steps(run_id, last=first - 1).step))


def _analyze(
    source: SpanSource,
    run: RunInfo,
    first_last: tuple[int | None, int | None],
    num_earlier_steps: int,
) -> RunReport:
    record, take_spans = _read_record(source, run, first_last, num_earlier_steps)
    if not len(record.spans):
        return _report_without_spans(record, is_whole_run=first_last == (None, None))
    with ThreadPoolExecutor(1) as executor:
        reading, replay = _read_replayable(
            record,
            take_spans,
            lambda reading: executor.submit(_find_waiting, record.run, reading),
        )
        if replay is not None:
            record = replace(record, reading=reading)
            report = _report_with_replay(record, reading, *replay, executor)
            return _with_devices(report, record)
    report = _report_without_replay(record, findings_of_record(record), reading)
    return _with_devices(report, record)


def _read_record(
    source: SpanSource,
    run: RunInfo,
    first_last: tuple[int | None, int | None],
    num_earlier_steps: int,
) -> tuple[Record, Callable[[], SpanTable]]:
    """Return what was recorded, and what gives its spans to the reader.

    The record holds only the columns of the spans that are needed after they were read.
    """
    run_id, (first, last) = run.run_id, first_last
    steps = source.steps(run_id, first=first, last=last)
    spans = source.spans(run_id, first=first, last=last)
    # The engine and numpy release the interpreter's lock in long operations: two cores work.
    with ThreadPoolExecutor(1) as executor:
        read_context = executor.submit(source.context, run_id, first=first, last=last)
        clocks = align_clocks(run, spans)
        run, steps, spans = clocks.run, clocks.align(steps), clocks.align(spans)
        if last is None:
            steps = end_last_steps(run, spans, steps)
        aligned = align_steps(spans, steps)
    held = [spans]

    def take_spans() -> SpanTable:
        return held.pop() if held else clocks.align(source.spans(run_id, first=first, last=last))

    record = Record(
        run=run,
        steps=aligned,
        spans=drop_read_columns(run, spans),
        context=clocks.align_context(read_context.result()),
        num_earlier_steps=num_earlier_steps,
    )
    return record, take_spans


def read_case(
    source: SpanSource, run: RunInfo, *, first: int | None = None
) -> tuple[Case, list[Candidate]]:
    """Return a run's replay with what the diagnosis compares, and what it found, unpriced.

    Args:
        first: First step that is read; None: all are.

    Raises:
        EmptyRunError: No step can be replayed, or none has compute.
    """
    num_earlier = count_earlier_steps(source, run.run_id, first)
    record, take_spans = _read_record(source, run, (first, None), num_earlier)
    if len(record.spans):
        reading, replay = _read_replayable(record, take_spans, lambda _: None)
        if replay is not None:
            replayer, _ = replay
            _, case, parts = _build_cases(replace(record, reading=reading), reading, replayer)
            if case is not None:
                return case, find_candidates(case, parts)
    raise EmptyRunError(f"no step of run {run.run_id!r} can be replayed (see quality.warnings)")


def _with_devices(report: RunReport, record: Record) -> RunReport:
    device_time, kernels = summarize_profile(
        record.context, report.steps, {rank.device_name for rank in record.run.ranks.values()}
    )
    memory = summarize_memory(record.run, record.steps, record.context.microbatches)
    return replace(report, device_time=device_time, kernels=kernels, memory=memory)


def read_operations(run: RunInfo, spans: SpanTable, steps: StepTable) -> Reading:
    """Return spans of any known format as operations with their dependencies."""
    clocks = align_clocks(run, spans)
    spans = clocks.align(spans)
    return read_run(clocks.run, lambda: spans, align_steps(spans, clocks.align(steps)))


def _read_replayable(
    record: Record, take_spans: Callable[[], SpanTable], begin: Callable[[Reading], Begun]
) -> tuple[Reading, tuple[Replayer, Begun] | None]:
    """Read the steps that can be replayed; return also their replay, and what was begun beside it.

    Steps whose operations wait for each other in a cycle are left out, and so are steps without
    operations.

    Args:
        record: What was recorded.
        take_spans: Gives its spans.
        begin: Begins other work on a reading, before the replay is prepared.
    """
    run, steps = record.run, record.steps
    reading = read_run(run, take_spans, steps, num_earlier_steps=record.num_earlier_steps)
    while reading.steps:
        if not len(reading.model.rank):
            empty = dict.fromkeys(reading.steps, "its spans are in other steps")
            return replace(reading, left_out=reading.left_out | empty), None
        begun = begin(reading)
        try:
            return reading, (Replayer(reading.model), begun)
        except CycleError:
            cyclic = find_cycles(reading.model)
            if not cyclic:
                raise
        spans, kept = take_spans(), sorted(set(reading.steps) - set(cyclic))
        rest = read_run(
            run,
            partial(select_rows, spans, np.isin(spans.step, kept)),
            select_rows(steps, np.isin(steps.step, kept)),
            num_earlier_steps=len(steps),
        )
        reading = replace(
            rest,
            left_out=reading.left_out | rest.left_out | cyclic,
            startup_ns=reading.startup_ns,
            ending_ns=reading.ending_ns,
        )
    return reading, None


def _report_with_replay(
    record: Record,
    reading: Reading,
    replayer: Replayer,
    waiting: Future[Waiting],
    executor: Executor,
) -> RunReport:
    run = record.run
    begin_by_step = find_step_begins(record.spans)
    if reading.bounds_ns is not None:
        begins_ns = zip(reading.steps, reading.bounds_ns[0].tolist(), strict=True)
        begin_by_step = {step: (run.epochs[-1].epoch, begin_ns) for step, begin_ns in begins_ns}
    full_replays = executor.submit(_replay_in_full, record, reading, replayer)
    what_if_of_parts = executor.submit(what_if, replayer)
    quality = executor.submit(_assess_quality, record, reading, what_if_of_parts)
    placements, case, parts = _build_cases(record, reading, replayer)
    links = None if case is None else executor.submit(summarize_links, case.links)
    combined = combine_findings(_diagnose(run, case, parts), findings_of_record(record))
    named = (name_hosts(each, placements, record.run) for each in combined)
    findings = with_host_notes(named, record)
    full_ns, full_ideal_ns, waterfall = full_replays.result()
    result = what_if_of_parts.result()
    attribution, starved = waiting.result()
    summary = summarize_waterfall(waterfall, attribution)
    actual_ns = float(reading.actual_ns.mean())
    replayed_ns, ideal_ns = float(result.replayed_ns.mean()), float(result.ideal_ns.mean())
    slowdown = result.slowdown(result.replayed_ns)
    mfu = compute_mfu(
        run,
        record.steps,
        record.context.microbatches,
        usual=record.context.previous_mfu,
    )
    report = RunReport(
        run=run.run_id,
        source_format=run.source_format,
        epochs=tuple(epoch.epoch for epoch in run.epochs),
        world_size=run.world_size,
        layout=run.layout,
        coords=run.coords,
        placements=placements,
        steps=reading.steps,
        startup_s_by_step=_seconds(reading.startup_ns),
        ending_s_by_step=_seconds(reading.ending_ns),
        num_earlier_steps=record.num_earlier_steps,
        num_spans=len(record.spans),
        step_time_s=StepTimes(
            actual=actual_ns / NS_PER_S, replayed=replayed_ns / NS_PER_S, ideal=ideal_ns / NS_PER_S
        ),
        launch_slowdown=ratio(actual_ns, replayed_ns),
        replay_error_ratio=abs(full_ns / actual_ns - 1.0) if actual_ns > 0 else None,
        slowdown=slowdown,
        waste_ratio=None if slowdown is None else 1.0 - 1.0 / slowdown,
        slowdown_by_kind=_slowdowns(result, result.by_kind_ns),
        slowdown_by_dp=_slowdowns(result, result.by_dp_ns),
        slowdown_by_stage=_slowdowns(result, result.by_stage_ns),
        slowdown_by_worker=result.worker_slowdowns(),
        exact_slowdown_by_worker=_slowdowns(result, result.by_worker_ns),
        slowdown_by_step={
            step: ratio(float(result.replayed_ns[k]), float(result.ideal_ns[k]))
            for k, step in enumerate(reading.steps)
        },
        actual_s_by_step=_seconds_by_step(reading.steps, reading.actual_ns),
        ideal_s_by_step=_seconds_by_step(reading.steps, full_ideal_ns),
        m_w=result.m_w,
        m_s=result.m_s,
        findings=findings,
        starved=starved,
        mfu=mfu,
        tokens_by_step={} if mfu else count_tokens(run, record.steps),
        squares_by_step=sum_squares(record.context.microbatches),
        missing_mfu="" if mfu else explain_missing_mfu(run, record.steps),
        quality=quality.result(),
        excess=_excess(None if case is None else case.profile),
        paced=run.paced,
        bandwidth=measure_bandwidths(
            reading.transfers, {rank: info.host for rank, info in run.ranks.items()}
        ),
        links=None if links is None else links.result(),
        waterfall=summary,
        waited_links=_waited_links(reading.transfers, starved, summary.waiting_on),
        direct_waits=sum_direct_waits(
            waterfall,
            attribution,
            num_ranks=int(reading.model.rank.max(initial=0)) + 1,
            total_ns=int(reading.actual_ns.sum()),
        ),
        common_pauses=() if case is None else list_pauses(case.common_pauses, case.profile.steps),
        planned_steps=() if case is None else case.planned_steps,
        culprits=compare_culprits(result) if result.by_worker_ns else None,
    )
    top = grade_findings(report).top_finding
    return replace(
        report,
        findings=with_cards(with_proofs(findings, reading, begin_by_step), record, case),
        evidence=tabulate_evidence(top, case, waterfall),
    )


def _find_waiting(run: RunInfo, reading: Reading) -> Waiting:
    attribution = attribute_waits(reading.model, reading.waits, reading.transfers.link_of_operation)
    total_ns = dict.fromkeys(run.ranks, int(reading.actual_ns.sum()))
    return attribution, find_starved_ranks(reading.waits, attribution, total_ns)


def _waited_links(
    transfers: Transfers, starved: tuple[Starved, ...], waiting_on: tuple[WaitsOn, ...]
) -> dict[int, WaitedLink]:
    entries = (*waiting_on, *(on for waiting in starved for on in waiting.waits_on))
    numbers = sorted({on.link for on in entries if on.link is not None})
    links = ((number, transfers.links[number]) for number in numbers)
    return {
        number: WaitedLink(members=link.members, kind=link.kind, is_pair=link.is_pair)
        for number, link in links
    }


def _replay_in_full(
    record: Record, reading: Reading, replayer: Replayer
) -> tuple[float, NDArray[np.float64], Waterfall]:
    """Return the recorded mean step and the ideal steps of the full replay, and the waterfall.

    Returns:
        Mean in ns; shape (steps,), ns; parts of the steps.
    """
    full_ns, ideal_ns = float(replayer.full_recorded().mean()), replayer.full_ideal()
    waterfall = build_waterfall(record.run, reading, record.steps, ideal=replayer.full_ideal_times)
    return full_ns, ideal_ns, waterfall


def _assess_quality(record: Record, reading: Reading, result: Future[WhatIf]) -> Quality:
    return assess_quality(
        record.run,
        record.spans,
        record.steps,
        reading,
        samples=record.context.samples,
        has_worker_slowdown=bool(result.result().by_dp_ns),
    )


def _build_case(record: Record, reading: Reading, replayer: Replayer) -> Case | None:
    """Compare the ranks' compute, at equal lengths if these are declared; None without any."""
    if not len(reading.items):
        return None
    equalized = equalize_declared_lengths(reading.items, record.context.microbatches)
    work = declared_work(reading.items, record.context.microbatches) if equalized is None else ()
    profile = compare_with_peers(
        reading.items if equalized is None else equalized,
        record.run.coords,
        calls=reading.calls,
        work=work,
        is_equalized=equalized is not None,
    )
    return Case(
        reading=reading,
        profile=profile,
        replayer=replayer,
        ranks=record.run.ranks,
        steps=record.steps,
        context=record.context,
        slowdown=ratio(float(replayer.recorded().mean()), float(replayer.ideal().mean())),
        tokens_by_step=count_tokens(record.run, record.steps),
        equalized=equalized,
        work=work,
    )


def _build_cases(
    record: Record, reading: Reading, replayer: Replayer
) -> tuple[tuple[RankPlacements, ...], Case | None, tuple[Case, ...]]:
    """Return the placements of the ranks, the whole run's case, and one of each placement."""
    placements = find_placements(record.run, record.steps, reading.steps)
    parts = [
        _build_case(_in_placement(record, each), reading.in_steps(np.array(each.steps)), replayer)
        for each in (placements if len(placements) > 1 else ())
    ]
    whole = _build_case(record, reading, replayer)
    return placements, whole, tuple(part for part in parts if part is not None)


def _in_placement(record: Record, placements: RankPlacements) -> Record:
    """Return the epochs and steps of a run between two restarts that moved ranks."""
    epochs = tuple(epoch for epoch in record.run.epochs if epoch.epoch in placements.epochs)
    return replace(
        record,
        run=replace(record.run, epochs=epochs),
        steps=select_rows(record.steps, np.isin(record.steps.step, placements.steps)),
    )


def _diagnose(run: RunInfo, case: Case | None, parts: tuple[Case, ...]) -> tuple[Finding, ...]:
    """Return the findings of the replay, or why there can be none."""
    overruns = run.pace_overrun_ratio
    if run.paced and overruns is not None and overruns > MAX_OVERRUN_RATIO:
        return (
            insufficient(
                f"{format_percent(overruns, digits=1)} of a rank's paced compute overran its target"
                f" by more than 10 %; at most {format_percent(MAX_OVERRUN_RATIO)} may. The machine"
                " is too busy for this pace: use a longer one (--pace-ms) or fewer ranks"
            ),
        )
    if case is None:
        return (insufficient("the run has no forward or backward compute to compare"),)
    return diagnose(case, parts)


def _report_without_spans(record: Record, *, is_whole_run: bool) -> RunReport:
    """Report how a run ended that has no spans.

    Raises:
        EmptyRunError: The run did not end with a finding, or only some of its steps were requested.
    """
    run = record.run
    if is_whole_run:
        findings = findings_of_record(record)
        has_dumps = any(event.kind == FLIGHT_RECORDER for event in record.context.events)
        if has_dumps or any(ends_run(finding) for finding in findings):
            return _report_without_replay(record, findings, None)
    fatal = find_crashes(run, record.context, record.steps)
    crashes = "; ".join(finding.evidence for finding in fatal)
    num_invalid = run.account.dropped.get(INVALID)
    invalid = [f"{format_count(num_invalid, 'record')} were invalid"] if num_invalid else []
    raise EmptyRunError(
        f"run {run.run_id!r} has no spans in the requested steps; "
        + (f"it died: {crashes}" if crashes else "; ".join((*invalid, "see `rankscope runs`")))
    )


def _report_without_replay(
    record: Record, findings: tuple[Finding, ...], reading: Reading | None
) -> RunReport:
    run, spans = record.run, record.spans
    steps = tuple(sorted_unique(spans.step).tolist())
    actual_ns = np.array([_duration_ns(spans, step) for step in steps], dtype=np.int64)
    reason = left_out_sentence({} if reading is None else reading.left_out)
    nothing = NO_STEP_ENDED if len(spans) and not len(record.steps) else "nothing was recorded"
    unknown = insufficient(f"no step can be replayed: {reason or nothing}")
    is_known = not reason and any(finding.cause == unknown.cause for finding in findings)
    mfu = compute_mfu(
        run,
        record.steps,
        record.context.microbatches,
        usual=record.context.previous_mfu,
    )
    return RunReport(
        run=run.run_id,
        source_format=run.source_format,
        epochs=tuple(epoch.epoch for epoch in run.epochs),
        world_size=run.world_size,
        layout=run.layout,
        coords=run.coords,
        steps=steps,
        num_spans=len(spans),
        step_time_s=StepTimes(
            actual=float(np.mean(actual_ns)) / NS_PER_S if steps else None,
            replayed=None,
            ideal=None,
        ),
        actual_s_by_step=_seconds_by_step(steps, actual_ns),
        findings=with_cards(
            with_host_notes(combine_findings(() if is_known else (unknown,), findings), record),
            record,
            None,
        ),
        mfu=mfu,
        tokens_by_step={} if mfu else count_tokens(run, record.steps),
        missing_mfu="" if mfu else explain_missing_mfu(run, record.steps),
        quality=assess_quality(run, spans, record.steps, reading),
        excess=_excess(None),
        paced=run.paced,
    )


def _duration_ns(spans: SpanTable, step: int) -> int:
    """Return the time from the first begin to the last end of a step's spans."""
    of_step = select_rows(spans, spans.step == step)
    return int((of_step.start_ns + of_step.duration_ns).max() - of_step.start_ns.min())


def _slowdowns(result: WhatIf, times: Mapping[K, NDArray[np.float64]]) -> dict[K, float | None]:
    return {key: result.slowdown(value) for key, value in times.items()}


def _seconds_by_step(
    steps: tuple[int, ...], times_ns: NDArray[np.int64] | NDArray[np.float64]
) -> dict[int, float]:
    return {step: float(time) / NS_PER_S for step, time in zip(steps, times_ns, strict=True)}


def _seconds(times_ns: Mapping[int, int]) -> dict[int, float]:
    return {step: time_ns / NS_PER_S for step, time_ns in times_ns.items()}


def _excess(profile: ComputeProfile | None) -> RankStepExcess:
    if profile is None:
        return RankStepExcess(ranks=(), steps=(), excess_ns=np.zeros((0, 0)))
    return RankStepExcess(
        ranks=tuple(profile.ranks.tolist()),
        steps=tuple(profile.steps.tolist()),
        excess_ns=profile.total_ns - np.nanmedian(profile.total_ns, axis=0),
    )
