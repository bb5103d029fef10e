"""Fit one line through the bounds that probes set on a clock's offset, and bound its error.

Each probe sets an upper bound on the offset at one time and a lower bound at another. What
a delay adds moves a bound away from the truth, never past it; so only the tightest bounds
(the lowest delays of each way) shape the result, and all others drop out by themselves.
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
"""Widest rate difference looked for. Source: adjtimex(2), a frequency is corrected by at
most 500 ppm; a quartz stays within 100 ppm."""

WANDER_PPB = 1_000
"""How far the rate may leave its mean within the window. Source: an uncompensated quartz
moves by up to 1 ppm when its room's temperature changes by a few degrees."""

ROUNDING_NS = 2
"""Both clocks are read in whole ns, and the result is rounded once more."""


class Bound(NamedTuple):
    """The offset at ``at_s`` is at most (or at least) ``offset_ns``, both from a common zero."""

    at_s: float
    offset_ns: float


class Line(NamedTuple):
    """A clock's offset over time, with how far both bounds keep apart along it."""

    offset_ns: float
    """At time 0."""

    drift_ppb: float
    room_ns: float
    """Smallest upper bound - largest lower bound along the line; negative: no line fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFit:
    """Offset of the reference from a host's clock at one time, and how it goes on.

    The true offset at ``t`` lies within ``clock_error_ns + |t - at_ns| drift_error_ppb / 1e9``
    of the line, as long as the rate stays within `WANDER_PPB` of its mean.
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
    """Return the offset at the newest probe's end; None where no single line fits the probes.

    The line is the one along which upper and lower bounds keep farthest apart, halfway
    between them: the estimate of least delay when both ways' lowest delays are alike. The
    error is measured from it to the farthest line that the bounds allow, so it also holds
    where one way is slower than the other.

    Args:
        probes: At least one, the newest last.
        wander_ppb: How far the rate may leave its mean; widens old bounds.
        max_drift_ppb: Widest mean rate difference that is possible.

    Source:
        Bounds and their hulls: Duda, Harrus, Haddad, Bernard, "Estimating global time in
        distributed systems" (ICDCS 1987).
    """
    newest = probes[-1]
    zero_ns, base_ns = newest.returned_ns, newest.replied_ns - newest.returned_ns
    uppers = [_upper(probe, zero_ns, base_ns) for probe in probes]
    lowers = [_lower(probe, zero_ns, base_ns) for probe in probes]
    wide_uppers = lower_hull([_widened(bound, 1, wander_ppb) for bound in uppers])
    wide_lowers = upper_hull([_widened(bound, -1, wander_ppb) for bound in lowers])
    line = widest_line(lower_hull(uppers), upper_hull(lowers), max_drift_ppb=max_drift_ppb)
    if line.room_ns < 0:
        line = widest_line(wide_uppers, wide_lowers, max_drift_ppb=max_drift_ppb)
    if line.room_ns < 0:
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
    """Return the upper bounds that some straight line can touch from below, in order of time."""
    hull: list[Bound] = []
    for bound in sorted(bounds):
        while len(hull) > 1 and _turns_down(hull[-2], hull[-1], bound):
            hull.pop()
        hull.append(bound)
    return hull


def upper_hull(bounds: Sequence[Bound]) -> list[Bound]:
    """Return the lower bounds that some straight line can touch from above, in order of time."""
    mirrored = lower_hull([Bound(bound.at_s, -bound.offset_ns) for bound in bounds])
    return [Bound(bound.at_s, -bound.offset_ns) for bound in mirrored]


def widest_line(uppers: Sequence[Bound], lowers: Sequence[Bound], *, max_drift_ppb: int) -> Line:
    """Return the line halfway between the bounds at the slope that leaves them most room.

    The room is concave and piecewise linear in the slope, with corners at the hulls' edges.
    """
    slopes = []
    for hull in (uppers, lowers):
        edges = (edge for edge in pairwise(hull) if edge[0].at_s < edge[1].at_s)
        slopes += [_slope(first, last) for first, last in edges]
    known = [slope for slope in slopes if abs(slope) <= max_drift_ppb]
    best = _roomiest([0.0, *known], uppers, lowers)
    if best.room_ns >= 0:
        return best
    # Only then: a first probe alone has a little more room at the steepest slope of all.
    return _roomiest([best.drift_ppb, -float(max_drift_ppb), float(max_drift_ppb)], uppers, lowers)


def _roomiest(slopes: Sequence[float], uppers: Sequence[Bound], lowers: Sequence[Bound]) -> Line:
    return max((_halfway(slope, uppers, lowers) for slope in slopes), key=lambda line: line.room_ns)


def _halfway(slope: float, uppers: Sequence[Bound], lowers: Sequence[Bound]) -> Line:
    top = min(bound.offset_ns - slope * bound.at_s for bound in uppers)
    bottom = max(bound.offset_ns - slope * bound.at_s for bound in lowers)
    return Line((top + bottom) / 2, slope, top - bottom)


def allowed_lines(
    uppers: Sequence[Bound], lowers: Sequence[Bound], *, max_drift_ppb: int
) -> list[tuple[float, float]]:
    """Return the corners (offset at time 0, slope) of the set of lines that keep all bounds."""
    far_ns = 4 * (
        max(abs(bound.offset_ns) + max_drift_ppb * abs(bound.at_s) for bound in (*uppers, *lowers))
        + 1
    )
    steep = float(max_drift_ppb)
    corners = [(-far_ns, -steep), (far_ns, -steep), (far_ns, steep), (-far_ns, steep)]
    for bound in uppers:
        corners = _kept(corners, bound, 1.0)
    for bound in lowers:
        corners = _kept(corners, bound, -1.0)
    return corners


def _kept(
    corners: Sequence[tuple[float, float]], bound: Bound, sign: float
) -> list[tuple[float, float]]:
    """Cut a convex set of lines down to those on one side of a bound."""
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


def _upper(probe: Probe, zero_ns: int, base_ns: int) -> Bound:
    return Bound(
        (probe.sent_ns - zero_ns) / NS_PER_S, float(probe.received_ns - probe.sent_ns - base_ns)
    )


def _lower(probe: Probe, zero_ns: int, base_ns: int) -> Bound:
    return Bound(
        (probe.returned_ns - zero_ns) / NS_PER_S,
        float(probe.replied_ns - probe.returned_ns - base_ns),
    )


def _widened(bound: Bound, side: int, wander_ppb: int) -> Bound:
    slack_ns = abs(wander_ppb * bound.at_s) + ROUNDING_NS
    return Bound(bound.at_s, bound.offset_ns + side * slack_ns)


def _slope(first: Bound, last: Bound) -> float:
    return (last.offset_ns - first.offset_ns) / (last.at_s - first.at_s)


def _turns_down(first: Bound, middle: Bound, last: Bound) -> bool:
    return (middle.at_s - first.at_s) * (last.offset_ns - first.offset_ns) <= (
        middle.offset_ns - first.offset_ns
    ) * (last.at_s - first.at_s)
