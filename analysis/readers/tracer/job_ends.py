"""The ends of an epoch: the steps in which a job starts up, and the one in which it ends.

A process compiles, allocates, connects and fills its caches once. These steps are in no step time,
price or finding; they are reported as start-up. The last step of an epoch has no successor whose
begin ends it, so its record lasts until the process exits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import KIND_CODES, SpanFlag, SpanKind

from ...arrays.grouping import sorted_unique
from ...arrays.sorting import find_positions, is_in_sorted
from ...replay.model import WaitIntervals, remove_overlaps
from ...statistics.noise import robust_deviation
from ...statistics.thresholds import THRESHOLDS
from ...trace.rows import select_rows
from .device_steps import measure_steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import EpochInfo, RunInfo, SpanTable, StepTable
    from ..waits import WaitSplit

MIN_DEVIATIONS = 4.0
"""Robust deviations above the median step from which a step is long. Source: as for a finding."""

FEWEST_STEPS = 3
"""Steps of which one can be long against most others. Source: formula."""

MAX_FIRST_STEPS = 20
"""Steps of which the start-up is less than half: it is compared with what follows it, not with what
the job becomes later. Source: choice."""


def end_last_steps(run: RunInfo, spans: SpanTable, steps: StepTable) -> StepTable:
    """Return the steps, the last one of each process that has exited ending with its last span.

    Garbage collection does not count: the interpreter collects at its exit.
    """
    if not len(steps):
        return steps
    end_ns = steps.end_ns.copy()
    for epoch in run.epochs:
        rows = np.flatnonzero(steps.epoch == epoch.epoch)
        if not len(rows) or not _has_ended(epoch, run):
            continue
        step = steps.step[rows].max()
        rows = rows[steps.step[rows] == step]
        own = np.flatnonzero(
            (spans.epoch == epoch.epoch)
            & (spans.step == step)
            & (spans.kind != KIND_CODES[SpanKind.GC])
        )
        ranks = sorted_unique(steps.rank[rows])
        known = own[is_in_sorted(spans.rank[own], ranks)]
        last_ns = np.full(len(ranks), -1, dtype=np.int64)
        ended_ns = spans.start_ns[known] + spans.duration_ns[known]
        np.maximum.at(last_ns, find_positions(spans.rank[known], ranks), ended_ns)
        at_ns = last_ns[find_positions(steps.rank[rows], ranks)]
        end_ns[rows] = np.where(at_ns > steps.start_ns[rows], at_ns, end_ns[rows]).clip(
            max=end_ns[rows]
        )
    return replace(steps, end_ns=end_ns)


def find_job_ends(
    run: RunInfo, spans: SpanTable, steps: StepTable, split: WaitSplit, *, num_earlier_steps: int
) -> tuple[dict[int, int], dict[int, int]]:
    """Find the steps in which the job starts up, and the one in which it only ends.

    A step is long if it is `min_excess_ratio` and `MIN_DEVIATIONS` above the median of the first
    `MAX_FIRST_STEPS` steps, at the end above that of the last ones. The start-up lasts as long as
    steps are long, and most ranks on their own, waits not counted: a rank that is slow from the
    first step on makes the others wait, and they are as fast as ever. A single long step at either
    end belongs to it whatever its reason is: one that no other step shows may be what a process
    does once.

    Args:
        num_earlier_steps: Steps of the run before these.

    Returns:
        Duration of each step of a start-up, and of each last step with an end of the job, ns.
    """
    startup: dict[int, int] = {}
    ending: dict[int, int] = {}
    is_first = num_earlier_steps == 0
    for epoch in sorted(run.epochs, key=lambda each: each.epoch):
        own = select_rows(steps, steps.epoch == epoch.epoch)
        if not len(own):
            continue
        job = measure_steps(own)
        duration_ns = job.duration_ns
        if len(duration_ns) >= FEWEST_STEPS:
            first, last = slice(MAX_FIRST_STEPS), slice(-MAX_FIRST_STEPS, None)
            is_long = _are_long(duration_ns[first])
            is_long[0] |= _is_longest(duration_ns[first])
            numbers, times_ns = job.step.tolist(), duration_ns.tolist()
            if is_first and is_long.any():
                rows = np.isin(own.step, job.step[first])
                own_ns = _own_time(spans, select_rows(own, rows), split)
                is_own_long = is_long & _are_long(own_ns)
                is_own_long[0] |= is_long[0] and _is_longest(own_ns)
                num = _count_startup(is_own_long, is_long)
                startup |= dict(zip(numbers[:num], times_ns[:num], strict=True))
            *_, before, at_end = _are_long(duration_ns[last]).tolist()
            # A rank that is slow in every other step may be so in the last one.
            excess_ns = duration_ns[last] - np.median(duration_ns[last])
            num_alike = int((2 * excess_ns[:-1] >= excess_ns[-1]).sum())
            is_odd = at_end and not before and num_alike < THRESHOLDS.min_several
            if is_odd and _has_ended(epoch, run):
                ending[numbers[-1]] = times_ns[-1]
        is_first = True
    return startup, ending


def _has_ended(epoch: EpochInfo, run: RunInfo) -> bool:
    """Return whether nothing more will be recorded of an epoch."""
    is_over = epoch.epoch < max(each.epoch for each in run.epochs)
    return is_over or all(rank.exit_state for rank in epoch.ranks)


def _are_long(value: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which values are longer than usual. Shape as given, (steps,)."""
    usual = float(np.median(value))
    least = max(THRESHOLDS.min_excess_ratio * usual, MIN_DEVIATIONS * robust_deviation(value))
    return value - usual > least


