"""The proof card of a finding: its guilty quantity beside that of peers, as plain numbers.

A card has the same bounded size for 8 ranks as for 12,288: of many values it keeps an evenly spaced
part, with the smallest and the largest. Units are those of the quantities: ``ns``, ``bytes``,
``bytes/s``, ``Hz``, ``W``, or empty for a number without one.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_VALUES = 200
"""Values that a group of samples keeps: more do not show in a strip of some hundred pixels."""

MAX_POINTS = 400
"""Points of a cloud, and steps of a series."""

MAX_GROUPS = 8
"""Groups of samples of one strip, and rows of facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """Values of one quantity on some ranks, links or stages."""

    label: str
    """"rank 33", "31 peers of its stage"."""

    is_culprit: bool
    num: int
    """Of all values."""

    low: float
    median: float
    high: float
    values: tuple[float, ...]
    """Ascending, at most `MAX_VALUES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStrip:
    """One quantity of the culprits beside that of their peers."""

    quantity: str
    """"backward of one micro-batch"."""

    unit: str
    steps: str
    """Steps that the values are of, in words: "step 9"."""

    groups: tuple[SampleGroup, ...]
    """The culprits first. Without a second group there is nothing to compare them with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeries:
    """The sum of the guilty quantity in each step."""

    quantity: str
    unit: str
    steps: tuple[int, ...]
    culprit_label: str
    usual_label: str
    culprit: tuple[float | None, ...]
    """Shape (steps,): median of the culprits; None if unknown."""

    usual: tuple[float | None, ...]
    """Shape (steps,): median of the peers; None if unknown."""

    culprit_median: float | None
    """Median of ``culprit`` over the steps that show the finding."""

    usual_median: float | None
    """The same of ``usual``; over all steps if it has no value there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointCloud:
    """One quantity against another, a point for each micro-batch."""

    x_quantity: str
    x_unit: str
    y_quantity: str
    y_unit: str
    num: int
    """Of all points."""

    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofFact:
    """A fact about some ranks in words: a setting, the last operation, compile ids."""

    label: str
    """"rank 33", "63 others"."""

    text: str
    is_culprit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofCard:
    """The picture of a finding, for a reader who doubts it. Parts that a cause lacks are empty."""

    strips: tuple[SampleStrip, ...] = ()
    series: StepSeries | None = None
    cloud: PointCloud | None = None
    facts: tuple[ProofFact, ...] = ()
    onset: int | None = None
    """First step that shows the finding; None if that is the first of all, or none does."""
