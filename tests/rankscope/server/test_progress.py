from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.report.report import RunReport
from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.analysis.trace.tables import RunSummary
from rankscope.dashboard.records.progress import Activity, AnalysisFailed, AnalysisInProgress
from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import Source, gpt_cluster
from tests.support.receiver import TIMEOUT_S
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from rankscope.analysis.trace.context import RunContext
    from rankscope.analysis.trace.tables import RunInfo, SpanTable, StepTable
    from rankscope.collector.store.store import Store

MS = 1_000_000


@dataclass
class SlowSource:
    """A source of the run "tiny" that blocks reads of spans until it is released."""

    whole: Source
    is_released: threading.Event = field(default_factory=threading.Event)
    is_reading: threading.Event = field(default_factory=threading.Event)
    fails: bool = False
    num_reads: int = 0
    num_spans: dict[str, int] = field(default_factory=lambda: {"tiny": 1000})
    read: set[str] = field(default_factory=set)

    def runs(self) -> tuple[RunSummary, ...]:
        info = self.whole.info
        return tuple(
            RunSummary(
                run_id=run_id,
                source_format="rankscope",
                state="ended",
                world_size=info.world_size,
                layout=info.layout,
                num_spans=num_spans,
                num_steps=3,
                started_ns=None,
            )
            for run_id, num_spans in self.num_spans.items()
        )

    def run_info(self, run_id: str) -> RunInfo:
        if run_id not in self.num_spans:
            raise UnknownRunError(run_id, tuple(self.num_spans))
        return self.whole.info

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        return self.whole.steps(run_id, first=first, last=last)

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        self.num_reads += 1
        self.read.add(run_id)
        self.is_reading.set()
        assert self.is_released.wait(TIMEOUT_S)
        if self.fails:
            raise ZeroDivisionError("a defect")
        return self.whole.spans(run_id, first=first, last=last)

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        return self.whole.context(run_id, first=first, last=last)


@pytest.fixture
def source() -> SlowSource:
    cluster = gpt_cluster(
        Layout(dp=2, tp=2), num_steps=3, forward_ns=lambda _rank, _step, _microbatch: 10 * MS
    )
    return SlowSource(
        Source(
            info=cluster.run_info(),
            span_table=cluster.span_table(),
            step_table=cluster.step_table(),
        )
    )


def test_the_provider_answers_while_the_run_is_analysed(source: SlowSource, store: Store) -> None:
    # GIVEN a run whose spans take long to read
    provider = StoreProvider(source, Reports(source), store=store, timeout_s=0)

    # WHEN a page requests its diagnosis
    provider.report("tiny")
    assert source.is_reading.wait(TIMEOUT_S)
    found = provider.report("tiny")

    # THEN it gets the progress, and later the diagnosis
    assert isinstance(found, AnalysisInProgress)
    assert found.progress.activity is Activity.READING
    assert found.run.world_size == 4
    source.is_released.set()
    deadline_s = time.monotonic() + TIMEOUT_S
    while not isinstance(provider.report("tiny"), RunReport):
        assert time.monotonic() < deadline_s, "the analysis never ended"


def test_two_clients_share_one_analysis(source: SlowSource, store: Store) -> None:
    provider = StoreProvider(source, Reports(source), store=store, timeout_s=TIMEOUT_S)

    with ThreadPoolExecutor(2) as clients:
        waiting = [clients.submit(provider.report, "tiny") for _ in range(2)]
        assert source.is_reading.wait(TIMEOUT_S)
        source.is_released.set()
        first, second = (one.result(TIMEOUT_S) for one in waiting)

    assert isinstance(first, RunReport)
    assert first is second
    assert source.num_reads == 1


def test_two_clients_share_one_timeline(source: SlowSource, store: Store) -> None:
    provider = StoreProvider(source, Reports(source), store=store, timeout_s=TIMEOUT_S)

    with ThreadPoolExecutor(2) as clients:
        waiting = [clients.submit(provider.timeline, "tiny", epoch=0, step=1) for _ in range(2)]
        assert source.is_reading.wait(TIMEOUT_S)
        source.is_released.set()
        first, second = (one.result(TIMEOUT_S) for one in waiting)

    assert first is not None
    assert first is second
    assert source.num_reads == 1


def test_a_defect_of_the_analysis_is_a_failure_with_its_reason(
    source: SlowSource, store: Store
) -> None:
    source.fails = True
    source.is_released.set()
    provider = StoreProvider(source, Reports(source), store=store, timeout_s=TIMEOUT_S)

    found = provider.report("tiny")

    assert isinstance(found, AnalysisFailed)
    assert found.reason == "ZeroDivisionError: a defect"


def test_a_small_run_does_not_wait_for_two_large_ones(source: SlowSource, store: Store) -> None:
    # GIVEN two large runs whose analyses take long
    provider = StoreProvider(source, Reports(source), store=store, timeout_s=0)
    source.num_spans = {"large": 9_000_000, "larger": 18_000_000, "tiny": 1000}
    provider.report("large")
    provider.report("larger")

    # WHEN a small one is requested
    provider.report("tiny")

    # THEN it is read at once
    wait_until(lambda: "tiny" in source.read)
    source.is_released.set()


def test_an_unknown_run_is_an_error_at_once(source: SlowSource, store: Store) -> None:
    provider = StoreProvider(source, Reports(source), store=store, timeout_s=0)

    with pytest.raises(UnknownRunError, match="no run 'other'"):
        provider.report("other")
