"""Ranks that run out of the memory of their devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..breakdown.memory import read_peaks
from ..report.report import Finding
from ..report.text import format_bytes, format_count
from .detector import Cause, ProofForm

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..breakdown.memory import RankPeaks
    from .detector import Record

SEGMENT_BYTES = 20 << 20
"""Memory that PyTorch's allocator takes from the device at a time for tensors of 1 to 10 MiB.
Source: ``kLargeBuffer`` of its CUDACachingAllocator."""

MIN_RETRY_STEPS = 2
"""Steps in which the cache was freed. Once, it may have been full of tensors of other sizes, as
after an evaluation; what remains then fits all later steps, unless they need more than there is."""

MIN_RISES = 8
"""Steps of the newer half in which a peak must rise to be growing. The maximum so far of steps that
vary by chance rises in 0.7 of these (ln 2), and in 8 or more with a probability below 1e-6."""

CAUSE = Cause(
    name="near-oom",
    one="is running out of device memory",
    several="are running out of device memory",
    proof_form=ProofForm.MEMORY,
)


def detect(record: Record) -> tuple[Finding, ...]:
    """Return the ranks that run out of the memory of their devices.

    A full cache is none of it: PyTorch's allocator keeps what it once had. A rank runs out of
    memory

    * if its allocator found none and freed its cache in `MIN_RETRY_STEPS` steps or more,
    * if the peak of its tensors leaves no room for another segment,
    * or if that peak grows, and would get there before the run has lasted twice as long. It is
      extrapolated no further than the steps that it was seen in.

    The last two need the size of the device, and what is used of it outside of the allocator.
    """
    peaks = read_peaks(record.run, record.steps)
    if not peaks.allocated_bytes.size:
        return ()
    infos = [record.run.ranks[rank] for rank in peaks.ranks.tolist()]
    capacity = np.array([info.memory.capacity_bytes or np.nan for info in infos])
    room = capacity - peaks.allocated_bytes[:, -1]
    growth, fit = _growth(peaks)
    steps_left = np.full(len(room), np.inf)
    np.divide(np.maximum(room, 0), growth, out=steps_left, where=growth > 0)
    is_full = (peaks.has_retries.sum(axis=1) >= MIN_RETRY_STEPS) | (room < SEGMENT_BYTES)
    is_near = is_full | (steps_left <= record.num_earlier_steps + len(peaks.steps))
    if not is_near.any():
        return ()
    near = np.flatnonzero(is_near)
    worst = int(near[np.lexsort((room[near], steps_left[near], ~is_full[near]))[0]])
    columns = _show(peaks, worst, room[worst])
    parts = [_describe(peaks, worst, capacity[worst], infos[worst].memory.other_bytes)]
    if num_retries := int(peaks.new_retries[worst]):
        parts.append(
            f"its allocator found no memory {format_count(num_retries, 'time')} in these steps,"
            " freed its cache and tried again"
        )
    if np.isfinite(steps_left[worst]) and not is_full[worst]:
        parts.append(
            f"the peak grows by {format_bytes(round(growth[worst]))} per step, so that the memory"
            f" is full in {format_count(int(steps_left[worst]), 'step')}"
        )
    return (
        Finding(
            cause=CAUSE.name,
            ranks=tuple(peaks.ranks[near].tolist()),
            steps=(int(peaks.steps[columns[0]]), int(peaks.steps[columns[-1]])),
            confidence=1.0 if is_full[worst] else float(fit[worst]),
            evidence="; ".join(parts),
        ),
    )


def _growth(peaks: RankPeaks) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the bytes per step by which each peak grows, and how well a line fits it (R squared).

    Both are 0 for a peak that does not rise in `MIN_RISES` of the newer half of the steps.
    """
    middle = len(peaks.steps) // 2
    newer = peaks.allocated_bytes[:, middle:]
    num_rises = ((np.diff(newer, axis=1) > 0) & (newer[:, :-1] >= 0)).sum(axis=1)
    grows = num_rises >= MIN_RISES
    x = peaks.steps[middle:] - peaks.steps[middle:].mean()
    y = newer[grows] - newer[grows].mean(axis=1, keepdims=True)
    growth, fit = np.zeros((2, len(newer)))
    growth[grows] = y @ x / (x @ x or 1.0)
    fit[grows] = growth[grows] ** 2 * (x @ x) / (y**2).sum(axis=1)
    return growth, fit


def _show(peaks: RankPeaks, row: int, room: float) -> NDArray[np.int64]:
    """Return the columns of the steps that show it: with retries, without room, or with growth."""
    retries = np.flatnonzero(peaks.has_retries[row])
    if len(retries) >= MIN_RETRY_STEPS:
        return retries
    if room < SEGMENT_BYTES:
        peak = peaks.allocated_bytes[row]
        return np.flatnonzero(peak[-1] + room - peak < SEGMENT_BYTES)
    return np.arange(len(peaks.steps) // 2, len(peaks.steps))


def _describe(peaks: RankPeaks, row: int, capacity: float, other_bytes: int | None) -> str:
    """Return the peak of a rank, with its cache, of what the allocator can have."""
    peak, reserved = int(peaks.allocated_bytes[row, -1]), int(peaks.reserved_bytes[row, -1])
    text = f"the peak of rank {peaks.ranks[row]} is {format_bytes(peak)}"
    text += f" ({format_bytes(reserved)} with the allocator's cache)" if reserved >= 0 else ""
    if np.isnan(capacity):
        return text
    text += f" of {format_bytes(int(capacity))} that the allocator can have"
    if other_bytes:
        text += f", beside {format_bytes(other_bytes)} outside of it"
    return text
