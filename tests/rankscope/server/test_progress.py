from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.report.progress import Activity, AnalysisFailed, AnalysisInProgress
from rankscope.analysis.report.report import RunReport
from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.analysis.trace.tables import RunSummary
from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import Source, gpt_cluster
from tests.support.receiver import PATIENCE_S

if TYPE_CHECKING:
    from rankscope.analysis.trace.context import RunContext
    from rankscope.analysis.trace.tables import RunInfo, SpanTable, StepTable

MS = 1_000_000


@dataclass
class SlowSource:
    """One run, "tiny", whose spans can be read once they may be."""

    whole: Source
    may: threading.Event = field(default_factory=threading.Event)
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
        assert self.may.wait(PATIENCE_S)
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


def test_a_page_is_answered_while_the_run_is_analysed(source: SlowSource) -> None:
    # GIVEN a run whose spans take long to read
    provider = StoreProvider(source, Reports(source), patience_s=0)

    # WHEN a page asks for its diagnosis
    provider.report("tiny")
    assert source.is_reading.wait(PATIENCE_S)
    found = provider.report("tiny")

    # THEN it is told what is being done, and later the diagnosis
    assert isinstance(found, AnalysisInProgress)
    assert found.progress.activity is Activity.READING
    assert found.run.world_size == 4
    source.may.set()
    give_up_s = time.monotonic() + PATIENCE_S
    while not isinstance(provider.report("tiny"), RunReport):
        assert time.monotonic() < give_up_s, "the analysis never ended"


def test_two_visitors_have_a_run_analysed_once(source: SlowSource) -> None:
    provider = StoreProvider(source, Reports(source), patience_s=PATIENCE_S)

    with ThreadPoolExecutor(2) as visitors:
        waiting = [visitors.submit(provider.report, "tiny") for _ in range(2)]
        assert source.is_reading.wait(PATIENCE_S)
        source.may.set()
        first, second = (one.result(PATIENCE_S) for one in waiting)

    assert isinstance(first, RunReport)
    assert first is second
    assert source.num_reads == 1


def test_two_visitors_have_a_step_drawn_once(source: SlowSource) -> None:
    provider = StoreProvider(source, Reports(source), patience_s=PATIENCE_S)

    with ThreadPoolExecutor(2) as visitors:
        waiting = [visitors.submit(provider.timeline, "tiny", epoch=0, step=1) for _ in range(2)]
        assert source.is_reading.wait(PATIENCE_S)
        source.may.set()
        first, second = (one.result(PATIENCE_S) for one in waiting)

    assert first is not None
    assert first is second
    assert source.num_reads == 1


def test_a_defect_of_the_analysis_is_told_in_words(source: SlowSource) -> None:
    source.fails = True
    source.may.set()
    provider = StoreProvider(source, Reports(source), patience_s=PATIENCE_S)

    found = provider.report("tiny")

    assert isinstance(found, AnalysisFailed)
    assert found.reason == "ZeroDivisionError: a defect"


def test_a_small_run_does_not_wait_for_two_large_ones(source: SlowSource) -> None:
    # GIVEN two large runs whose analyses take long
    provider = StoreProvider(source, Reports(source), patience_s=0)
    source.num_spans = {"large": 9_000_000, "larger": 18_000_000, "tiny": 1000}
    provider.report("large")
    provider.report("larger")

    # WHEN a small one is asked for
    provider.report("tiny")

    # THEN it is read at once
    give_up_s = time.monotonic() + PATIENCE_S
    while "tiny" not in source.read:
        assert time.monotonic() < give_up_s, "it was never read"
        time.sleep(0.001)
    source.may.set()


def test_a_strange_run_is_told_at_once(source: SlowSource) -> None:
    provider = StoreProvider(source, Reports(source), patience_s=0)

    with pytest.raises(UnknownRunError, match="no run 'other'"):
        provider.report("other")
