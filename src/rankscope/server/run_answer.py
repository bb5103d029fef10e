"""The report of a run, with all that other tables of the store add to it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rankscope.analysis.analyze import analyze_known
from rankscope.analysis.breakdown.host_moves import find_moves, format_move
from rankscope.analysis.report.document import to_document
from rankscope.analysis.severity import ends_run
from rankscope.collector.client.served_store import ServedStore

from ..doctor.confirmation import confirm_findings, confirmation_document
from ..sources.excluded_hosts import format_excluded_host, read_excluded_hosts
from ..sources.finding_history import FindingHistory, recurrence_document
from ..sources.goodput import read_goodput
from ..sources.incidents import number_findings
from ..sources.rank_states import read_rank_states
from ..sources.store_source import StoreSource
from ..sources.stored_reports import StoredReports
from .reports import find_run
from .served_report import fetch_report

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.analysis.breakdown.host_moves import HostMove
    from rankscope.analysis.goodput import Goodput
    from rankscope.analysis.recurrence import Recurrence
    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.trace.context import RunContext
    from rankscope.analysis.trace.tables import RunInfo, SpanSource, SpanTable
    from rankscope.collector.store.store import Store

    from ..sources.excluded_hosts import ExcludedHost
    from ..terminal.rank_states import RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAnswer:
    """A report, and what the store says about it."""

    report: RunReport
    recurrences: tuple[Recurrence | None, ...]
    """Of each finding."""

    numbers: tuple[int | None, ...]
    """Incident of each finding; None if it has none."""

    states: tuple[RankState, ...]
    """Of a run that hangs or has crashed."""

    moves: tuple[HostMove, ...]
    excluded: tuple[ExcludedHost, ...]
    goodput: Goodput | None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about hosts that the run left, or should leave."""
        moves = (f"{format_move(move)}." for move in self.moves)
        return (*moves, *map(format_excluded_host, self.excluded))

    def to_document(self, store: Store) -> dict[str, Any]:
        """Return what `rankscope analyze --json` prints.

        Raises:
            StoreError: The checks of the hosts could not be read.
        """
        document = to_document(self.report)
        confirmed = confirm_findings(store, self.report.run, self.report.findings)
        for finding, recurrence, number, checks in zip(
            document["findings"], self.recurrences, self.numbers, confirmed, strict=True
        ):
            finding["follows"] = recurrence_document(recurrence)
            finding["incident"] = number
            finding["host_checks"] = confirmation_document(checks)
        document["goodput"] = self.goodput and self.goodput.to_document()
        document["rank_states"] = [asdict(state) for state in self.states]
        document["host_moves"] = [asdict(move) for move in self.moves]
        document["excluded_hosts"] = [asdict(host) for host in self.excluded]
        return document


def read_answer(
    store: Store, run: RunInfo, report: RunReport, *, rank: int | None = None
) -> RunAnswer:
    """Return what the store says about a report of a run.

    Args:
        rank: The only rank whose state is read. None: all.

    Raises:
        StoreError: The store could not be read.
    """
    (state,) = (each.state for each in StoreSource(store).runs() if each.run_id == run.run_id)
    return RunAnswer(
        report=report,
        recurrences=FindingHistory(store).follow_report(report, run),
        numbers=number_findings(store, report),
        states=read_rank_states(store, run, report, rank=rank)
        if ends_run(report.top_finding)
        else (),
        moves=tuple(find_moves(report)),
        excluded=read_excluded_hosts(store, report),
        goodput=read_goodput(store, run.run_id, report, state=state),
    )


def find_or_analyze(
    store: Store,
    run: RunInfo,
    *,
    steps: tuple[int | None, int | None],
    is_fresh: bool = False,
    show: Callable[[str], None] = lambda _: None,
) -> RunReport:
    """Return the report of a run that is known already, or analyse the run and keep its report.

    Args:
        run: The run, of that store.
        steps: First and last step; None: from the first, to the last.
        is_fresh: Whether to analyse it anyway.
        show: Takes a line about the progress.

    Raises:
        EmptyRunError: The run has no spans in these steps.
        StoreError: The store could not be read.
    """
    source = StoreSource(store)
    is_whole = steps == (None, None)
    report = _find_report(store, run.run_id) if is_whole and not is_fresh else None
    if report is None:
        report = analyze_known(_ShownSource(source, show), run, first=steps[0], last=steps[1])
        if is_whole and not store.read_only:
            StoredReports(store).keep(find_run(source, run.run_id), report)
    return report


def _find_report(store: Store, run_id: str) -> RunReport | None:
    """Return the report of an ended run that the server of the store shows, or that is stored."""
    if isinstance(store, ServedStore):
        return fetch_report(store.server, run_id)
    return StoredReports(store).find(find_run(StoreSource(store), run_id))


class _ShownSource:
    """A source that shows what is read of it."""

    def __init__(self, source: SpanSource, show: Callable[[str], None]) -> None:
        self._source, self._show = source, show
        self.runs, self.run_info, self.steps = source.runs, source.run_info, source.steps

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        self._show(f"reading the spans of run {run_id}")
        found = self._source.spans(run_id, first=first, last=last)
        self._num_spans = len(found)
        return found

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        """Return the context of these steps, which is read last."""
        found = self._source.context(run_id, first=first, last=last)
        self._show(f"replaying and comparing {self._num_spans:,} spans of run {run_id}")
        return found
