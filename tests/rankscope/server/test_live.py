from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.trace.context import EventRecord, RunContext
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.analysis.trace.rows import select_rows
from rankscope.analysis.trace.tables import RunSummary
from rankscope.collector.errors import StoreQueryError
from rankscope.collector.read.alerts import read_alerts
from rankscope.collector.read.findings import read_findings
from rankscope.collector.store.store import open_store
from rankscope.server.alerting import Alerting
from rankscope.server.finding_tracker import Tracking
from rankscope.server.loops import MAX_PAUSE_NS, MIN_PAUSE_NS, LiveAnalysis
from rankscope.server.reports import Reports
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.cluster import MS, Source, dp_group, gpt_cluster
from tests.support.analysis.training import Training

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from rankscope.analysis.trace.tables import RunInfo, SpanTable, StepTable
    from rankscope.collector.store.store import Store

ONSET = 6


@dataclass
class Job(Training):
    """The job "tiny", of which the store has seen the steps up to ``newest``."""

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
class BrokenBeside(Job):
    """The same store with a run before it whose rows bring out a failure."""

    failure: Exception = field(default_factory=lambda: KeyError("what was sent"))

    def runs(self) -> tuple[RunSummary, ...]:  # type: ignore[override]
        (tiny,) = super().runs()
        return replace(tiny, run_id="broken"), tiny

    def run_info(self, run_id: str) -> RunInfo:
        if run_id == "broken":
            raise self.failure
        return super().run_info(run_id)


@dataclass
class HostBehind(Job):
    """The same store, to which rank 3's rows of the last step come after all others'."""

    has_come: bool = False

    def runs(self) -> tuple[RunSummary, ...]:  # type: ignore[override]
        (tiny,) = super().runs()
        return (replace(tiny, num_rows=2 if self.has_come else 1),)

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        table = super().steps(run_id, first=first, last=last)
        return select_rows(table, self._there(table))

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        table = super().spans(run_id, first=first, last=last)
        return select_rows(table, self._there(table))

    def _there(self, table: StepTable | SpanTable) -> NDArray[np.bool_]:
        there: NDArray[np.bool_] = (table.rank != 3) | (table.step < self.newest) | self.has_come
        return there


