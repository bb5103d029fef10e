"""95 % confidence intervals and slopes, by scipy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

SEED = 7


def median_interval(values: Sequence[float]) -> list[float]:
    """Return the 95 % interval of the median of independent values, by bootstrap."""
    return quantile_interval(values, 0.5)


def quantile_interval(values: Sequence[float], quantile: float) -> list[float]:
    """Return the 95 % interval of a quantile of independent values, by bootstrap."""
    return bootstrap_interval(
        np.array(values, dtype=float),
        lambda drawn: float(np.quantile(drawn, quantile)),
        num_resamples=2_000,
    )


def bootstrap_interval(
    values: NDArray[Any],
    statistic: Callable[[NDArray[Any]], float],
    *,
    num_resamples: int,
) -> list[float]:
    """Return the 95 % percentile interval of a statistic of independent values.

    The interval of a single value is the value.
    """
    if len(values) == 1:
        return [statistic(values)] * 2
    found = stats.bootstrap(
        (values,),
        statistic,
        n_resamples=num_resamples,
        vectorized=False,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return [float(found.low), float(found.high)]


def share_interval(num_hits: int, num: int) -> list[float]:
    """Return Wilson's 95 % interval of a share."""
    found = stats.binomtest(num_hits, num).proportion_ci(method="wilson")
    return [float(found.low), float(found.high)]


def slope(values: Sequence[float]) -> list[float] | None:
    """Return the slope of values at successive steps and half its 95 % interval.

    Successive values that resemble each other make the interval too narrow, so a slope outside it
    needs a closer look.

    Returns:
        None for fewer than four values.
    """
    if len(values) < 4:
        return None
    fit = stats.linregress(range(len(values)), values)
    return [round(float(fit.slope), 2), round(1.96 * float(fit.stderr), 2)]
