"""Confidence of a finding: how often one that is as clear is right."""

from __future__ import annotations

from .thresholds import THRESHOLDS


def confidence(excess_ratio: float, threshold: float) -> float:
    """Return the share of right findings among those with this excess over their threshold.

    ``1 - 0.1 * 0.5 ^ (excess / threshold - 1)``: the doubt is `doubt_at_threshold` at the
    threshold, and half as large with each further one.

    Source:
        The labelled benchmark, seeds 8 and 9; docs/laboratory.md, "Diagnosis".
    """
    return float(1.0 - THRESHOLDS.doubt_at_threshold * 0.5 ** (excess_ratio / threshold - 1.0))
