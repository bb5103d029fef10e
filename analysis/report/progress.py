"""An analysis that is not finished: what it does just now, and what is known of the run without."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..trace.tables import RunSummary
    from .report import Finding, Mfu


class Doing(StrEnum):
    """What an analysis does."""

    WAITING = "waiting"
    """Others are made before it."""

    READING = "reading"
    """It reads what the ranks recorded."""

    COMPARING = "comparing"
    """It replays the steps and compares the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """How far an analysis is."""

    doing: Doing
    num_spans: int = 0
    """Spans that it has read so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSteps:
    """Steps as their ranks marked them; nothing of it needs a span."""

    epochs: tuple[int, ...]
    """Ascending, those that have steps."""

    actual_s_by_step: Mapping[int, float]
    """First begin to last end over all ranks, in step order; of a repeated step, the last epoch's.
    An analysis may refine it by what the devices tell."""

    mfu: Mfu | None
    """Of the newest of these steps; None where it cannot be known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """A diagnosis that is being made."""

    run: RunSummary
    phase: Phase
    seconds: float
    """Since it was asked for."""

    seen: SeenSteps | None
    """None: these are being read as well."""

    told: tuple[Finding, ...] = ()
    """Findings that stood when the run was last analysed, by a server before this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A diagnosis that could not be made."""

    run: RunSummary
    why: str
    """In one line."""

    seen: SeenSteps | None
