from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.report.report import RunReport
from rankscope.analysis.trace.account import account_records
from rankscope.analysis.trace.errors import EmptyRunError, UnknownRunError
from rankscope.analysis.trace.tables import RunInfo, RunSummary, StepTable
from rankscope.analysis.verdict import verdict_sentence
from rankscope.server.http_server import read_account
from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import Source, gpt_cluster
from tests.support.receiver import TIMEOUT_S

if TYPE_CHECKING:
    from rankscope.analysis.trace.context import RunContext
    from rankscope.analysis.trace.tables import SpanTable
    from rankscope.collector.store.store import Store

MS = 1_000_000
NUM_STEPS = 8


@dataclass
class GrowingSource:
    """A source of the run "tiny" with its first ``num_steps`` steps."""

    whole: Source
    num_steps: int
    state: str = "running"
    num_reads: int = 0
    known: list[str] = field(default_factory=lambda: ["tiny"])

    def runs(self) -> tuple[RunSummary, ...]:
        info = self.whole.info
        return tuple(
            RunSummary(
                run_id=run_id,
                source_format="rankscope",
                state=self.state,
                world_size=info.world_size,
                layout=info.layout,
                num_spans=1000 * self.num_steps,
                num_steps=self.num_steps,
                started_ns=None,
            )
            for run_id in self.known
        )

    def run_info(self, run_id: str) -> RunInfo:
        return self.whole.info

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        return self.whole.steps(run_id, first=first, last=self._last(last))

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        self.num_reads += 1
        return self.whole.spans(run_id, first=first, last=self._last(last))

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        return self.whole.context(run_id, first=first, last=self._last(last))

    def _last(self, last: int | None) -> int:
        newest = self.num_steps - 1
        return newest if last is None else min(last, newest)


@pytest.fixture(scope="module")
def whole() -> Source:
    """A job of 2 x 2 ranks in which rank 3 computes 1.8 times as long."""
    cluster = gpt_cluster(
        Layout(dp=2, tp=2),
        num_steps=NUM_STEPS,
        forward_ns=lambda rank, _step, _microbatch: 18 * MS if rank == 3 else 10 * MS,
    )
    return Source(
        info=cluster.run_info(), span_table=cluster.span_table(), step_table=cluster.step_table()
    )


def test_a_run_is_analysed_at_the_first_request_only(whole: Source) -> None:
    source = GrowingSource(whole, num_steps=NUM_STEPS, state="ended")
    reports = Reports(source)

    first, second = reports.get("tiny"), reports.get("tiny")

    assert first is not None
    assert first.top_finding.ranks == (3,)
    assert second is first
    assert source.num_reads == 1


def test_a_run_that_has_grown_is_analysed_again_with_a_new_revision(
    whole: Source, store: Store
) -> None:
    source = GrowingSource(whole, num_steps=4)
    reports = Reports(source)
    provider = StoreProvider(source, reports, store=store, timeout_s=TIMEOUT_S)
    before = provider.report("tiny")
    revision = provider.revision("tiny")

    source.num_steps = 6
    reports.refresh(source.runs()[0])
    after = provider.report("tiny")

    assert isinstance(before, RunReport)
    assert isinstance(after, RunReport)
    assert before.steps[-1] == 3
    assert after.steps[-1] == 5
    assert provider.revision("tiny") != revision
    assert provider.verdict(after) == verdict_sentence(after)


def test_a_run_without_steps_has_no_report_and_an_unknown_one_is_an_error(whole: Source) -> None:
    reports = Reports(GrowingSource(whole, num_steps=0))

    assert reports.get("tiny") is None
    with pytest.raises(UnknownRunError, match="no run 'other'"):
        reports.get("other")


def test_timelines_are_cached_until_the_run_grows(whole: Source, store: Store) -> None:
    source = GrowingSource(whole, num_steps=4)
    reports = Reports(source)
    provider = StoreProvider(source, reports, store=store, timeout_s=TIMEOUT_S)
    provider.report("tiny")

    drawn = provider.timeline("tiny", epoch=0, step=2)
    assert provider.timeline("tiny", epoch=0, step=2) is drawn
    source.num_steps = 5
    reports.refresh(source.runs()[0])

    assert provider.timeline("tiny", epoch=0, step=2) is not drawn
    with pytest.raises(EmptyRunError):
        provider.timeline("tiny", epoch=0, step=99)


def test_of_a_large_run_the_last_steps_are_replayed_and_all_count_for_the_mfu(
    whole: Source,
) -> None:
    info = replace(
        whole.info,
        flops_per_token=1.0,
        epochs=tuple(
            replace(epoch, ranks=tuple(replace(rank, peak_flops_per_s=1e9) for rank in epoch.ranks))
            for epoch in whole.info.epochs
        ),
    )
    source = GrowingSource(replace(whole, info=info), num_steps=NUM_STEPS, state="ended")

    report = Reports(source, max_spans=3000).get("tiny")  # of the 8,000 of the run

    assert report is not None
    assert report.steps == (5, 6, 7)
    assert report.num_earlier_steps == 5
    assert report.mfu is not None
    assert list(report.mfu.by_step) == list(range(NUM_STEPS))


def test_a_running_job_is_read_once_and_analysed_as_a_whole_when_it_ends(
    whole: Source,
) -> None:
    account = account_records(published=9, stored=7, dropped={"spool-full": 2})
    info = replace(whole.info, accounts={(0, 0): account})
    source = GrowingSource(replace(whole, info=info), num_steps=4)
    ticks = iter(range(0, 10**12, 250_000_000))
    reports = Reports(source, monotonic_ns=lambda: next(ticks), unix_ns=lambda: 0)
    reports.get("tiny")
    num_reads = source.num_reads

    source.num_steps = 7
    followed = reports.refresh(source.runs()[0])
    assert source.num_reads == num_reads + 1
    cost = reports.cost("tiny")
    assert cost is not None
    assert (cost.num_new_steps, cost.num_steps, cost.seconds) == (3, 7, 0.25)
    assert reports.refresh(source.runs()[0]) is followed
    assert reports.revision("tiny") == 2

    (metric,) = read_account(reports)
    assert metric.values == {"produced": 9.0, "stored": 7.0, "dropped": 2.0, "buffered": 0.0}

    source.num_steps, source.state = NUM_STEPS, "ended"
    ended = reports.refresh(source.runs()[0])
    (metric,) = read_account(reports)
    assert metric.values == {"dropped": 0.0}  # no job runs: all other numbers are unknown

    assert followed is not None
    assert ended is not None
    assert (len(followed.steps), len(ended.steps)) == (7, NUM_STEPS)
    assert ended.top_finding.ranks == followed.top_finding.ranks == (3,)
