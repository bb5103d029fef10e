"""Where each operation of a ByteDance trace stands: by step, replica, stage, type and number.

The rows of one (step, dp, stage, type) are a *block*. In a block, ``seq``
numbers the operations from 0 by start, so an operation's place in sorted order
is the block's begin plus its ``seq``: counting replaces sorting. Only a trace
whose numbers have gaps or repeats, or say otherwise than the starts, is sorted.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from ...arrays.sorting import sort_rows
from ...arrays.threads import ROWS_AT_ONCE, in_pieces
from .columns import rows_of_columns
from .format import CODE, DP_ONLY, TYPES
from .validation import contradictions, untraced_warnings

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ...trace.tables import RunInfo
    from .columns import Columns, Whole

NUM_TYPES = len(TYPES)
UNKNOWN, NO_PARTNERS = -1, -2
"""In place of a type's code: nobody knows it; or it joins replicas, and there is but one."""

LARGEST_TABLE = 1 << 22
"""Step numbers that span more than this are searched instead of looked up."""

MOST_NAMES, LONGEST_NAME = 5, 60
"""Of unknown types that a warning names."""

MAX_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The rows of a trace in order of (step, dp, stage, type, start)."""

    columns: Columns
    """The operations that take part, in any order."""

    taken: NDArray[np.int64] | None
    """Which rows of the columns that were given these are; None: all."""

    steps: NDArray[np.int64]
    """Shape (steps,): step numbers, ascending."""

    replicas: NDArray[np.int64]
    """Shape (replicas,): dp positions, ascending."""

    num_stages: int
    order: Whole
    """Shape (ops,): rows of ``columns``."""

    count: NDArray[np.int64]
    """Shape (steps, replicas, stages x types): operations of each block."""

    first: NDArray[np.int64]
    """Shape (steps, replicas): where the replica's operations begin in ``order``."""

    lowest_rank: NDArray[np.int64]
    """Shape (replicas, stages): of the worker's ranks; -1 where the run has no such worker."""

    twice: dict[int, str]
    """Steps with an operation twice."""

    warnings: tuple[str, ...]

    def contradictions(self) -> dict[int, str]:
        """Name the steps in which an operation is missing, or is one too many."""
        shape = (*self.count.shape[:2], self.num_stages, NUM_TYPES)
        return contradictions(self.count.reshape(shape), self.steps) | self.twice


def place_blocks(run: RunInfo, columns: Columns) -> Blocks:
    """Find each operation's place.

    Args:
        run: Its layout and the (dp, stage) of each rank.
        columns: Its operations, in any order.

    Raises:
        KeyError: An operation's rank is not in ``run``.
    """
    type_of_name = np.array([_type_code(run, name) for name in columns.names], dtype=np.int32)
    taken, warnings = _known(columns, type_of_name)
    columns = columns if taken is None else rows_of_columns(columns, taken)
    steps, index_of_step = _lookup(columns.step)
    replicas, worker_of_rank, lowest_rank = _workers(run)
    _check_ranks(run, columns.rank, worker_of_rank)
    num_workers = len(replicas) * run.layout.pp
    num_blocks = len(steps) * num_workers * NUM_TYPES
    block = np.empty(len(columns.name), dtype=np.int32)
    num_per_block = np.zeros(num_blocks, dtype=np.int64)
    one_at_a_time = Lock()

    def number(rows: slice) -> None:
        step = index_of_step(columns.step[rows])
        found = (step * num_workers + worker_of_rank[columns.rank[rows]]) * NUM_TYPES
        found += type_of_name[columns.name[rows]]
        block[rows] = found
        counts = np.bincount(found, minlength=num_blocks)
        with one_at_a_time:
            np.add(num_per_block, counts, out=num_per_block)

    in_pieces(number, len(block), rows_at_once=max(ROWS_AT_ONCE, num_blocks))
    count = num_per_block.reshape(len(steps), len(replicas), run.layout.pp * NUM_TYPES)
    per_replica = count.sum(axis=2)
    order, twice = _by_number(columns, block, num_per_block), dict[int, str]()
    if order is None:
        order, twice, more = _by_start(columns, block)
        warnings += more
    num_traced = int(
        num_per_block.reshape(len(steps), num_workers, NUM_TYPES).any(axis=(0, 2)).sum()
    )
    warnings += untraced_warnings(num_traced, run.layout.dp * run.layout.pp)
    return Blocks(
        columns=columns,
        taken=taken,
        steps=steps,
        replicas=replicas,
        num_stages=run.layout.pp,
        order=order,
        count=count,
        first=(np.cumsum(per_replica) - per_replica.ravel()).reshape(per_replica.shape),
        lowest_rank=lowest_rank,
        twice=twice,
        warnings=warnings,
    )


def _type_code(run: RunInfo, name: str) -> int:
    """Return the code of an operation's type, or why it takes no part."""
    if run.layout.dp * run.layout.dsp == 1 and name in DP_ONLY:
        return NO_PARTNERS
    return CODE.get(name, UNKNOWN)


