"""Time that a step shares with the one before, in a replay with other times.

A rank that ends a step late begins the next one late, while the others already run it: the steps
share time, which belongs to the earlier one. If a change shortens what that rank does after its
last communication, it begins the next step earlier by as much, and the steps share less. Steps are
replayed alone, so the step before is taken to change as this one does.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import NO_GROUP
from .program import Change

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .model import ReplayModel


class StepOverlap:
    """The end of each rank's steps, as recorded, and how other times move it.

    A *slot* is a rank in a step.
    """

    def __init__(self, model: ReplayModel) -> None:
        self.model = model
        self._num_steps = len(model.operations.steps)
        self._has_overlap = model.overlap_ns is not None
        self._overlap_ns = np.zeros(self._num_steps, dtype=np.float64)
        if model.overlap_ns is not None:
            self._overlap_ns += model.overlap_ns

    def shift(
        self, duration_ns: NDArray[np.float64], gap_ns: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the launch gaps and the shared time of a replay.

        Args:
            duration_ns: Shape (ops,).
            gap_ns: Shape (ops,), as if each rank ended its steps as recorded.

        Returns:
            Shapes (ops,) and (steps,), ns.
        """
        if not self._has_overlap:
            return gap_ns, self._overlap_ns
        earlier_ns = self._earlier_ns(self._tail_ns(duration_ns))
        begins = self._begins
        shifted_ns = gap_ns.copy()
        shifted_ns[begins] -= earlier_ns[self._slot[begins]]
        return shifted_ns, self._shared_ns(earlier_ns)

    def shift_each(
        self,
        duration_ns: NDArray[np.float64],
        gap_ns: NDArray[np.float64],
        changes: Sequence[Change],
    ) -> tuple[list[Change], NDArray[np.float64]]:
        """Return changes with the gaps that each brings about, and the shared time under each.

        Args:
            duration_ns: Shape (ops,).
            gap_ns: Shape (ops,), as if each rank ended its steps as recorded.
            changes: Their gaps likewise; rows ascending.

        Returns:
            The second has the shape (changes, steps), ns.
        """
        if not self._has_overlap:
            return list(changes), np.zeros((len(changes), self._num_steps))
        before_ns = self._tail_ns(duration_ns)
        shifted, shared_ns = [], []
        for rows, new_ns, new_gap_ns in changes:
            tail_ns = before_ns.copy()
            last = self._is_last[rows]
            np.add.at(tail_ns, self._slot[rows[last]], (new_ns - duration_ns[rows])[last])
            earlier_ns = self._earlier_ns(tail_ns)
            moved = self._begins[(tail_ns != before_ns)[self._slot[self._begins]]]
            moved = np.setdiff1d(moved, rows, assume_unique=True)
            all_rows = np.concatenate((rows, moved))
            gaps_ns = np.concatenate((new_gap_ns, gap_ns[moved]))
            gaps_ns -= np.where(self._is_begin[all_rows], earlier_ns[self._slot[all_rows]], 0.0)
            durations_ns = np.concatenate((new_ns, duration_ns[moved]))
            shifted.append(Change(all_rows, durations_ns, gaps_ns))
            shared_ns.append(self._shared_ns(earlier_ns))
        return shifted, np.array(shared_ns).reshape(len(changes), self._num_steps)

    def _earlier_ns(self, tail_ns: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how much earlier each rank begins the step. Shape (slots,); negative: later."""
        return np.minimum(self._recorded_tail_ns - tail_ns, self._late_ns)

    def _shared_ns(self, earlier_ns: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the time shared with the step before, where its ranks end earlier."""
        by_step = (self._num_steps, -1)
        before_ns = self._end_ns.reshape(by_step).max(axis=1)
        after_ns = (self._end_ns - earlier_ns).reshape(by_step).max(axis=1)
        shared_ns: NDArray[np.float64] = self._overlap_ns - (before_ns - after_ns)
        return shared_ns

    def _tail_ns(self, duration_ns: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the time of each rank after its last communication. Shape (slots,)."""
        tail_ns = np.zeros(self._num_slots)
        np.add.at(tail_ns, self._slot[self._lasts], duration_ns[self._lasts])
        return tail_ns

    @cached_property
    def _slot(self) -> NDArray[np.int64]:
        """Shape (ops,)."""
        model = self.model
        num_ranks = int(model.rank.max()) + 1
        return model.operations.step.astype(np.int64) * num_ranks + model.rank

    @cached_property
    def _num_slots(self) -> int:
        return self._num_steps * (int(self.model.rank.max()) + 1)

    @cached_property
    def _end_ns(self) -> NDArray[np.float64]:
        """Recorded end of each slot, from the first begin of its step; of no operation: 0."""
        operations = self.model.operations
        begin = np.full(self._num_steps, np.iinfo(np.int64).max)
        np.minimum.at(begin, operations.step, operations.start_ns)
        ends = np.zeros(self._num_slots, dtype=np.int64)
        np.maximum.at(ends, self._slot, operations.end_ns - begin[operations.step])
        return ends.astype(np.float64)

    @cached_property
    def _is_last(self) -> NDArray[np.bool_]:
        """Shape (ops,): begins when its rank's last communication of the step has ended."""
        operations = self.model.operations
        grouped = np.flatnonzero(operations.group != NO_GROUP)
        until = np.full(self._num_slots, np.iinfo(np.int64).min)
        np.maximum.at(until, self._slot[grouped], operations.end_ns[grouped])
        return operations.start_ns >= until[self._slot]

    @cached_property
    def _lasts(self) -> NDArray[np.int64]:
        return np.flatnonzero(self._is_last)

    @cached_property
    def _is_begin(self) -> NDArray[np.bool_]:
        """Shape (ops,): it depends on no other operation of its step."""
        is_begin = np.ones(len(self._slot), dtype=np.bool_)
        is_begin[self.model.operations.dst] = False
        return is_begin

    @cached_property
    def _begins(self) -> NDArray[np.int64]:
        return np.flatnonzero(self._is_begin)

    @cached_property
    def _recorded_tail_ns(self) -> NDArray[np.float64]:
        return self._tail_ns(self.model.operations.duration_ns)

    @cached_property
    def _late_ns(self) -> NDArray[np.float64]:
        """Part of each slot's late begin that the step before shares. Shape (slots,)."""
        late_ns = np.zeros(self._num_slots)
        begins = self._begins
        np.maximum.at(late_ns, self._slot[begins], self.model.operations.gap_ns[begins])
        shared_ns = np.repeat(self._overlap_ns, self._num_slots // self._num_steps)
        return np.minimum(late_ns, shared_ns)
