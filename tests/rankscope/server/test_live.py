from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.report.report import Finding, Severity
from rankscope.analysis.trace.context import EventRecord, RunContext
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.analysis.trace.rows import select_rows
from rankscope.analysis.trace.tables import RunSummary
from rankscope.collector.errors import StoreQueryError
from rankscope.collector.read.alerts import read_alerts
from rankscope.collector.read.findings import read_findings
from rankscope.server.alerting import Alerting
from rankscope.server.finding_tracker import LiveFindings
from rankscope.server.loops import MIN_PAUSE_NS, NO_SIGNS, LiveAnalysis
from rankscope.server.reports import Reports
from rankscope.server.run_failures import RunFailures
from rankscope.sources.stored_findings import record_findings
from rankscope.tracer.span import SpanFlag
from rankscope.tracer.topology import Coords, Layout
from tests.rankscope.server.test_upkeep import Clock
from tests.support.analysis.cluster import MS, Source, dp_group, gpt_cluster
from tests.support.analysis.training import Training

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from rankscope.analysis.trace.tables import RunInfo, SpanTable, StepTable
    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store

ONSET = 6


@dataclass
class Job(Training):
    """The job "tiny", of which the store has the steps up to ``newest``."""

    state: str = "running"

    def runs(self) -> tuple[RunSummary, ...]:  # type: ignore[override]
        return (
            RunSummary(
                run_id="tiny",
                source_format="rankscope",
                state=self.state,
                world_size=4,
                layout=self.whole.info.layout,
                num_spans=1,
                num_steps=self.newest + 1,
                started_ns=None,
            ),
        )


@dataclass
class WithBrokenRun(Job):
    """The same store with another run before it, whose data make the analysis fail."""

    failure: Exception | None = field(default_factory=lambda: KeyError("data of the job"))

    def runs(self) -> tuple[RunSummary, ...]:  # type: ignore[override]
        (tiny,) = super().runs()
        return replace(tiny, run_id="broken"), tiny

    def run_info(self, run_id: str) -> RunInfo:
        if run_id == "broken" and self.failure is not None:
            raise self.failure
        return replace(super().run_info(run_id), run_id=run_id)


@dataclass
class WithSlowHost(Job):
    """The same store, in which the rows of rank 3 for the last step arrive last."""

    has_arrived: bool = False

    def runs(self) -> tuple[RunSummary, ...]:  # type: ignore[override]
        (tiny,) = super().runs()
        return (replace(tiny, num_rows=2 if self.has_arrived else 1),)

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        table = super().steps(run_id, first=first, last=last)
        return select_rows(table, self._arrived(table))

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        table = super().spans(run_id, first=first, last=last)
        return select_rows(table, self._arrived(table))

    def _arrived(self, table: StepTable | SpanTable) -> NDArray[np.bool_]:
        arrived: NDArray[np.bool_] = (
            (table.rank != 3) | (table.step < self.newest) | self.has_arrived
        )
        return arrived


class StoreDown:
    """A store that answers no statement."""

    def rows(self, sql: str) -> list[Row]:
        raise StoreQueryError(f"no answer to {sql}")


@pytest.fixture(scope="module")
def whole() -> Source:
    """Rank 3 of four computes 1.8 times as long from step 6 to step 11."""
    cluster = gpt_cluster(
        Layout(dp=4),
        num_steps=18,
        forward_ns=lambda rank, step, _mb: (18 if rank == 3 and 6 <= step < 12 else 10) * MS,
    )
    return Source(cluster.run_info(), cluster.span_table(), cluster.step_table())


@dataclass
class Server:
    """The live analysis of one store, with the logged lines."""

    job: Job
    reports: Reports
    analysis: LiveAnalysis
    clock: Clock
    lines: list[str]

    def advance(self, newest: int) -> None:
        self.job.newest = newest
        self.clock.now_ns += MIN_PAUSE_NS
        self.analysis.turn()


def serve(
    store: Store,
    job: Job,
    *,
    before: tuple[RunSummary, ...] = (),
    failures: RunFailures | None = None,
    num_signs: Mapping[str, int] = NO_SIGNS,
) -> Server:
    clock, lines = Clock(), list[str]()
    reports = Reports(job, monotonic_ns=clock)
    alerting = Alerting(store, page_url=lambda run, *_: run)
    findings = LiveFindings(store, say=lines.append, unix_ns=lambda: 1_000 + job.newest)
    analysis = LiveAnalysis(
        job,
        reports,
        alerting,
        findings,
        before=before,
        failures=failures or RunFailures(store),
        num_signs=num_signs,
        monotonic_ns=clock,
    )
    return Server(job, reports, analysis, clock, lines)


