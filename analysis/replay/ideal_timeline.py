"""What a step would look like if nothing in it were slow, to draw beside the real one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.sorting import sort_rows
from .step_graph import graph_of_steps, replayed_times

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .model import ReplayModel


@dataclass(frozen=True, slots=True, kw_only=True)
class IdealTimeline:
    """One step's operations, real and ideal; columns of equal length, ordered by (rank, start).

    All times are in ns from the step's start. Both start and end at the edges
    of an operation's bar: of a communication from this member's arrival, so
    that the bar holds its wait.
    """

    step: int
    operation: NDArray[np.int64]
    """Row in the run's `Operations`."""

    rank: NDArray[np.int32]
    kind: NDArray[np.int16]
    """Code into ``kinds``."""

    kinds: tuple[str, ...]
    start_ns: NDArray[np.int64]
    """As recorded."""

    end_ns: NDArray[np.int64]
    ideal_start_ns: NDArray[np.int64]
    """In the ideal full replay: launch gaps at their median."""

    ideal_gate_ns: NDArray[np.int64]
    """When the last member of its communication arrived, else its start."""

    ideal_end_ns: NDArray[np.int64]
    actual_ns: int
    """The step as recorded: last end - first start."""

    ideal_ns: int

    def __len__(self) -> int:
        return len(self.operation)


def ideal_timeline(model: ReplayModel, step: int) -> IdealTimeline:
    """Replay one step with ideal durations and keep each operation's times.

    Args:
        model: A run's operations.
        step: Its number.

    Raises:
        EmptyRunError: The step takes no part in the replay.
        CycleError: Operations of the step wait for each other.
    """
    times = replayed_times(graph_of_steps(model, [step]), model.ideal_ns, model.ideal_gap_ns)
    operations = model.operations
    order = sort_rows(model.rank[times.rows], times.start_ns, times.end_ns)
    rows = times.rows[order]
    start, end = operations.start_ns[rows], operations.end_ns[rows]
    begin = int(start.min())
    return IdealTimeline(
        step=step,
        operation=rows,
        rank=model.rank[rows],
        kind=model.kind[rows],
        kinds=model.kinds,
        start_ns=start - begin,
        end_ns=end - begin,
        ideal_start_ns=_whole_ns(times.start_ns[order]),
        ideal_gate_ns=_whole_ns(times.gate_ns[order]),
        ideal_end_ns=_whole_ns(times.end_ns[order]),
        actual_ns=int(end.max()) - begin,
        ideal_ns=int(np.rint(times.step_ns[0])),
    )


def _whole_ns(time_ns: NDArray[np.float64]) -> NDArray[np.int64]:
    whole: NDArray[np.int64] = np.rint(time_ns).astype(np.int64)
    return whole
