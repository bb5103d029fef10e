"""When each operation of a whole run begins and ends in the full replay.

`analysis.replay.step_graph` answers the same for some steps, and slack with it; here
steps and data-parallel replicas of equal structure are replayed together,
which for a large run is many times cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .operations import NO_GROUP
from .program import LANES_AT_ONCE
from .schedule import replay

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .operations import Operations
    from .program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTimes:
    """Times of a run's operations, from their step's start; shape (ops,) each, in ns."""

    start_ns: NDArray[np.float64]
    """When it began; of a communication when this member arrived."""

    gate_ns: NDArray[np.float64]
    """When the last member of its group had arrived; else its start."""

    end_ns: NDArray[np.float64]


def operation_times(
    program: Program,
    operations: Operations,
    duration_ns: NDArray[np.float64],
    gap_ns: NDArray[np.float64],
) -> OperationTimes:
    """Replay a run and keep each operation's times.

    Args:
        program: The operations, compiled with their launch gaps.
        operations: What was compiled.
        duration_ns: Shape (ops,): durations and transfers.
        gap_ns: Shape (ops,): launch gaps.
    """
    ends, arrived = np.zeros(len(operations)), np.zeros(len(operations))
    durations, gaps = np.append(duration_ns, 0.0), np.append(gap_ns, 0.0)
    for found in program.classes:
        at_once = max(1, LANES_AT_ONCE // found.operation.shape[1])
        for first in range(0, len(found.step_index), at_once):
            operation = found.operation[:, :, first : first + at_once]
            gap = found.gap[:, :, first : first + at_once]
            node_ends = replay(found.schedule, durations[operation] + gaps[gap])
            ends[operation[operation >= 0]] = node_ends[operation >= 0]
            arrived[gap[gap >= 0]] = node_ends[gap >= 0]
    if not program.has_arrivals:
        reaches = operations.group[operations.dst] != NO_GROUP
        np.maximum.at(arrived, operations.dst[reaches], ends[operations.src[reaches]])
    gate = ends - duration_ns
    return OperationTimes(
        start_ns=np.where(operations.group == NO_GROUP, gate, arrived),
        gate_ns=gate,
        end_ns=ends,
    )
