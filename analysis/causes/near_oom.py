"""Ranks whose device has next to no memory left, or will not have any soon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..breakdown.memory import read_peaks
from ..report.report import Finding
from ..report.text import format_bytes, format_count, format_ranks
from .detector import Cause, insufficient

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..breakdown.memory import RankPeaks
    from ..trace.tables import RankInfo
    from .detector import Record

FULL_RATIO = 0.95
"""Share of what the allocator can have from which its peak is a risk: batches of other lengths
differ by more. Source: choice."""

MIN_RISES = 8
"""Steps of the newer half in which a peak must rise to be growing. The maximum so far of steps that
vary by chance rises in 0.7 of these (ln 2), and in 8 or more with a probability below 1e-6."""

CAUSE = Cause(
    name="near-oom",
    one="has next to no device memory left",
    several="have next to no device memory left",
)


def detect(record: Record) -> tuple[Finding, ...]:
    """Return the ranks that are about to run out of the memory of their devices.

    A rank is if its allocator freed its cache in these steps, because the device had no memory
    left; if its peak is `FULL_RATIO` of what the allocator can have; or if its peak grows and would
    reach that before the run has lasted twice as long. Growth without a known size of the device
    is insufficient evidence.
    """
    if not record.run.epochs:
        return ()
    peaks = read_peaks(record.run, record.steps)
    if not peaks.allocated_bytes.size:
        return ()
    infos = [record.run.ranks[rank] for rank in peaks.ranks.tolist()]
    capacity = np.array([info.memory.capacity_bytes or 0 for info in infos], dtype=np.int64)
    last = peaks.allocated_bytes[:, -1]
    growth = _growth(peaks)
    is_known = capacity > 0
    horizon = record.num_earlier_steps + len(peaks.steps)
    steps_left = np.full(len(last), np.inf)
    grows = is_known & (growth > 0)
    steps_left[grows] = np.maximum(capacity - last, 0)[grows] / growth[grows]
    is_full = is_known & (last >= FULL_RATIO * capacity)
    is_near = (peaks.new_retries > 0) | is_full | (steps_left <= horizon)
    if is_near.any():
        return (_finding(peaks, infos, is_near, steps_left),)
    unknown = np.flatnonzero(~is_known & (growth > 0))
    if not len(unknown):
        return ()
    worst = int(unknown[np.argmax(growth[unknown])])
    return (
        insufficient(
            f"the peak of the memory of {format_ranks(peaks.ranks[unknown].tolist())} grows, by"
            f" {format_bytes(round(growth[worst]))} per step on rank {peaks.ranks[worst]}, and the"
            " size of the device is unknown: it is recorded by newer tracers"
        ),
    )


def _growth(peaks: RankPeaks) -> NDArray[np.float64]:
    """Return by how many bytes each rank's peak grows per step; 0 if it does not steadily."""
    num_steps = len(peaks.steps)
    middle = num_steps // 2
    known = peaks.allocated_bytes[:, middle:]
    rises = (np.diff(known, axis=1) > 0) & (known[:, :-1] >= 0)
    slope = (known[:, -1] - known[:, 0]) / max(int(peaks.steps[-1] - peaks.steps[middle]), 1)
    return np.where(rises.sum(axis=1) >= MIN_RISES, slope, 0.0)


def _finding(
    peaks: RankPeaks,
    infos: list[RankInfo],
    is_near: NDArray[np.bool_],
    steps_left: NDArray[np.float64],
) -> Finding:
    """Return the finding, whose evidence is about the rank that comes first."""
    near = np.flatnonzero(is_near)
    last = peaks.allocated_bytes[:, -1]
    capacity = np.array([infos[row].memory.capacity_bytes or 1 for row in near])
    worst = int(near[np.lexsort((-last[near] / capacity, steps_left[near]))[0]])
    memory, rank = infos[worst].memory, int(peaks.ranks[worst])
    of_device = ""
    if memory.device_bytes is not None:
        outside = f", of which {format_bytes(memory.other_bytes)} are" if memory.other_bytes else ""
        outside = f"{outside} used outside of the allocator" if outside else ""
        of_device = f" of {format_bytes(memory.device_bytes)}{outside}"
    parts = [f"the peak of rank {rank} is {format_bytes(int(last[worst]))}{of_device}"]
    retries = int(peaks.new_retries[worst])
    if retries:
        parts.append(
            f"its allocator found no memory {format_count(retries, 'time')} in these steps, and"
            " freed its cache"
        )
    first = int(peaks.steps[0])
    if np.isfinite(steps_left[worst]):
        growth = _growth(peaks)[worst]
        first = int(peaks.steps[len(peaks.steps) // 2])
        parts.append(
            f"it grows by {format_bytes(round(growth))} per step since step {first}, so it is full"
            f" in {format_count(int(steps_left[worst]), 'step')}"
        )
    return Finding(
        cause=CAUSE.name,
        ranks=tuple(peaks.ranks[near].tolist()),
        steps=(first, int(peaks.steps[-1])),
        confidence=1.0,
        evidence="; ".join(parts),
    )