def slow_rank_3(store: Store) -> list[tuple[int | None, int | None, int, int | None]]:
    return [
        (found.onset_step, found.last_step, found.opened_ns, found.closed_ns)
        for found in read_findings(store, "tiny")
        if (found.cause, found.ranks) == ("slow-compute", (3,))
    ]


@pytest.mark.slow
def test_late_rows_of_an_ended_run_are_analysed(empty_store: Store, whole: Source) -> None:
    # GIVEN an ended run that lacks the last step of rank 3
    job = WithSlowHost(whole, newest=17, state="ended")
    server = serve(empty_store, job)
    server.analysis.turn()
    first = server.reports.get("tiny")

    # WHEN it arrives
    job.has_arrived = True
    server.clock.now_ns += MIN_PAUSE_NS
    server.analysis.turn()
    second = server.reports.get("tiny")

    # THEN the diagnosis includes it
    assert first is not None
    assert second is not None
    assert (first.steps[-1], second.steps[-1]) == (16, 17)


@pytest.mark.slow
def test_a_finding_is_stored_with_its_onset_and_closed_when_it_ends(
    empty_store: Store, whole: Source
) -> None:
    server = serve(empty_store, Job(whole))
    for newest in range(18):
        server.advance(newest)

    ((onset, last, opened_ns, closed_ns),) = slow_rank_3(empty_store)
    assert (onset, last) == (ONSET, 11)
    assert 1_000 + ONSET <= opened_ns <= 1_000 + ONSET + 3
    assert closed_ns is not None
    lines = [line for line in server.lines if "slow-compute on rank 3" in line]
    assert len(lines) == 2
    assert lines[0].startswith(f"tiny: slow-compute on rank 3 since step {ONSET} (1 new step,")
    assert lines[1].startswith("tiny: slow-compute on rank 3 ended after step 11 (1 new step,")


@pytest.mark.slow
def test_a_finding_that_was_stored_with_the_report_is_not_opened_again(
    empty_store: Store, whole: Source
) -> None:
    # GIVEN a finding of a live run, and the report of the whole, which has a crash as well
    lines: list[str] = []
    live = LiveFindings(empty_store, say=lines.append)
    report = analyze_run(WithSlowHost(whole, newest=17), "tiny")
    live.update(report, is_over=False, cost=None)
    crash = Finding(
        cause="crash", ranks=(1,), confidence=0.95, evidence="", severity=Severity.CRITICAL
    )
    whole_report = replace(report, findings=(crash, *report.findings))
    record_findings(empty_store, whole_report)

    live.update(whole_report, is_over=True, cost=None)

    stored = [(found.number, found.cause) for found in read_findings(empty_store, "tiny")]
    assert len(stored) == len(dict(stored)) == len(report.findings) + 1
    assert [line for line in lines if "crash" in line] == ["tiny: crash on rank 1"]


@pytest.mark.slow
def test_a_finding_continues_after_a_restart_of_the_server(
    empty_store: Store, whole: Source
) -> None:
    job = Job(whole)
    first = serve(empty_store, job)
    for newest in range(9):
        first.advance(newest)
    ((onset, _, opened_ns, _),) = slow_rank_3(empty_store)

    second = serve(empty_store, job, before=job.runs())
    second.advance(10)

    assert slow_rank_3(empty_store) == [(onset, 10, opened_ns, None)]
    assert not [line for line in second.lines if "rank 3" in line]