def _is_longest(value: NDArray[Any]) -> bool:
    """Return whether the first value is the largest, and above the median by more than noise.

    Every process does something once in its first step; on a busy host other steps vary as much.
    """
    least = (1.0 + THRESHOLDS.min_excess_ratio) * float(np.median(value))
    return bool(value.argmax() == 0 and value[0] > least)


def _count_startup(is_own_long: NDArray[np.bool_], is_long: NDArray[np.bool_]) -> int:
    """Return the number of steps of the start-up: most of them are long; fewer than half of all."""
    long_so_far = 2 * np.cumsum(is_own_long) > np.arange(1, len(is_own_long) + 1)
    last = np.flatnonzero(is_own_long & long_so_far)
    last = last[2 * (last + 1) < len(is_own_long)]
    if len(last):
        return int(last[-1]) + 1
    return int(is_long[0] and not is_long[1])


def _own_time(spans: SpanTable, steps: StepTable, split: WaitSplit) -> NDArray[np.float64]:
    """Return the time of each step without waits, of the median rank. Shape (steps,), ns.

    Of an even number of ranks it is the lower one of two, so that one of two ranks is not most.
    """
    numbers, column = np.unique(steps.step, return_inverse=True)
    ranks, row = np.unique(steps.rank, return_inverse=True)
    own_ns = np.full((len(ranks), len(numbers)), np.nan)
    own_ns[row, column] = steps.end_ns - steps.start_ns
    is_wait = spans.kind == KIND_CODES[SpanKind.WAIT]
    is_sync = (split.wait_ns > 0) & ((spans.flags & SpanFlag.ASYNC) == 0)
    rows = np.flatnonzero((is_wait | is_sync) & (spans.epoch == steps.epoch[0]))
    wait_ns = np.where(is_wait[rows], spans.duration_ns[rows], split.wait_ns[rows])
    waits = remove_overlaps(
        WaitIntervals(
            rank=spans.rank[rows],
            operation=rows,
            start_ns=spans.start_ns[rows],
            end_ns=spans.start_ns[rows] + wait_ns,
        )
    )
    step = spans.step[waits.operation]
    at, of = find_positions(waits.rank, ranks), find_positions(step, numbers)
    at, of = np.minimum(at, len(ranks) - 1), np.minimum(of, len(numbers) - 1)
    known = (ranks[at] == waits.rank) & (numbers[of] == step)
    np.subtract.at(own_ns, (at[known], of[known]), (waits.end_ns - waits.start_ns)[known])
    median: NDArray[np.float64] = np.nanquantile(own_ns, 0.5, axis=0, method="lower")
    return median