def _known(
    columns: Columns, type_of_name: NDArray[np.int32]
) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Return the rows that take part, None if all do; and say what nobody knows."""
    if (type_of_name >= 0).all():
        return None, ()
    per_name = np.bincount(columns.name, minlength=len(columns.names))
    if not per_name[type_of_name < 0].any():
        return None, ()
    taken = np.flatnonzero(type_of_name[columns.name] >= 0)
    strange = np.flatnonzero((type_of_name == UNKNOWN) & (per_name > 0))
    if not len(strange):
        return taken, ()
    found = sorted(columns.names[code][:LONGEST_NAME] for code in strange)
    more = f" and {len(found) - MOST_NAMES} more" * (len(found) > MOST_NAMES)
    names = ", ".join(found[:MOST_NAMES]) + more
    num = int(per_name[strange].sum())
    return taken, (f"{num} operations of unknown type are left out of the replay: {names}",)


def _lookup(step: Whole) -> tuple[NDArray[np.int64], Callable[[Whole], NDArray[np.int64]]]:
    """Return the step numbers, ascending, and a function from them to their index."""
    lowest, highest = (int(step.min()), int(step.max())) if len(step) else (0, -1)
    if highest - lowest > LARGEST_TABLE:
        steps = np.unique(step).astype(np.int64)
        return steps, lambda numbers: np.searchsorted(steps, numbers)
    seen = _seen(step, lowest, highest)
    index = np.cumsum(seen) - 1
    return np.flatnonzero(seen) + lowest, lambda numbers: index[numbers.astype(np.int64) - lowest]


def _seen(values: Whole, lowest: int, highest: int) -> NDArray[np.bool_]:
    """Tell which of the numbers from ``lowest`` to ``highest`` occur."""
    seen = np.zeros(highest - lowest + 1, dtype=np.bool_)

    def mark(rows: slice) -> None:
        seen[values[rows].astype(np.int64) - lowest] = True

    in_pieces(mark, len(values))
    return seen


def _workers(run: RunInfo) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the dp positions, each rank's worker as a number, and each worker's lowest rank.

    The number is -1 of a rank that the run does not know.
    """
    infos = [info for epoch in run.epochs for info in epoch.ranks]
    rank = np.array([info.rank for info in infos], dtype=np.int64)
    replicas, replica = np.unique([info.coords.dp for info in infos], return_inverse=True)
    worker = replica * run.layout.pp + np.array([info.coords.pp for info in infos])
    worker_of_rank = np.full(int(rank.max()) + 1, -1)
    worker_of_rank[rank] = worker
    lowest = np.full(len(replicas) * run.layout.pp, np.iinfo(np.int64).max)
    np.minimum.at(lowest, worker, rank)
    lowest[lowest == np.iinfo(np.int64).max] = -1
    return replicas.astype(np.int64), worker_of_rank, lowest.reshape(len(replicas), run.layout.pp)


def _check_ranks(run: RunInfo, rank: Whole, worker_of_rank: NDArray[np.int64]) -> None:
    seen = _seen(rank, 0, max(int(rank.max(initial=0)), len(worker_of_rank) - 1))
    seen[: len(worker_of_rank)] &= worker_of_rank < 0
    if seen.any():
        strange = int(np.flatnonzero(seen)[0])
        raise KeyError(f"run {run.run_id} has operations of rank {strange}, which it does not list")


def _by_number(
    columns: Columns, block: NDArray[np.int32], num_per_block: NDArray[np.int64]
) -> Whole | None:
    """Sort rows by block, then seq; None if that is not also the order of their starts."""
    begins = np.cumsum(num_per_block) - num_per_block
    num = len(columns.name)
    order: Whole = np.full(num, -1, dtype=np.int32 if num < MAX_INT32 else np.int64)

    def place(rows: slice) -> bool:
        seq = columns.seq[rows]
        at = begins[block[rows]]
        at += seq
        fits = int(seq.min()) >= 0 and int(at.max()) < num
        if fits:
            order[at] = np.arange(rows.start, rows.start + len(at), dtype=order.dtype)
        return fits

    def ascends(rows: slice) -> bool:
        here = order[max(rows.start - 1, 0) : rows.stop]
        later = np.diff(columns.start_ns[here]) >= 0
        return bool((later | (block[here[1:]] != block[here[:-1]])).all())

    # Rows of the first block can only lie in it, so if every place is taken it
    # holds just its own; then the same is true of the second, and so on.
    placed = all(in_pieces(place, num)) and int(order.min(initial=0)) >= 0
    return order if placed and all(in_pieces(ascends, num)) else None


def _by_start(
    columns: Columns, block: NDArray[np.int32]
) -> tuple[Whole, dict[int, str], tuple[str, ...]]:
    """Sort rows by block, then start, then seq; name what the numbers say against it.

    Returns:
        The order; the steps with an operation twice: of one worker, type and number, at one
        time; and what a reader should know.
    """
    order: NDArray[np.int64] = sort_rows(block, columns.start_ns, columns.seq)
    before, after = order[:-1], order[1:]
    same = block[before] == block[after]
    num_turned = int((same & (columns.seq[before] > columns.seq[after])).sum())
    for column in (columns.seq, columns.start_ns, columns.duration_ns):
        same &= column[before] == column[after]
    steps, num = np.unique(columns.step[after[same]], return_counts=True)
    twice = {
        step: f"{count} operations are in the trace twice"
        for step, count in zip(steps.tolist(), num.tolist(), strict=True)
    }
    if not num_turned:
        return order, twice, ()
    sentence = (
        f"{num_turned} operations began before one of a lower seq_id:"
        " they are taken in the order of their starts"
    )
    return order, twice, (sentence,)
