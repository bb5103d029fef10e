"""Source of the dashboard's data: finished results of one store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.breakdown.run_history import RunHistory
    from rankscope.analysis.drawing.raster import StepPicture, Viewport
    from rankscope.analysis.drawing.rows import RowOrder
    from rankscope.analysis.drawing.selection import AlikeSpan
    from rankscope.analysis.drawing.step_replay import StepReplay
    from rankscope.analysis.drawing.timeline import StepTimeline, ViewportSpans
    from rankscope.analysis.goodput import Goodput
    from rankscope.analysis.report.liveness import RankLiveness, StepSilence
    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.trace.tables import RunSummary
    from rankscope.analysis.what_if import RunPlay
    from rankscope.dashboard.records.alert_list import AlertList
    from rankscope.dashboard.records.incident import Incident, IncidentView
    from rankscope.dashboard.records.page_results import (
        Health,
        RunAnnotations,
        RunComparison,
        RunLine,
        RunStrip,
        Startup,
    )
    from rankscope.dashboard.records.progress import (
        AnalysisFailed,
        AnalysisInProgress,
        MeanKindTimes,
    )
    from rankscope.dashboard.records.rank_details import RankDetails, RankQuantity, RankValues
    from rankscope.tracer.span import SpanKind


class ReportProvider(Protocol):
    """Finished results of one store; an unknown run raises `trace.errors.UnknownRunError`.

    Pages call it from any thread, and request the same result again and again while a run trains:
    an implementation caches results by `revision`. No call waits long: a result that is still
    being made is reported as such, and the page asks again.
    """

    def runs(self, *, max_age_ns: int = ...) -> tuple[RunSummary, ...]:
        """Return every run, the newest first, as of ``max_age_ns`` ago at most."""

    def report(self, run_id: str) -> RunReport | AnalysisInProgress | AnalysisFailed | None:
        """Return the diagnosis; None if the run is known but has no step to analyse yet."""

    def verdict(self, report: RunReport) -> str:
        """Return the diagnosis in one sentence."""

    def timeline(self, run_id: str, *, epoch: int, step: int) -> StepTimeline | None:
        """Return one step; None while it is being read.

        Raises:
            EmptyRunError: The step has no spans.
        """

    def picture(
        self,
        run_id: str,
        *,
        epoch: int,
        step: int,
        order: RowOrder,
        viewport: Viewport | None = None,
    ) -> StepPicture | None:
        """Return the stored picture of a step, or of a viewport of it.

        None if there is none: `timeline` then returns the step, or None while it is being read.
        """

    def viewport_spans(self, picture: StepPicture) -> ViewportSpans:
        """Return the spans of a picture's viewport, if it should be drawn from them.

        The timeline's begin and end are the whole step's.
        """

    def rank_spans(self, picture: StepPicture, ranks: Sequence[int]) -> StepTimeline | None:
        """Return the spans of some ranks of a picture's whole step; None if they are not read."""

    def ranks_of_step(
        self, run_id: str, *, epoch: int, step: int, ranks: Sequence[int]
    ) -> ViewportSpans:
        """Return the spans of some ranks of a step; begin and end are the whole step's.

        None are found if the run's format does not record groups, or nothing is stored.
        """

    def alike_spans(  # noqa: PLR0913  # what they have in common
        self,
        run_id: str,
        *,
        epoch: int,
        steps: Sequence[int],
        ranks: Sequence[int],
        kind: SpanKind,
        name: str,
        microbatch: int,
    ) -> tuple[AlikeSpan, ...]:
        """Return the spans of a kind, name and micro-batch in closed steps, on some ranks.

        Nothing if none are stored.
        """

    def step_replay(self, recorded: StepTimeline | StepPicture) -> StepReplay | None:
        """Return critical path, slack and ideal of a step; None while they are being made.

        Raises:
            AnalysisError: The step cannot be replayed, or has too many spans.
        """

    def play(self, run_id: str) -> RunPlay | None:
        """Return a run whose steps can be replayed with changes; None while it is being read.

        Raises:
            AnalysisError: No step can be replayed, or the run has too many spans.
        """

    def picture_revision(self, run_id: str, *, epoch: int, step: int) -> int:
        """Return a number that changes with the stored picture of a step."""

    def kind_times(self, run_id: str) -> MeanKindTimes | None:
        """Return the time by step and kind, which needs no analysis; None if no step is closed."""

    def history(self, run_id: str) -> RunHistory | None:
        """Return loss and epochs of the newest steps; None if no step has ended."""

    def goodput(self, run_id: str) -> Goodput | None:
        """Return what the time of a run was spent on, over all restarts; None if unknown."""

    def rank_details(self, report: RunReport, rank: int) -> RankDetails | None:
        """Return what is stored of a rank; None if it is unknown."""

    def rank_values(
        self, report: RunReport, quantity: RankQuantity, *, steps: tuple[int, int] | None
    ) -> RankValues | None:
        """Return a quantity of all ranks, mean of some steps; None if there is none.

        ``steps`` are the first and the last; None: the newest ones.
        """

    def liveness(self, run_id: str) -> RankLiveness | None:
        """Return which ranks of a live run are silent; None if it sent no heartbeats."""

    def silence(self, run_id: str) -> StepSilence | None:
        """Return since when a running job has ended no step; None if it goes on, or has ended."""

    def alerts(self) -> AlertList:
        """Return the alerts of all runs, the newest first, and the silences in force."""

    def acknowledge_alert(self, name: str) -> str:
        """Note that a person takes care of an alert; return what was done, or why not."""

    def silence_alert(self, name: str, *, for_s: float) -> str:
        """Silence an alert's cause on its ranks and hosts; return what was done, or why not."""

    def incident(self, run_id: str, number: int) -> IncidentView | None:
        """Return an incident of a run; None if the run has none of this number."""

    def incidents(self, run_id: str) -> tuple[Incident, ...]:
        """Return the incidents of a run, in the order in which they opened."""

    def incident_numbers(self, report: RunReport) -> tuple[int | None, ...]:
        """Return the number of the incident of each finding of a report; None: it has none."""

    def add_note(self, run_id: str, number: int, text: str, *, by: str) -> str:
        """Store a note about an incident; return why it was not stored, "" if it was."""

    def annotations(self, run_id: str) -> RunAnnotations:
        """Return the tags and notes of a run."""

    def annotate(
        self, run_id: str, kind: Literal["tag", "note"], text: str, *, is_removed: bool = False
    ) -> str:
        """Add a tag or a note, or remove it; return what was done, or why not."""

    def excluded_hosts(self, report: RunReport) -> tuple[str, ...]:
        """Return a sentence about each excluded host that the run of a report uses or has used."""

    def request_of_rank(self, run_id: str, rank: int, level: str, *, steps: int) -> str:
        """Request more of a running rank for some steps; return what was done, or why not.

        Args:
            level: ``full``, ``profile`` or ``stacks``.
            steps: Number of steps, 1 to 100.
        """

    def run_lines(self) -> tuple[RunLine, ...]:
        """Return every run with what stored results say of it, the newest first."""

    def strip(self, run_id: str) -> RunStrip | None:
        """Return the state of a run in one line; None if there is no such run."""

    def comparison(
        self,
        first: str,
        second: str,
        *,
        first_steps: tuple[int, int] | None = None,
        second_steps: tuple[int, int] | None = None,
    ) -> RunComparison | AnalysisFailed | None:
        """Return two runs, or ranges of their steps, side by side; None while being made."""

    def startup(self, run_id: str) -> Startup | None:
        """Return the start-up of a run's newest epoch; None if no span is outside the steps."""

    def step_trace(
        self,
        run_id: str,
        *,
        epoch: int,
        step: int,
        ranks: tuple[int, ...],
        window_ns: tuple[int, int] | None = None,
    ) -> str:
        """Return the spans of a step, or of some of its ranks or time, as a file for Perfetto.

        ``window_ns`` is from the start of the step's first span.

        Raises:
            EmptyRunError: There are no such spans, or too many.
        """

    def health(self) -> Health | None:
        """Return the state of the server; None if it is unknown."""

    def revision(self, run_id: str) -> int:
        """Return a number that changes whenever new data of the run is stored."""
