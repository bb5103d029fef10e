"""The shape of the MFU curve: each of seven shapes has typical causes.

Source: Imbue, "From bare metal to a 70B model" (2024), the section on low MFU.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from ..report.report import MfuShape, MfuShapeName, Severity
from ..report.text import format_percent
from .drops import ROBUST, find_drops

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ..report.report import Mfu, RunReport
    from .drops import Drop

    Series = Sequence[tuple[int, float]]

MIN_STEPS = 16
"""Steps that a shape needs: four quarters of four steps. Source: choice."""

DIP_RATIO = 0.10
"""Depth of a dip, as of a drop."""

MAX_DIP_STEPS = 3
"""Consecutive steps of a dip. An evaluation may take several steps."""

MIN_REGULAR_DIPS = 3
"""Dips whose two distances can agree."""

MAX_RARE_SHARE = 0.10
"""Share of the steps that rare dips may take; more of them are noise. Source: choice."""

NOISY_RATIO = 0.05
"""Robust deviation over the median from which a curve is noisy. Source: choice, half a dip."""

SAG_RATIO = 0.05
"""Fall from the first to the last quarter of a stretch without a restart. Source: choice, half a
drop; each quarter must be below the one before."""

RECOVERED_SHARE = 0.5
"""Share of the sag that a restart must bring back."""

LOW_RATIO, FRACTION_RATIO = 0.10, 0.50
"""Distance below the usual MFU of such a run from which it is low, and from which only a fraction
of it: then not a part is slow, but a whole path (GPUDirect) is not in use. Source: choice."""

CAUSES = {
    MfuShapeName.LOW_FROM_START: "GPUDirect RDMA not in use, or the environment is wrong",
    MfuShapeName.STEADY_LOW: "one bad link, or throttled processors",
    MfuShapeName.REGULAR_DIPS: "checkpoints or evaluations",
    MfuShapeName.RARE_DIPS: "load on a host's processors, or the data loader",
    MfuShapeName.GROWING_SAG: "garbage collection",
    MfuShapeName.SUDDEN_DROP: "a throttled clock: heat or power",
    MfuShapeName.NOISY: "links of the upper layers of the network",
}
"""Typical causes of each shape. Source: as above."""


def with_mfu(report: RunReport, mfu: Mfu | None) -> RunReport:
    """Return a report with this MFU and its shape.

    A finding is the cause: what the shape typically has could only contradict it.
    """
    shape = None
    if mfu is not None:
        if mfu.usual is None and report.mfu is not None:
            mfu = replace(mfu, usual=report.mfu.usual)
        steady = [mfu.by_step[step] for step in mfu.by_step.keys() - set(report.warmup_steps)]
        mfu = replace(mfu, mean=fmean(steady or mfu.by_step.values()))
        shape = classify_mfu(
            mfu.by_step,
            flops_by_step=mfu.flops_by_step,
            squares_by_step=report.squares_by_step,
            restart_steps=mfu.restart_steps,
            warmup_steps=report.warmup_steps,
            usual=mfu.usual,
        )
        problems = [each for each in report.findings if each.severity is not Severity.NONE]
        is_explained = any(each.ranks or each.severity is not Severity.MINOR for each in problems)
        if shape is not None and is_explained:
            shape = replace(shape, causes="")
    return replace(report, mfu=mfu, mfu_shape=shape)


def classify_mfu(
    by_step: Mapping[int, float],
    *,
    flops_by_step: Mapping[int, float] | None = None,
    squares_by_step: Mapping[int, int] | None = None,
    restart_steps: Collection[int] = (),
    warmup_steps: Collection[int] = (),
    usual: float | None = None,
) -> MfuShape | None:
    """Return the shape of the MFU curve; None if it is too short, or has no value above 0.

    If several shapes fit, the gravest counts: a sudden drop, a sag, a low level, dips, noise.

    Args:
        by_step: MFU, unsmoothed.
        flops_by_step: FLOPs of each step: fewer of them are no drop.
        squares_by_step: Squared sequence lengths of each step: more of them are no drop.
        usual: MFU of an earlier run that compares with this one; None if unknown. Without it, a
            level can't be called low.
    """
    skipped = set(warmup_steps)
    series = [(step, by_step[step]) for step in sorted(by_step) if step not in skipped]
    level = median(value for _, value in series) if series else 0.0
    if len(series) < MIN_STEPS or level <= 0:
        return None
    drop = _find_drop(
        find_drops(dict(series), tokens_by_step=flops_by_step, squares_by_step=squares_by_step),
        series,
    )
    is_sudden = drop is not None and drop[0] is MfuShapeName.SUDDEN_DROP
    shape = (drop if is_sudden else None) or _find_sag(series, restart_steps) or drop
    steps = (series[0][0], series[-1][0])
    shown = format_percent(level, digits=1)
    if not shape and usual is not None and level <= usual * (1 - LOW_RATIO):
        is_fraction = level <= usual * (1 - FRACTION_RATIO)
        name = MfuShapeName.LOW_FROM_START if is_fraction else MfuShapeName.STEADY_LOW
        before = format_percent(usual, digits=1)
        shape = name, steps, f"{shown} from the start, where the previous run had {before}"
    shape = shape or _find_dips(series)
    deviation = ROBUST * median(abs(value - level) for _, value in series)
    if not shape and deviation >= NOISY_RATIO * level:
        text = f"{shown}, but varies by {format_percent(deviation / level)}"
        shape = MfuShapeName.NOISY, steps, text
    name, steps, text = shape or (MfuShapeName.STEADY, steps, f"{shown} in all steps")
    return MfuShape(name=name, steps=steps, text=text, causes=CAUSES.get(name, ""))


_Shape = tuple[MfuShapeName, tuple[int, int], str]


def _find_drop(drops: Sequence[Drop], series: Series) -> _Shape | None:
    """Find a drop that lasts to the end, and longer than a dip."""
    if not drops or drops[-1].is_over:
        return None
    drop = drops[-1]
    if sum(drop.first_step <= step <= drop.last_step for step, _ in series) <= MAX_DIP_STEPS:
        return None
    steps, size = (drop.first_step, drop.last_step), format_percent(drop.depth_ratio)
    if not drop.is_sudden:
        return MfuShapeName.GROWING_SAG, steps, f"fell by {size} bit by bit and stays low"
    return MfuShapeName.SUDDEN_DROP, steps, f"dropped by {size} in step {steps[0]} and stays low"


def _find_sag(series: Series, restart_steps: Collection[int]) -> _Shape | None:
    """Find a level that falls bit by bit, and that a restart brings back, if there was one."""
    borders = [
        next((k for k, (step, _) in enumerate(series) if step >= restart), len(series))
        for restart in sorted(restart_steps)
    ]
    parts = [series[a:b] for a, b in pairwise([0, *borders, len(series)]) if a < b]
    for number, part in enumerate(parts):
        if len(part) < MIN_STEPS:
            continue
        ends = [round(k * len(part) / 4) for k in range(5)]
        quarters = [median(value for _, value in part[a:b]) for a, b in pairwise(ends)]
        fall = quarters[0] - quarters[-1]
        is_falling = all(later < earlier for earlier, later in pairwise(quarters))
        # One jump is a drop, not a sag.
        is_gradual = max(a - b for a, b in pairwise(quarters)) <= fall / 2
        if not is_falling or not is_gradual or fall < SAG_RATIO * quarters[0]:
            continue
        steps = part[0][0], part[-1][0]
        size = format_percent(fall / quarters[0])
        following = parts[number + 1][: len(part) // 4] if number + 1 < len(parts) else ()
        if not following:
            text = f"sags by {size} from step {steps[0]} to {steps[1]}"
            return MfuShapeName.GROWING_SAG, steps, text
        if median(value for _, value in following) >= quarters[-1] + RECOVERED_SHARE * fall:
            text = f"sags by {size} until step {steps[1]}; a restart brings it back"
            return MfuShapeName.GROWING_SAG, steps, text
    return None


def _find_dips(series: Series) -> _Shape | None:
    level = median(value for _, value in series)
    low = [index for index, (_, value) in enumerate(series) if value <= level * (1 - DIP_RATIO)]
    dips: list[list[int]] = []
    for index in low:
        if dips and index == dips[-1][-1] + 1:
            dips[-1].append(index)
        else:
            dips.append([index])
    if not dips or max(len(dip) for dip in dips) > MAX_DIP_STEPS:
        return None
    distances = [later[0] - earlier[0] for earlier, later in pairwise(dips)]
    steps = series[dips[0][0]][0], series[dips[-1][-1]][0]
    if len(dips) >= MIN_REGULAR_DIPS and max(distances) == min(distances):
        return MfuShapeName.REGULAR_DIPS, steps, f"dips every {distances[0]} steps"
    if len(low) <= MAX_RARE_SHARE * len(series):
        return MfuShapeName.RARE_DIPS, steps, f"{len(dips)} dips in {len(series)} steps"
    return None
