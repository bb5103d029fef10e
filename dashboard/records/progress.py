"""Progress of an unfinished analysis, and what is known of the run without one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankscope.analysis.report.report import Finding, Mfu
    from rankscope.analysis.trace.tables import RunSummary
    from rankscope.tracer.span import SpanKind


class Activity(StrEnum):
    """The current part of an analysis."""

    WAITING = "waiting"
    """Other runs are analysed first."""

    READING = "reading"
    """The records of the ranks are read."""

    COMPARING = "comparing"
    """The steps are replayed and the ranks compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of an analysis."""

    activity: Activity
    num_spans: int = 0
    """Spans read so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedSteps:
    """Steps as the ranks marked them, which needs no span."""

    epochs: tuple[int, ...]
    """Ascending, those that have steps."""

    actual_s_by_step: Mapping[int, float]
    """First begin to last end over all ranks, in step order; of a repeated step, the last epoch's.
    An analysis may refine it by the device's times."""

    mfu: Mfu | None
    """Of the newest of these steps; None if it cannot be known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanKindTimes:
    """Mean time per rank by step and kind of span, from the rollups of closed steps.

    Kinds nest and overlap, so they do not add up to the step time.
    """

    revision: int
    """Changes whenever the rollups do."""

    busy_s: Mapping[SpanKind, Mapping[int, float]]
    """By kind and step: time with at least one span of the kind; of a repeated step, the last
    epoch's."""

    exposed_s: Mapping[SpanKind, Mapping[int, float]]
    """Communication kinds only: the part of ``busy_s`` that no compute of the rank hides."""

    wait_s: Mapping[SpanKind, Mapping[int, float]]
    """Communication kinds only: from a rank's arrival to the last member's. A step is missing if
    the wait of any of its spans is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisInProgress:
    """A diagnosis that is being made."""

    run: RunSummary
    progress: Progress
    elapsed_s: float
    """Time since it was requested."""

    steps: MarkedSteps | None
    """None: they are being read as well."""

    earlier_findings: tuple[Finding, ...] = ()
    """Findings that were open when the run was last analysed, by an earlier server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisFailed:
    """A diagnosis that could not be made."""

    run: RunSummary
    reason: str
    """In one line."""

    steps: MarkedSteps | None
