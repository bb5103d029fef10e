"""How much faster the host's clock runs than the device's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .probe import Bracket

MAX_DRIFT_RATIO = 1e-4
"""What two quartz clocks differ by at most: ten times what the worst common ones do."""


class Point(NamedTuple):
    """One moment: exactly on the device's clock, within a bracket on the host's."""

    device_ns: int
    bracket: Bracket


class Drift(NamedTuple):
    """``host = (1 + ratio) device``, and by how much ``ratio`` may be wrong."""

    ratio: float
    error_ratio: float


UNKNOWN_DRIFT = Drift(0.0, MAX_DRIFT_RATIO)


def fit_drift(points: Sequence[Point]) -> Drift:
    """Return the drift that all points allow.

    Each two points bound the slope from both sides, as the host's interval
    between them lies between the nearest and the farthest ends of their
    brackets. The drift is the middle of what all pairs allow. Older points that
    contradict the newer ones are left out: temperature had changed.

    Args:
        points: In the order of the device's clock.
    """
    low, high = -MAX_DRIFT_RATIO, MAX_DRIFT_RATIO
    for first in range(len(points) - 2, -1, -1):
        narrower = _narrowed(points, first, low, high)
        if narrower is None:
            break
        low, high = narrower
    return Drift((low + high) / 2, (high - low) / 2)


def _narrowed(
    points: Sequence[Point], first: int, low: float, high: float
) -> tuple[float, float] | None:
    """Return the bounds after all pairs of one point with later ones; None: they exclude all."""
    early = points[first]
    for late in points[first + 1 :]:
        device_ns = late.device_ns - early.device_ns
        if device_ns <= 0:
            continue
        low = max(low, (late.bracket.lower_ns - early.bracket.upper_ns) / device_ns - 1)
        high = min(high, (late.bracket.upper_ns - early.bracket.lower_ns) / device_ns - 1)
    return (low, high) if low <= high else None


def rounding_ns(elapsed_ms: float) -> float:
    """Return by how many ns an ``elapsed_time`` may be off: it is a float32 in ms.

    Half the distance to the next float32: 0.5 us at 16 s, 60 us at half an hour.
    """
    if elapsed_ms == 0:
        return 0.0
    exponent = math.frexp(elapsed_ms)[1] - 1
    return math.ldexp(1.0, exponent - 24) * 1e6
