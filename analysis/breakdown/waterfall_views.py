"""The waterfall of a report in seconds and in MFU points, by step, by position or by rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NS_PER_S

from .waterfall import Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..report.report import RunReport

MAX_ROWS = 256
"""Rows of a waterfall: each has at least 2 pixels on a page."""


class WaterfallBy(StrEnum):
    """Rows of a waterfall."""

    STEP = "step"
    STAGE = "pp"
    DP = "dp"
    TP = "tp"
    CP = "cp"
    EP = "ep"
    RANK = "rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartShare:
    """A part of the mean step of the mean rank."""

    part: Part
    seconds: float
    ratio: float
    """Share of the step."""

    mfu_ratio: float | None
    """MFU points of it: of useful compute those that the run has, of any other part those that
    it costs, if the devices would compute instead as they do in useful compute. None if the MFU is
    unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallRows:
    """Waterfalls side by side."""

    by: WaterfallBy
    numbers: tuple[int, ...]
    """Step, position or rank of each row."""

    num_left_out: int
    """Rows beyond `MAX_ROWS`: earlier steps, or ranks with more useful compute."""

    seconds: NDArray[np.float64]
    """Shape (rows, parts): time of a mean step on a mean rank of the row."""


def split_step(report: RunReport) -> tuple[PartShare, ...]:
    """Return the parts of the mean step; empty if there is no waterfall.

    With M the mean MFU of the steps of the waterfall, and u the share of useful compute, the
    devices reach ``M / u`` while they compute. A part with a share r costs ``r M / u``; useful
    compute itself has M. So all parts sum to ``M / u``, and what is missing to 100 % is lost inside
    the kernels.
    """
    summary = report.waterfall
    if summary is None or not len(summary.steps):
        return ()
    total_ns = summary.by_step_ns.sum(axis=0)
    whole_ns = int(total_ns.sum())
    if whole_ns <= 0:
        return ()
    ratio = dict(zip(summary.parts, (total_ns / whole_ns).tolist(), strict=True))
    by_step = {} if report.mfu is None else report.mfu.by_step
    mfus = [by_step[step] for step in summary.steps if step in by_step]
    useful_ratio, scale = ratio[Part.USEFUL_COMPUTE], None
    if len(mfus) == len(summary.steps) and useful_ratio > 0:
        scale = float(np.mean(mfus)) / useful_ratio
    num_rank_steps = len(summary.ranks) * len(summary.steps)
    return tuple(
        PartShare(
            part=Part(name),
            seconds=float(ns) / num_rank_steps / NS_PER_S,
            ratio=ratio[name],
            mfu_ratio=None if scale is None else scale * ratio[name],
        )
        for name, ns in zip(summary.parts, total_ns.tolist(), strict=True)
    )


def list_rows(report: RunReport, by: WaterfallBy) -> WaterfallRows | None:
    """Return the waterfall by step, by position on an axis, or by rank.

    None if there is none, or if the axis has one position.
    """
    summary = report.waterfall
    if summary is None:
        return None
    if by is WaterfallBy.STEP:
        numbers, sums = np.array(summary.steps), summary.by_step_ns
        seconds = sums / max(len(summary.ranks), 1) / NS_PER_S
        shown = np.arange(len(numbers))[-MAX_ROWS:]
    elif by is WaterfallBy.RANK:
        numbers = np.array(summary.ranks)
        seconds = summary.by_rank_ns / max(len(summary.steps), 1) / NS_PER_S
        useful = seconds[:, list(summary.parts).index(Part.USEFUL_COMPUTE)]
        shown = np.sort(np.argsort(useful, kind="stable")[:MAX_ROWS])
    else:
        position = [report.coords[rank].to_dict()[by.value] for rank in summary.ranks]
        numbers, row = np.unique(position, return_inverse=True)
        sums = np.zeros((len(numbers), len(summary.parts)), dtype=np.int64)
        np.add.at(sums, row, summary.by_rank_ns)
        num_ranks = np.bincount(row, minlength=len(numbers))[:, None]
        seconds = sums / np.maximum(num_ranks, 1) / max(len(summary.steps), 1) / NS_PER_S
        shown = np.arange(len(numbers))[:MAX_ROWS]
    if len(numbers) < 2:  # noqa: PLR2004  # one row is the whole run
        return None
    return WaterfallRows(
        by=by,
        numbers=tuple(numbers[shown].tolist()),
        num_left_out=len(numbers) - len(shown),
        seconds=seconds[shown],
    )
