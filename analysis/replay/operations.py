"""The operations of a run and what each waits for: what every trace format is turned into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.sorting import stable_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

NO_GROUP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Operations of some steps, with their dependencies inside each step.

    Rows are sorted by (step, replica), and within these in an order that two
    steps or replicas of the same structure share; replaying such steps
    together is what makes it fast (`analysis.replay.program`).
    """

    steps: tuple[int, ...]
    """Step numbers, ascending."""

    step: NDArray[np.int32]
    """Shape (ops,): index into ``steps``."""

    replica: NDArray[np.int32]
    """Shape (ops,): data-parallel position, or 0 everywhere when there is no such axis."""

    label: NDArray[np.int64]
    """Shape (ops,): what the operation is; only operations of equal label are ever exchanged."""

    group: NDArray[np.int64]
    """Shape (ops,): the communication instance that it is a member of, or `NO_GROUP`."""

    duration_ns: NDArray[np.float64]
    """Shape (ops,): of a compute operation its duration, of a communication its transfer."""

    gap_ns: NDArray[np.float64]
    """Shape (ops,): how long it began after all that it waits for had ended (launch delay)."""

    start_ns: NDArray[np.int64]
    """Shape (ops,): when it began, as recorded."""

    end_ns: NDArray[np.int64]
    """Shape (ops,): when it ended, as recorded."""

    closes_step: NDArray[np.bool_]
    """Shape (ops,): operations whose last end is the step's end."""

    src: NDArray[np.int64]
    """Shape (edges,): the operation waited for ..."""

    dst: NDArray[np.int64]
    """Shape (edges,): ... by this one of the same step."""

    def __len__(self) -> int:
        return len(self.duration_ns)


def positions_in_runs(key: NDArray[np.integer]) -> NDArray[np.int64]:
    """Number the rows of each run of equal ``key`` from 0; ``key`` must be sorted into runs."""
    index = np.arange(len(key))
    if not len(key):
        return index
    begins = np.concatenate(([True], key[1:] != key[:-1]))
    return index - np.maximum.accumulate(np.where(begins, index, 0))


def latest_by_group(group: NDArray[np.int64], value: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each member of a group, the largest ``value`` over its group.

    Rows without a group (`NO_GROUP`) get their own value.
    """
    latest = value.copy()
    members = np.flatnonzero(group != NO_GROUP)
    if not len(members):
        return latest
    ordered = members[stable_order(group[members])]
    begins = np.flatnonzero(np.diff(group[ordered], prepend=NO_GROUP))
    sizes = np.diff(np.append(begins, len(ordered)))
    latest[ordered] = np.repeat(np.maximum.reduceat(value[ordered], begins), sizes)
    return latest
