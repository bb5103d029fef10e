"""Count communications, as each rank of a real job does: per group, and per ordered pair."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .groups import Axis


class SequenceNumbers:
    """Sequence numbers of an epoch. Alike groups of a stage do alike things, so they share one."""

    def __init__(self) -> None:
        self._groups: Counter[tuple[Axis, int]] = Counter()
        self._pairs: Counter[tuple[int, int]] = Counter()
        self._num_calls = 0

    def of_group(self, axis: Axis, stage: int) -> int:
        """Return the number of the next collective of a stage's groups on an axis, from 0."""
        number = self._groups[axis, stage]
        self._groups[axis, stage] += 1
        return number

    def of_pair(self, src_stage: int, dst_stage: int) -> int:
        """Return the number of the next message from one stage to another, from 0."""
        number = self._pairs[src_stage, dst_stage]
        self._pairs[src_stage, dst_stage] += 1
        return number

    def of_call(self) -> int:
        """Return the number of the next call that issues several operations, from 1."""
        self._num_calls += 1
        return self._num_calls
