"""What the dashboard draws, from whoever has it finished."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rankscope.analysis.drawing.raster import StepPicture, Window
    from rankscope.analysis.drawing.rows import GroupBy
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.report.liveness import RankLiveness
    from rankscope.analysis.report.progress import AnalysisFailed, AnalysisInProgress
    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.trace.tables import RunSummary


class ReportProvider(Protocol):
    """Finished results of one store; an unknown run raises `trace.errors.UnknownRunError`.

    The pages call it from any thread, and ask for the same result again and
    again while a run trains: an implementation caches by `revision`.
    """

    def runs(self) -> tuple[RunSummary, ...]:
        """Return every run, the newest first."""
        ...

    def report(self, run_id: str) -> RunReport | AnalysisInProgress | AnalysisFailed | None:
        """Return the diagnosis; None while the run is known and has no step to analyse yet.

        It does not wait long: while the diagnosis is made it returns how far that is.
        """
        ...

    def verdict(self, report: RunReport) -> str:
        """Return the diagnosis in one sentence."""
        ...

    def timeline(self, run_id: str, *, epoch: int, step: int) -> StepTimeline | None:
        """Return one step; `analysis.trace.errors.EmptyRunError` where it holds no spans.

        None: it is being drawn, and there when it is asked for again.
        """
        ...

    def picture(
        self, run_id: str, *, epoch: int, step: int, group_by: GroupBy, window: Window | None = None
    ) -> StepPicture | None:
        """Return the pixels of a step, or of a part of it, where these are kept.

        None: draw them from `timeline`, which tells whether they are being drawn.
        """
        ...

    def window_spans(self, picture: StepPicture, *, max_spans: int) -> StepTimeline | None:
        """Return the spans of a picture's window; None if there are none or too many.

        The timeline's begin and end are the whole step's.
        """
        ...

    def picture_revision(self, run_id: str, *, epoch: int, step: int) -> int:
        """Return a number that changes whenever the kept picture of a step does."""
        ...

    def liveness(self, run_id: str) -> RankLiveness | None:
        """Return how many ranks of a live run are heard of; None where nobody tells of any."""
        ...

    def revision(self, run_id: str) -> int:
        """Return a number that changes whenever new data of the run came."""
        ...