class Clock:
    """Stands still but for what a test adds."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture(scope="module")
def whole() -> Source:
    """Rank 3 of four computes 1.8 times as long from step 6 to step 11."""
    cluster = gpt_cluster(
        Layout(dp=4),
        num_steps=18,
        forward_ns=lambda rank, step, _mb: (18 if rank == 3 and 6 <= step < 12 else 10) * MS,
    )
    return Source(cluster.run_info(), cluster.span_table(), cluster.step_table())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"chdb://{tmp_path}") as opened:
        yield opened


@dataclass
class Server:
    """The live analysis of one store, with what it said."""

    job: Job
    reports: Reports
    analysis: LiveAnalysis
    clock: Clock
    said: list[str]

    def train(self, newest: int) -> None:
        self.job.newest = newest
        self.clock.now_ns += MIN_PAUSE_NS
        self.analysis.turn()


def serve(store: Store, job: Job, *, before: tuple[RunSummary, ...] = ()) -> Server:
    clock, said = Clock(), list[str]()
    reports = Reports(job, monotonic_ns=clock)
    alerting = Alerting(store, webhook=None, page_url=lambda run: run)
    tracking = Tracking(store, say=said.append, unix_ns=lambda: 1_000 + job.newest)
    analysis = LiveAnalysis(job, reports, alerting, tracking, before=before, monotonic_ns=clock)
    return Server(job, reports, analysis, clock, said)


def slow_rank_3(store: Store) -> list[tuple[int | None, int | None, int, int | None]]:
    return [
        (found.onset_step, found.last_step, found.opened_ns, found.closed_ns)
        for found in read_findings(store, "tiny")
        if (found.cause, found.ranks) == ("slow-compute", (3,))
    ]


def test_what_a_host_that_is_behind_brings_of_a_run_that_has_ended_is_analysed(
    store: Store, whole: Source
) -> None:
    # GIVEN a run that has ended, and rank 3's last step not there yet
    job = HostBehind(whole, newest=17, state="ended")
    server = serve(store, job)
    server.analysis.turn()
    first = server.reports.get("tiny")

    # WHEN it comes, soon after
    job.has_come = True
    server.clock.now_ns += MIN_PAUSE_NS
    server.analysis.turn()
    second = server.reports.get("tiny")

    # THEN what pages show has it
    assert first is not None
    assert second is not None
    assert (first.steps[-1], second.steps[-1]) == (16, 17)


def test_a_finding_is_stored_with_its_onset_and_closed_when_it_has_gone(
    store: Store, whole: Source
) -> None:
    server = serve(store, Job(whole))
    for newest in range(18):
        server.train(newest)

    ((onset, last, opened_ns, closed_ns),) = slow_rank_3(store)
    assert (onset, last) == (ONSET, 11)
    assert 1_000 + ONSET <= opened_ns <= 1_000 + ONSET + 3
    assert closed_ns is not None
    told = [line for line in server.said if "slow-compute on rank 3" in line]
    assert len(told) == 2
    assert told[0].startswith(f"tiny: slow-compute on rank 3 since step {ONSET} (1 new step,")
    assert told[1].startswith("tiny: slow-compute on rank 3 ended with step 11 (1 new step,")


def test_after_a_restart_of_the_server_the_same_finding_goes_on(
    store: Store, whole: Source
) -> None:
    job = Job(whole)
    first = serve(store, job)
    for newest in range(9):
        first.train(newest)
    ((onset, _, opened_ns, _),) = slow_rank_3(store)

    second = serve(store, job, before=job.runs())
    second.train(10)

    assert slow_rank_3(store) == [(onset, 10, opened_ns, None)]
    assert not [line for line in second.said if "rank 3" in line]


def test_a_run_is_looked_at_every_few_seconds_and_less_while_it_stands_still(
    store: Store, whole: Source
) -> None:
    server = serve(store, Job(whole))
    server.train(3)
    server.job.newest = 4
    server.analysis.turn()
    assert server.reports.revision("tiny") == 1  # not yet due

    server.train(4)
    assert server.reports.revision("tiny") == 2
    num_reads = []
    for _ in range(40):
        server.train(4)
        num_reads.append(server.job.num_looks)
    looks = len(set(num_reads))
    assert 3 <= looks <= 3 + 40 * MIN_PAUSE_NS // MAX_PAUSE_NS + 3

    server.train(5)
    assert server.reports.revision("tiny") == 3


@pytest.mark.parametrize(
    "failure", [KeyError("what was sent"), EmptyRunError("broken has no step")]
)
def test_a_run_that_cannot_be_analysed_costs_no_other_run_its_look(
    store: Store, whole: Source, failure: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN a run whose rows make the analysis fail, before one that is well
    server = serve(store, BrokenBeside(whole, failure=failure))

    # WHEN both train
    for newest in range(9):
        server.train(newest)

    # THEN the other is analysed, and the failure is told once, without what was sent
    assert len(slow_rank_3(store)) == 1
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "not analysed" in line]
    assert told.startswith("rankscope: broken: not analysed: ")
    assert "what was sent" not in told

    # and a store that is away is nobody's own failure
    assert isinstance(server.job, BrokenBeside)
    server.job.failure = StoreQueryError("the store is away")
    with pytest.raises(StoreQueryError):
        server.train(9)


def test_a_rank_that_falls_silent_is_told_although_no_step_comes(
    store: Store, whole: Source
) -> None:
    server = serve(store, Job(whole))
    server.train(3)
    group = dp_group(Layout(dp=4), Coords())
    entry = {"name": "all_reduce", "kind": "dp-comm", "step": 4, "group_id": f"{group:016x}"}
    standing = tuple(
        EventRecord(
            epoch=0,
            rank=rank,
            at_ns=1,
            kind="stalled",
            text="",
            data={"open": [{**entry, "seq": 99}]},
        )
        for rank in (0, 1, 3)
    )

    server.job.whole = replace(whole, around=RunContext(events=standing))
    for _ in range(3):
        server.train(3)

    hangs = [found for found in read_findings(store, "tiny") if found.cause == "hang"]
    assert [(found.ranks, found.onset_step, found.closed_ns) for found in hangs] == [
        ((2,), 4, None)
    ]
    assert [line for line in server.said if "hang on rank 2" in line] == [
        "tiny: hang on rank 2 since step 4 (1 new step, window of 4, analysed in 0.00 s)"
    ]


def test_an_old_run_that_stands_still_is_left_to_the_pages(store: Store, whole: Source) -> None:
    job = Job(whole, newest=10)
    server = serve(store, job, before=job.runs())

    server.train(10)

    assert server.reports.revision("tiny") == 0
    assert read_alerts(store) == ()
