"""What each operation of a ByteDance trace takes by itself, as recorded and ideally.

Source: arXiv 2505.05713, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .format import CLOCK_ERROR_TRANSFER_NS, CODE, COMMUNICATION, TYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...replay.batched_program import Meeting
    from .shapes import Sheet


def recorded_durations(
    sheets: Sequence[Sheet], num_steps: int
) -> tuple[list[NDArray[np.float64]], int]:
    """Return durations of compute, transfers of communication.

    A transfer is ``end - max(start over its group)``; one of -10 ms or less is
    clock error and counts as 0.

    Args:
        sheets: The trace.
        num_steps: Steps that ``Sheet.step`` counts.

    Returns:
        By sheet, shape (ops, lanes), in ns; and how many transfers are clock errors.
    """
    over = _meetings_begin(sheets, num_steps)
    durations, num_clock_errors = [], 0
    for sheet in sheets:
        taken = np.empty(sheet.start_ns.shape)
        for gate, members in enumerate(sheet.shape.members()):
            key = sheet.shape.meeting.get(gate)
            arrival = sheet.start_ns[members].max(axis=0) if key is None else over[key][sheet.step]
            for row in members:
                transfer = sheet.end_ns[row] - arrival
                wrong = transfer <= CLOCK_ERROR_TRANSFER_NS
                num_clock_errors += int(np.count_nonzero(wrong))
                taken[row] = np.where(wrong, 0, transfer)
        for row in np.flatnonzero(sheet.shape.gate < 0).tolist():
            np.subtract(sheet.end_ns[row], sheet.start_ns[row], out=taken[row])
        durations.append(taken)
    return durations, num_clock_errors


def _meetings_begin(sheets: Sequence[Sheet], num_steps: int) -> dict[Meeting, NDArray[np.int64]]:
    """Return when the last member of each meeting started, by step."""
    lowest = np.iinfo(np.int64).min
    over: dict[Meeting, NDArray[np.int64]] = {}
    for sheet in sheets:
        members = sheet.shape.members()
        begins = np.flatnonzero(np.diff(sheet.step, prepend=-1))
        for gate, key in sheet.shape.meeting.items():
            starts = sheet.start_ns[members[gate]].max(axis=0)
            latest = over.setdefault(key, np.full(num_steps, lowest))
            steps = sheet.step[begins]
            latest[steps] = np.maximum(latest[steps], np.maximum.reduceat(starts, begins))
    return over


def ideal_durations(
    sheets: Sequence[Sheet], durations: Sequence[NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Return each type's ideal over all dp positions, stages and steps.

    That is the mean duration of compute, the median transfer of communication.

    Returns:
        Shape (types,), in ns; NaN for a type that the trace lacks.
    """
    ideal = np.full(len(TYPES), np.nan)
    for name, code in CODE.items():
        values = [
            taken[sheet.type == code].ravel()
            for sheet, taken in zip(sheets, durations, strict=True)
        ]
        together = np.concatenate(values)
        if len(together) and name in COMMUNICATION:
            ideal[code] = np.median(together, overwrite_input=True)
        elif len(together):
            ideal[code] = together.mean()
    return ideal
