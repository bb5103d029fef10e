"""Fit of a clock's offset and drift to the bounds that probes set, with an error bound.

Each probe sets an upper bound on the offset at one time and a lower bound at another. A delay
moves a bound away from the true offset, never past it. So only the tightest bounds, those with
the lowest delay in each direction, determine the fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from rankscope.tracer.span import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.tracer.span import MonotonicNs

    from .probe import Probe


MAX_DRIFT_PPB = 500_000
"""Largest rate difference of two clocks. Source: adjtimex(2) corrects a frequency by at most
500 ppm; a quartz stays within 100 ppm."""

WANDER_PPB = 1_000
"""Largest deviation of the rate from its mean within the window. Source: the rate of an
uncompensated quartz changes by up to 1 ppm if the temperature changes by a few degrees."""

ROUNDING_NS = 2
"""Both clocks are read in whole ns, and the result is rounded."""


class Bound(NamedTuple):
    """An upper or lower bound of the offset at ``at_s``, relative to a common zero."""

    at_s: float
    offset_ns: float


class Line(NamedTuple):
    """Offset of a clock over time, and the distance between the bounds along it."""

    offset_ns: float
    """At time 0."""

    drift_ppb: float
    margin_ns: float
    """Smallest upper bound - largest lower bound along the line; negative if no line fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFit:
    """Offset of the reference from a host's clock at one time, and its drift.

    The true offset at ``t`` is within ``clock_error_ns + |t - at_ns| drift_error_ppb / 1e9`` of
    the line if the rate stays within `WANDER_PPB` of its mean.
    """

    at_ns: MonotonicNs
    offset_ns: int
    drift_ppb: int
    clock_error_ns: int
    drift_error_ppb: int
    """Wander included."""


def fit_clock(
    probes: Sequence[Probe],
    *,
    wander_ppb: int = WANDER_PPB,
    max_drift_ppb: int = MAX_DRIFT_PPB,
) -> ClockFit | None:
    """Return the offset at the end of the newest probe; None if no line fits all probes.

    The line has the slope with the largest margin between upper and lower bounds, and is halfway
    between them: the true one if the lowest delays of both directions are equal. Its error is the
    distance to the farthest line that the bounds allow, so it also holds if one direction is
    slower.

    Args:
        probes: At least one, the newest last.
        wander_ppb: Largest deviation of the rate from its mean; old bounds are widened by it.
        max_drift_ppb: Largest mean rate difference.

    Source:
        Bounds and their hulls: Duda, Harrus, Haddad, Bernard, "Estimating global time in
        distributed systems" (ICDCS 1987).
    """
    newest = probes[-1]
    zero_ns, base_ns = newest.returned_ns, newest.replied_ns - newest.returned_ns
    uppers = [
        Bound(
            (probe.sent_ns - zero_ns) / NS_PER_S, float(probe.received_ns - probe.sent_ns - base_ns)
        )
        for probe in probes
    ]
    lowers = [
        Bound(
            (probe.returned_ns - zero_ns) / NS_PER_S,
            float(probe.replied_ns - probe.returned_ns - base_ns),
        )
        for probe in probes
    ]
    wide_uppers = lower_hull([_widened(bound, 1, wander_ppb) for bound in uppers])
    wide_lowers = upper_hull([_widened(bound, -1, wander_ppb) for bound in lowers])
    line = widest_line(lower_hull(uppers), upper_hull(lowers), max_drift_ppb=max_drift_ppb)
    if line.margin_ns < 0:
        line = widest_line(wide_uppers, wide_lowers, max_drift_ppb=max_drift_ppb)
    if line.margin_ns < 0:
        return None
    corners = allowed_lines(wide_uppers, wide_lowers, max_drift_ppb=max_drift_ppb)
    if not corners:
        return None
    error_ns = max(abs(corner[0] - line.offset_ns) for corner in corners)
    drift_error_ppb = max(abs(corner[1] - line.drift_ppb) for corner in corners)
    return ClockFit(
        at_ns=zero_ns,
        offset_ns=base_ns + round(line.offset_ns),
        drift_ppb=round(line.drift_ppb),
        clock_error_ns=int(error_ns) + 1 + ROUNDING_NS,
        drift_error_ppb=int(drift_error_ppb) + 2 + wander_ppb,
    )


