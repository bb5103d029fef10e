"""Invariance of a diagnosis: rank numbers, clocks, unit of time. For rows, see `test_analyze`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.trace.rows import column_names, select_rows
from rankscope.analysis.trace.tables import SpanTable, StepTable
from rankscope.tracer.span import SpanFlag
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Scenario, TpDetail
from tests.support.analysis.cluster import Source
from tests.support.rankscope.simulated_source import SimulatedSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.trace.tables import RunInfo

T = TypeVar("T", SpanTable, StepTable)
RUN = "simulated"
ERROR_NS = 200_000
FAULTS = (
    ("slow-compute:rank=5,factor=1.3,steps=3-9",),
    ("slow-link:src=8,dst=16,factor=3",),
    ("host-stall:rank=7,ms=5", "data-stall:rank=20,ms=60"),
    (),
)


@functools.cache
def recorded(faults: tuple[str, ...]) -> Source:
    """Return a simulated run with read-only columns, because tests share it."""
    scenario = Scenario(
        dp=4,
        pp=4,
        tp=2,
        num_steps=10,
        seed=3,
        tp_detail=TpDetail.COARSE,
        faults=parse_simulated_faults(faults),
    )
    source = SimulatedSource(scenario)
    spans, steps = source.spans(RUN), source.steps(RUN)
    for table in (spans, steps):
        for name in column_names(table):
            getattr(table, name).setflags(write=False)
    return Source(source.run_info(RUN), spans, steps, around=source.context(RUN))


@functools.cache
def unchanged(faults: tuple[str, ...]) -> RunReport:
    """Return the diagnosis of the run as recorded."""
    return analyze_run(recorded(faults), RUN)


def findings(report: RunReport) -> list[tuple[str, tuple[int, ...], tuple[int, int] | None]]:
    return [(finding.cause, finding.ranks, finding.steps) for finding in report.findings]


def stretched(source: Source) -> Source:
    def longer(table: T, *names: str) -> T:
        return replace(table, **{name: getattr(table, name) * 3 for name in names})

    return replace(
        source,
        info=replace(source.info, clock_error_ns=(source.info.clock_error_ns or 0) * 3),
        span_table=longer(source.span_table, "start_ns", "duration_ns", "launch_ns"),
        step_table=longer(source.step_table, "start_ns", "end_ns"),
    )


def shifted(source: Source, error_ns: int = ERROR_NS) -> Source:
    """Return the run with each host's clock shifted by at most half of the clock error."""
    rng = np.random.default_rng(1)
    hosts = {info.rank: info.host for info in source.info.epochs[0].ranks}
    offset = {
        host: int(rng.integers(-error_ns, error_ns) // 2) for host in sorted(set(hosts.values()))
    }
    of_rank = np.array([offset[hosts[rank]] for rank in sorted(hosts)])
    spans, steps = source.span_table, source.step_table
    by_span, by_step = of_rank[spans.rank], of_rank[steps.rank]
    known = (source.info.clock_error_ns or 0) + error_ns
    return replace(
        source,
        info=replace(source.info, clock_error_ns=known),
        span_table=replace(
            spans, start_ns=spans.start_ns + by_span, launch_ns=spans.launch_ns + by_span
        ),
        step_table=replace(steps, start_ns=steps.start_ns + by_step, end_ns=steps.end_ns + by_step),
    )


@dataclass(frozen=True)
class Relabelled:
    source: Source
    old_rank: tuple[int, ...]


def relabelled(source: Source) -> Relabelled:
    """Return the run with other rank numbers; groups, coordinates and hosts stay with the rank."""
    world = source.info.world_size
    new = np.random.default_rng(2).permutation(world)

    def renumbered(info: RunInfo) -> RunInfo:
        epoch = info.epochs[0]
        ranks = sorted(
            (replace(rank, rank=int(new[rank.rank])) for rank in epoch.ranks),
            key=lambda rank: rank.rank,
        )
        groups = tuple(
            replace(group, members=tuple(sorted(int(new[rank]) for rank in group.members)))
            for group in epoch.groups
        )
        return replace(info, epochs=(replace(epoch, ranks=tuple(ranks), groups=groups),))

    def numbers(column: np.ndarray) -> np.ndarray:
        return np.where(column >= 0, new[np.maximum(column, 0)], column).astype(np.int32)

    spans, steps = source.span_table, source.step_table
    micro = source.around.microbatches
    moved = replace(
        source,
        info=renumbered(source.info),
        span_table=replace(
            spans,
            rank=numbers(spans.rank),
            src_rank=numbers(spans.src_rank),
            dst_rank=numbers(spans.dst_rank),
        ),
        step_table=replace(steps, rank=numbers(steps.rank)),
        around=replace(
            source.around,
            manifests=(),
            exits=(),
            microbatches=replace(micro, rank=numbers(micro.rank)),
        ),
    )
    return Relabelled(moved, tuple(np.argsort(new).tolist()))


@pytest.mark.slow
@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("change", [stretched, shifted])
def test_a_diagnosis_stays_the_same(
    change: Callable[[Source], Source], faults: tuple[str, ...]
) -> None:
    changed = change(recorded(faults))

    assert findings(analyze_run(changed, RUN)) == findings(unchanged(faults))


@pytest.mark.slow
@pytest.mark.parametrize("faults", FAULTS)
def test_other_rank_numbers_change_only_the_numbers(faults: tuple[str, ...]) -> None:
    moved = relabelled(recorded(faults))

    found = findings(analyze_run(moved.source, RUN))

    as_before = [
        (cause, tuple(sorted(moved.old_rank[rank] for rank in ranks)), steps)
        for cause, ranks, steps in found
    ]
    assert as_before == findings(unchanged(faults))


def test_one_traced_rank_of_each_worker_is_enough() -> None:
    source = recorded(("slow-compute:rank=4,factor=1.3",))
    kept = {info.rank for info in source.info.epochs[0].ranks if info.coords.tp == 0}
    epoch = source.info.epochs[0]
    ranks = tuple(rank for rank in epoch.ranks if rank.rank in kept)
    spans, steps = source.span_table, source.step_table
    one_each = replace(
        source,
        info=replace(source.info, epochs=(replace(epoch, ranks=ranks),)),
        span_table=select_rows(spans, np.isin(spans.rank, list(kept))),
        step_table=select_rows(steps, np.isin(steps.rank, list(kept))),
        around=replace(source.around, manifests=(), exits=()),
    )

    report = analyze_run(one_each, RUN)

    assert findings(report) == [("slow-compute", (4,), (0, 9))]
    assert report.quality.coverage_ratio == 1.0
    assert any(
        "one tensor-parallel rank of each worker" in warning for warning in report.quality.warnings
    )


def unmeasured(source: Source) -> Source:
    """Return the run without the errors of its clocks."""
    (epoch,) = source.info.epochs
    ranks = tuple(replace(info, clock_error_ns=None) for info in epoch.ranks)
    info = replace(source.info, clock_error_ns=None, epochs=(replace(epoch, ranks=ranks),))
    return replace(source, info=info)


@pytest.mark.slow
@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("error_ns", [4_000_000, 7_200_000_000_000])
def test_clocks_that_nothing_measured_change_nothing(
    faults: tuple[str, ...], error_ns: int
) -> None:
    off = shifted(recorded(faults), error_ns=error_ns)

    report = analyze_run(unmeasured(off), RUN)

    assert findings(report) == findings(unchanged(faults))
    assert report.quality.clock_error_ns is not None
    assert report.quality.clock_error_ns < 50_000
    assert any("never measured: aligned with sim-00000" in each for each in report.quality.warnings)


@pytest.mark.slow
@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("rate_ppm", [1.0, 60.0])
def test_clocks_that_drift_unmeasured_change_nothing(
    faults: tuple[str, ...], rate_ppm: float
) -> None:
    report = analyze_run(unmeasured(drifting(recorded(faults), rate_ppm)), RUN)

    assert findings(report) == findings(unchanged(faults))


def drifting(source: Source, rate_ppm: float) -> Source:
    """Return the run as hosts record it whose clocks gain more, host by host."""
    info = {one.rank: one for one in source.info.epochs[0].ranks}
    hosts = sorted({one.host for one in info.values()})
    rate = np.array([hosts.index(info[rank].host) for rank in sorted(info)]) * rate_ppm * 1e-6
    begin_ns = int(source.step_table.start_ns.min())

    def later(at_ns: np.ndarray, rank: np.ndarray) -> np.ndarray:
        after_ns = at_ns - begin_ns
        moved: np.ndarray = at_ns + np.rint(rate[rank] * after_ns).astype(np.int64)
        return moved

    spans, steps = source.span_table, source.step_table
    start_ns = later(spans.start_ns, spans.rank)
    end_ns = later(spans.start_ns + spans.duration_ns, spans.rank)
    return replace(
        source,
        span_table=replace(
            spans,
            start_ns=start_ns,
            duration_ns=end_ns - start_ns,
            launch_ns=np.where(
                spans.launch_ns > 0, later(spans.launch_ns, spans.rank), spans.launch_ns
            ),
        ),
        step_table=replace(
            steps,
            start_ns=later(steps.start_ns, steps.rank),
            end_ns=later(steps.end_ns, steps.rank),
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("rate_ppm", [-0.1, -20.0])
def test_a_drift_that_an_agent_aligned_changes_nothing(
    faults: tuple[str, ...], rate_ppm: float
) -> None:
    # GIVEN begins that are mapped by a drift, so that a span may begin before its predecessor ends
    source = recorded(faults)
    spans, steps = source.span_table, source.step_table
    begin_ns = int(steps.start_ns.min())

    def drift_ns(at_ns: np.ndarray) -> np.ndarray:
        return np.floor(rate_ppm * 1e-6 * (at_ns - begin_ns)).astype(np.int64)

    mapped = replace(
        source,
        span_table=replace(
            spans,
            start_ns=spans.start_ns + drift_ns(spans.start_ns),
            launch_ns=spans.launch_ns + drift_ns(spans.launch_ns) * (spans.launch_ns > 0),
        ),
        step_table=replace(
            steps,
            start_ns=steps.start_ns + drift_ns(steps.start_ns),
            end_ns=steps.end_ns + drift_ns(steps.start_ns),
        ),
    )

    # WHEN it is analysed, THEN findings are those of the run without
    assert findings(analyze_run(mapped, RUN)) == findings(unchanged(faults))


def ahead(source: Source, share: float) -> Source:
    """Return the run with hosts that are ahead of their devices by a share of a step."""
    spans, steps = source.span_table, source.step_table
    early_ns = int(share * float(np.median(steps.end_ns - steps.start_ns)))
    on_device = (spans.flags & SpanFlag.HOST_CLOCK) == 0
    launch_ns = np.where(spans.launch_ns > 0, spans.launch_ns, spans.start_ns) - early_ns
    return replace(
        source,
        span_table=replace(
            spans,
            start_ns=np.where(on_device, spans.start_ns, spans.start_ns - early_ns),
            launch_ns=launch_ns,
        ),
        step_table=replace(
            steps, start_ns=steps.start_ns - early_ns, end_ns=steps.end_ns - early_ns
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.4, 1.6])
@pytest.mark.parametrize("faults", FAULTS)
def test_hosts_ahead_of_their_devices_change_nothing(faults: tuple[str, ...], share: float) -> None:
    # GIVEN a job, and the same with hosts that are ahead
    before = unchanged(faults)

    # WHEN both are analysed
    found = analyze_run(ahead(recorded(faults), share), RUN)

    # THEN findings are the same and times nearly so; only the idle time of the device before its
    # first step is unknown
    expected = [
        (cause, ranks, (1, steps[1]) if cause == "data-stall" and steps else steps)
        for cause, ranks, steps in findings(before)
    ]
    assert findings(found) == expected
    assert found.step_time_s.actual == pytest.approx(before.step_time_s.actual, rel=0.05)
    assert found.step_time_s.replayed == pytest.approx(before.step_time_s.replayed, rel=0.01)
    assert found.step_time_s.ideal == pytest.approx(before.step_time_s.ideal, rel=0.01)
