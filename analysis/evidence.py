"""Evidence of the top finding by rank or link, and by step, for a heat-map."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from .arrays.sorting import stable_argsort
from .breakdown.waterfall import CODE, Part
from .report.report import RankStepExcess

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .breakdown.waterfall import Waterfall
    from .causes.detector import Case
    from .causes.link_profile import LinkProfile
    from .report.report import Finding

MAX_LINKS = 512
"""Links of a heat-map, those with the largest excess: a screen has hardly more lines."""


class Baseline(Enum):
    """Baseline of a quantity of one rank in one step."""

    MEDIAN_RANK = "the step's median rank"
    MEDIAN_STEP = "the rank's median step"
    """For what all ranks do at once, where the median rank does it too."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """Time that a cause takes, as parts of the waterfall."""

    name: str
    parts: tuple[Part, ...]
    baseline: Baseline = Baseline.MEDIAN_RANK


QUANTITIES: dict[str, Quantity] = {
    "data-stall": Quantity("input and gaps of the host", (Part.INPUT, Part.HOST_GAP)),
    "gc-pause": Quantity("garbage collection and gaps of the host", (Part.GC, Part.HOST_GAP)),
    "host-stall": Quantity("gaps of the host", (Part.HOST_GAP,)),
    "launch-skew": Quantity("gaps of the host before a launch", (Part.HOST_GAP,)),
    "checkpoint": Quantity(
        "saving and gaps of the host", (Part.CHECKPOINT, Part.HOST_GAP), Baseline.MEDIAN_STEP
    ),
    "common-pause": Quantity(
        "gaps of the host", (Part.HOST_GAP, Part.INPUT, Part.UNKNOWN), Baseline.MEDIAN_STEP
    ),
}
"""By cause. The others are seen in the compute of each rank, which the report has in any case, or
in `TRANSFERS`."""

TRANSFERS = frozenset({"slow-link", "network-degradation"})
"""Causes that are seen in the transfers of links."""


def tabulate_evidence(
    finding: Finding, case: Case | None, waterfall: Waterfall
) -> RankStepExcess | None:
    """Return the quantity in which a finding is seen, above what is usual.

    Returns:
        None if that is the compute of each rank, or nothing is known of it.
    """
    if finding.cause in TRANSFERS:
        return None if case is None else _transfers(case.links)
    quantity = QUANTITIES.get(finding.cause)
    if quantity is None:
        return None
    known = np.where(waterfall.total_ns > 0, 0.0, np.nan)
    taken_ns = known + waterfall.time_ns[:, :, [CODE[part] for part in quantity.parts]].sum(axis=2)
    axis = 0 if quantity.baseline is Baseline.MEDIAN_RANK else 1
    return RankStepExcess(
        quantity=quantity.name,
        baseline=quantity.baseline.value,
        ranks=tuple(waterfall.ranks.tolist()),
        steps=waterfall.steps,
        excess_ns=taken_ns - _median(taken_ns, axis=axis),
    )


def _transfers(profile: LinkProfile) -> RankStepExcess:
    """Return the transfer time of each link above that of alike ones, the slowest link first."""
    excess_ns = profile.total_ns - profile.expected_ns
    slowest = stable_argsort(-np.nansum(excess_ns, axis=1))[:MAX_LINKS]
    links = profile.transfers.links
    return RankStepExcess(
        quantity="transfers",
        baseline="alike links",
        ranks=tuple(range(len(slowest))),
        links=tuple(links[link].members for link in slowest.tolist()),
        steps=tuple(profile.steps.tolist()),
        excess_ns=excess_ns[slowest],
    )


def _median(values: NDArray[np.float64], *, axis: int) -> NDArray[np.float64]:
    """Return the median of what is known, with the axis kept; NaN where nothing is."""
    known = np.isfinite(values).any(axis=axis, keepdims=True)
    found = np.nanmedian(np.where(known, values, 0.0), axis=axis, keepdims=True)
    return np.where(known, found, np.nan)