def lower_hull(bounds: Sequence[Bound]) -> list[Bound]:
    """Return the upper bounds that a straight line can touch from below, in order of time."""
    hull: list[Bound] = []
    for bound in sorted(bounds):
        while len(hull) > 1 and _turns_down(hull[-2], hull[-1], bound):
            hull.pop()
        hull.append(bound)
    return hull


def upper_hull(bounds: Sequence[Bound]) -> list[Bound]:
    """Return the lower bounds that a straight line can touch from above, in order of time."""
    mirrored = lower_hull([Bound(bound.at_s, -bound.offset_ns) for bound in bounds])
    return [Bound(bound.at_s, -bound.offset_ns) for bound in mirrored]


def widest_line(uppers: Sequence[Bound], lowers: Sequence[Bound], *, max_drift_ppb: int) -> Line:
    """Return the line halfway between the bounds, at the slope with the largest margin.

    The margin is concave and piecewise linear in the slope, with corners at the hulls' edges.
    """
    slopes = []
    for hull in (uppers, lowers):
        slopes += [
            (last.offset_ns - first.offset_ns) / (last.at_s - first.at_s)
            for first, last in pairwise(hull)
            if first.at_s < last.at_s
        ]
    known = [slope for slope in slopes if abs(slope) <= max_drift_ppb]
    best = _largest_margin([0.0, *known], uppers, lowers)
    if best.margin_ns >= 0:
        return best
    # Only now: a single probe has a slightly larger margin at the steepest slope.
    return _largest_margin(
        [best.drift_ppb, -float(max_drift_ppb), float(max_drift_ppb)], uppers, lowers
    )


def _largest_margin(
    slopes: Sequence[float], uppers: Sequence[Bound], lowers: Sequence[Bound]
) -> Line:
    return max(
        (_halfway(slope, uppers, lowers) for slope in slopes), key=lambda line: line.margin_ns
    )


def _halfway(slope: float, uppers: Sequence[Bound], lowers: Sequence[Bound]) -> Line:
    top = min(bound.offset_ns - slope * bound.at_s for bound in uppers)
    bottom = max(bound.offset_ns - slope * bound.at_s for bound in lowers)
    return Line((top + bottom) / 2, slope, top - bottom)


def allowed_lines(
    uppers: Sequence[Bound], lowers: Sequence[Bound], *, max_drift_ppb: int
) -> list[tuple[float, float]]:
    """Return the corners (offset at time 0, slope) of the set of lines within all bounds."""
    far_ns = 4 * (
        max(abs(bound.offset_ns) + max_drift_ppb * abs(bound.at_s) for bound in (*uppers, *lowers))
        + 1
    )
    steep = float(max_drift_ppb)
    corners = [(-far_ns, -steep), (far_ns, -steep), (far_ns, steep), (-far_ns, steep)]
    for bound in uppers:
        corners = _clipped(corners, bound, 1.0)
    for bound in lowers:
        corners = _clipped(corners, bound, -1.0)
    return corners


def _clipped(
    corners: Sequence[tuple[float, float]], bound: Bound, sign: float
) -> list[tuple[float, float]]:
    """Return the part of a convex set of lines that is on one side of a bound."""
    kept: list[tuple[float, float]] = []
    excess = [sign * (a + b * bound.at_s - bound.offset_ns) for a, b in corners]
    for index, corner in enumerate(corners):
        following = (index + 1) % len(corners)
        here, there = excess[index], excess[following]
        if here <= 0:
            kept.append(corner)
        if here < 0 < there or there < 0 < here:
            share = here / (here - there)
            a, b = corners[following]
            kept.append((corner[0] + share * (a - corner[0]), corner[1] + share * (b - corner[1])))
    return kept


def _widened(bound: Bound, side: int, wander_ppb: int) -> Bound:
    slack_ns = abs(wander_ppb * bound.at_s) + ROUNDING_NS
    return Bound(bound.at_s, bound.offset_ns + side * slack_ns)


def _turns_down(first: Bound, middle: Bound, last: Bound) -> bool:
    return (middle.at_s - first.at_s) * (last.offset_ns - first.offset_ns) <= (
        middle.offset_ns - first.offset_ns
    ) * (last.at_s - first.at_s)
