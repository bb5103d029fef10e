"""Finished results of the pages beside the report: list of runs, strip, start-up, health."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.analysis.report.text import (
    UNKNOWN,
    format_change,
    format_part,
    format_percent,
    format_seconds,
    format_slowdown,
)

if TYPE_CHECKING:
    from rankscope.analysis.report.device_time import KernelChange
    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.analysis.statistics.step_change import StepChange
    from rankscope.analysis.trace.tables import RunSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """One run of the list of runs. What no stored result says is None, or "" for a text."""

    run: RunSummary
    cause: str = ""
    """Of the verdict; of a live run without one yet, of its worst recorded finding."""

    severity: str = ""
    ranks: tuple[int, ...] = ()
    """Ranks at fault, at most 512."""

    is_closed: bool = False
    """Whether the finding no longer shows."""

    verdict: str = ""
    """The whole sentence."""

    step_s: float | None = None
    """Mean step time."""

    mfu: float | None = None
    loss: float | None = None
    """Mean of the ranks in the last step."""

    duration_ns: int | None = None
    """First begin to last end of a step; of a live run, since its start."""

    num_dropped: int | None = None
    """Lost records."""

    is_silent: bool = False
    """Whether it is running and has ended no step for long."""

    lost_device_h: float | None = None
    """Price of its findings over their steps, times its ranks: hours of devices."""

    incident: int | None = None
    """Number of the finding that ``cause`` is of."""

    tags: tuple[str, ...] = ()
    excluded_hosts: tuple[str, ...] = ()
    """Excluded hosts on which it runs now."""

    model: str = ""
    num_microbatches: int | None = None
    """Of a step and data position, as the job declares it."""

    commit: str = ""
    """Of the job's code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownNote:
    """A note of a run."""

    text: str
    author: str
    written: str
    """Time in UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAnnotations:
    """Tags and notes of a run."""

    tags: tuple[str, ...] = ()
    notes: tuple[ShownNote, ...] = ()
    """The oldest first."""

    may_change: bool = False
    """Whether the session of the request may change them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStrip:
    """The state of a run in one line, below the header of each page."""

    run: RunSummary
    report: RunReport | None
    """Its last report."""

    age_ns: int | None
    """Time since the end of the last step of a live run."""

    is_silent: bool
    """Whether that is longer than the next step can take."""

    num_recent: int | None
    """Ranks with a recent heartbeat, of a live run that sends them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedNumber:
    """One quantity of two runs; None if unknown."""

    name: str
    first: float | None
    second: float | None
    ratio: float | None
    """Second over first."""

    @property
    def label(self) -> str:
        """The name without its unit, in the words of the overview."""
        name = self.name.partition(",")[0].removeprefix(PART)
        return _LABELS.get(name) or format_part(name)

    @property
    def cells(self) -> tuple[str, str, str]:
        """Both values and their change as text.

        The change of a step's time is in words, as in the verdict. Those of its parts are
        differences, which sum up to that of the step: a ratio of two short times is large and
        means nothing.
        """
        return self._text(self.first), self._text(self.second), self._change()

    def _change(self) -> str:
        if not self.name.startswith(PART):
            if self.ratio is None or not self.name.endswith(", s"):
                return format_slowdown(self.ratio)
            return format_change(self.ratio)
        if self.first is None or self.second is None:
            return UNKNOWN
        more_s = self.second - self.first
        return f"{'+' if more_s > 0 else ''}{format_seconds(more_s)}"

    def _text(self, value: float | None) -> str:
        if self.name.endswith(", s"):
            return format_seconds(value)
        if self.name == "MFU":
            return format_percent(value, digits=1)
        if self.name == "ranks" and value is not None:
            return f"{value:,.0f}"
        return format_slowdown(value)


PART = "time."
"""Prefix of the parts of the waterfall in `rankscope.comparison.Comparison.numbers`."""

_LABELS = {"slowdown S": "GPU slowdown", "launch slowdown": "host delays"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Two runs, or two ranges of steps, side by side."""

    first: RunReport
    second: RunReport
    step_change: StepChange
    settings: tuple[tuple[str, str | None, str | None], ...]
    """Settings of the manifests that differ: name, first, second; None: not set."""

    numbers: tuple[ComparedNumber, ...]
    parts_s: tuple[ComparedNumber, ...]
    """Mean seconds of a step by part of the waterfall."""

    appeared: tuple[Finding, ...]
    """Findings of the second alone: no finding of the first has the cause on one of the ranks, and
    matters as this one does or is minor as this one is."""

    disappeared: tuple[Finding, ...]
    remained: tuple[Finding, ...]
    """Findings of the second that the first has too."""

    kernels: tuple[KernelChange, ...] = ()
    """Kernels that differ, if both are profiles: the largest differences in time first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupPart:
    """One operation before the first step, such as the import of a library."""

    name: str
    kind: str
    num_ranks: int
    median_ns: int
    """Over the ranks that have it, as the sum of its spans on each."""

    longest_ns: int
    num_calls: int
    """Most spans of it on one rank: of a barrier, how often a rank waits for all others."""

    slowest_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupSpan:
    """One span of a start-up."""

    name: str
    begin_ns: int
    """Since the first begin of all ranks that are shown."""

    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStartup:
    """Start-up of one rank in one epoch."""

    rank: int
    host: str
    total_ns: int
    """First begin to last end of its spans outside steps, before its first step."""

    spans: tuple[StartupSpan, ...]
    """The longest ones, the longest first: a shorter one may lie within a longer one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """Spans outside steps of the newest epoch: imports, model, compilation, checkpoint."""

    epoch: int
    num_ranks: int
    parts: tuple[StartupPart, ...]
    """The longest first."""

    slowest: tuple[RankStartup, ...]
    """The ranks that took longest, the longest first."""

    median_ns: int
    """Of the ranks' totals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSection:
    """Checked quantities of one kind, as a table: a part in each row, a quantity in each column."""

    title: str
    about: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """The part's name, then the quantities with their units."""

    bad: frozenset[str] = frozenset()
    """Names of the parts that need attention."""

    texts: frozenset[str] = frozenset()
    """Columns with sentences or names; the others have numbers. A section with any is shown in the
    full width of the page, and its text is never marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """State of the server itself."""

    problems: tuple[str, ...]
    """Sentences; empty if all is well."""

    sections: tuple[HealthSection, ...]