def test_a_run_is_looked_at_every_few_seconds_and_less_often_without_progress(
    empty_store: Store, whole: Source
) -> None:
    server = serve(empty_store, Job(whole))
    server.advance(3)
    server.job.newest = 4
    server.analysis.turn()
    assert server.reports.revision("tiny") == 1  # not yet due

    server.advance(4)
    assert server.reports.revision("tiny") == 2
    num_reads = []
    for _ in range(40):
        server.advance(4)
        num_reads.append(server.job.num_looks)
    looks = len(set(num_reads))
    assert 10 <= looks <= 20  # of 40: the pauses grow from 2 to 16 s in these 160 s

    server.advance(5)
    assert server.reports.revision("tiny") == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "failure", [KeyError("data of the job"), EmptyRunError("broken has no step")]
)
def test_a_run_that_cannot_be_analysed_does_not_stop_the_others(
    empty_store: Store, whole: Source, failure: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN a run whose data make the analysis fail, before another run
    server = serve(empty_store, WithBrokenRun(whole, failure=failure))

    # WHEN both train
    for newest in range(9):
        server.advance(newest)

    # THEN the other is analysed, and the failure is logged once, without data of the job
    assert len(slow_rank_3(empty_store)) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not analysed" in line]
    assert line.startswith("rankscope: broken: not analysed: ")
    assert "data of the job" not in line


@pytest.mark.slow
def test_a_statement_that_fails_for_one_run_is_tried_again_and_stops_no_other(
    empty_store: Store, whole: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN a run whose spans need more memory than a statement may have, before another run
    failure = StoreQueryError("memory limit exceeded", code=241)
    server = serve(empty_store, WithBrokenRun(whole, failure=failure))

    for newest in range(9):
        server.advance(newest)

    # THEN the other is analysed, and the failure is logged once
    assert len(slow_rank_3(empty_store)) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not analysed" in line]
    assert line == "rankscope: broken: not analysed: memory limit exceeded"

    # AND it is analysed without new steps once the statement succeeds
    assert isinstance(server.job, WithBrokenRun)
    server.job.failure = None
    for _ in range(10):
        server.advance(8)
    assert server.reports.revision("broken") == 1


def test_a_store_that_does_not_answer_is_no_failure_of_one_run(
    empty_store: Store, whole: Source
) -> None:
    job = WithBrokenRun(whole, failure=StoreQueryError("no answer"), newest=3)
    down = StoreDown()
    server = serve(empty_store, job, failures=RunFailures(down))  # type: ignore[arg-type]

    with pytest.raises(StoreQueryError):
        server.advance(3)


@pytest.mark.slow
def test_a_hang_is_found_without_a_new_step(empty_store: Store, whole: Source) -> None:
    server = serve(empty_store, Job(whole))
    server.advance(3)
    group = dp_group(Layout(dp=4), Coords())
    entry = {
        "name": "all_reduce",
        "kind": "dp-comm",
        "step": 4,
        "group_id": f"{group:016x}",
        "seq": 99,
    }
    stalled = tuple(
        EventRecord(epoch=0, rank=rank, at_ns=1, kind="stalled", text="", data={"open": [entry]})
        for rank in (0, 1, 3)
    )

    server.job.whole = replace(whole, around=RunContext(events=stalled))
    for _ in range(3):
        server.advance(3)

    hangs = [found for found in read_findings(empty_store, "tiny") if found.cause == "hang"]
    (hang,) = hangs
    assert (hang.ranks, hang.onset_step, hang.closed_ns) == ((2,), 4, None)
    assert [line for line in server.lines if "hang on rank 2" in line] == [
        "tiny: hang on rank 2 since step 4 (1 new step, window of 4, analysed in 0.00 s)"
    ]


def test_a_stalled_rank_is_looked_at_once_the_events_of_all_hosts_are_there(
    empty_store: Store, whole: Source
) -> None:
    # GIVEN a job without progress, whose next look would be in 16 s
    signs: Counter[str] = Counter()
    server = serve(empty_store, Job(whole), num_signs=signs)
    for newest in (3, *[4] * 40):
        server.advance(newest)
    looks = server.job.num_looks

    def wait(seconds: int) -> int:
        server.clock.now_ns += seconds * 1_000_000_000
        server.analysis.turn()
        return server.job.num_looks - looks

    # WHEN the first event is stored, and another one a second later
    signs["tiny"] += 1
    assert wait(1) == 0
    signs["tiny"] += 1
    assert (wait(1), wait(1)) == (0, 0)

    # THEN it is analysed two seconds after that
    assert wait(1) > 0


def test_a_hang_shows_in_the_open_spans_of_the_unfinished_step(
    empty_store: Store, whole: Source
) -> None:
    # GIVEN ranks 0, 1 and 3 inside an all-reduce of step 4, which rank 2 never enters
    spans, steps = whole.span_table, whole.step_table
    last = np.flatnonzero((spans.step == 4) & (spans.group_id != 0))
    instance = spans.seq[last] == spans.seq[last].max()
    stuck = last[instance & (spans.rank[last] != 2)]
    flags = spans.flags.copy()
    flags[stuck] |= np.uint16(SpanFlag.OPEN)
    keep = (spans.step < 4) | ((spans.step == 4) & (spans.rank != 2))
    keep[stuck] = True
    hung = replace(
        whole,
        span_table=select_rows(replace(spans, flags=flags), keep),
        step_table=select_rows(steps, steps.step < 4),
    )
    server = serve(empty_store, Job(hung))
    server.advance(3)

    # WHEN the spans are stored, without the end of the step
    server.job.newest = 4
    for _ in range(3):
        server.advance(4)

    # THEN the diagnosis has the hang
    report = server.reports.get("tiny")
    assert report is not None
    assert [found.ranks for found in report.findings if found.cause == "hang"] == [(2,)]
    assert report.steps == (0, 1, 2, 3)


def test_a_run_that_ended_long_before_the_start_is_not_analysed(
    empty_store: Store, whole: Source
) -> None:
    job = Job(whole, newest=10, state="ended")
    server = serve(empty_store, job, before=job.runs())

    server.advance(10)

    assert server.reports.revision("tiny") == 0
    assert read_alerts(empty_store) == ()
