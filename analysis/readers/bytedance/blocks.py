"""Where each operation of a ByteDance trace stands: by step, replica, stage, type and number.

The rows of one (step, dp, stage, type) are a *block*. In a block, ``seq``
numbers the operations from 0 by start, so an operation's place in sorted order
is the block's begin plus its ``seq``: counting replaces sorting. Only a trace
whose numbers have gaps or repeats, or say otherwise than the starts, is sorted.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ...arrays.sorting import argsort_rows
from .format import (
    BACKWARD_COMPUTE,
    CODE,
    DP_ONLY,
    EMBEDDING_GRADS,
    FORWARD_COMPUTE,
    GRAD_CLIP,
    OPTIMIZER,
    TYPES,
    rows_of_columns,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from ...trace.tables import RunInfo, SpanTable
    from .format import Columns, Whole

NUM_TYPES = len(TYPES)
UNKNOWN, NO_PARTNERS = -1, -2
"""In place of a type's code: nobody knows it; or it joins replicas, and there is but one."""

MAX_LOOKUP_SIZE = 1 << 22
"""Step numbers that span more than this are searched instead of looked up."""

MAX_NAMES, MAX_NAME_LENGTH = 5, 60
"""Of unknown types that a warning names."""

MAX_INT32 = (1 << 31) - 1

Result = TypeVar("Result")

SLICE_ROWS = 1 << 19
"""Rows of one piece: what it makes in between is small enough to be used again, not mapped anew."""

NUM_THREADS = 2


def map_slices(
    work: Callable[[slice], Result], num_rows: int, *, rows_at_once: int = SLICE_ROWS
) -> list[Result]:
    """Return what ``work`` says of each piece of the rows, in order."""
    pieces = [
        slice(first, min(first + rows_at_once, num_rows))
        for first in range(0, num_rows, rows_at_once)
    ]
    if len(pieces) <= 1:
        return [work(piece) for piece in pieces]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(work, pieces))


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

    def find_contradictions(self) -> dict[int, str]:
        """Name the steps in which an operation is missing, or is one too many."""
        shape = (*self.count.shape[:2], self.num_stages, NUM_TYPES)
        return find_contradictions(self.count.reshape(shape), self.steps) | self.twice


def build_blocks(run: RunInfo, columns: Columns) -> Blocks:
    """Find each operation's place.

    Args:
        run: Its layout and the (dp, stage) of each rank.
        columns: Its operations, in any order.

    Raises:
        KeyError: An operation's rank is not in ``run``.
    """
    type_of_name = np.array([_type_code(run, name) for name in columns.names], dtype=np.int32)
    taken, warnings = _find_known_types(columns, type_of_name)
    columns = columns if taken is None else rows_of_columns(columns, taken)
    steps, index_of_step = _index_steps(columns.step)
    replicas, worker_of_rank, lowest_rank = _index_workers(run)
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

    map_slices(number, len(block), rows_at_once=max(SLICE_ROWS, num_blocks))
    count = num_per_block.reshape(len(steps), len(replicas), run.layout.pp * NUM_TYPES)
    per_replica = count.sum(axis=2)
    order, twice = _sort_by_seq(columns, block, num_per_block), dict[int, str]()
    if order is None:
        order, twice, more = _sort_by_start(columns, block)
        warnings += more
    num_traced = int(
        num_per_block.reshape(len(steps), num_workers, NUM_TYPES).any(axis=(0, 2)).sum()
    )
    warnings += warn_untraced(num_traced, run.layout.dp * run.layout.pp)
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


def _find_known_types(
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
    found = sorted(columns.names[code][:MAX_NAME_LENGTH] for code in strange)
    more = f" and {len(found) - MAX_NAMES} more" * (len(found) > MAX_NAMES)
    names = ", ".join(found[:MAX_NAMES]) + more
    num = int(per_name[strange].sum())
    return taken, (f"{num} operations of unknown type are left out of the replay: {names}",)


def _index_steps(step: Whole) -> tuple[NDArray[np.int64], Callable[[Whole], NDArray[np.int64]]]:
    """Return the step numbers, ascending, and a function from them to their index."""
    lowest, highest = (int(step.min()), int(step.max())) if len(step) else (0, -1)
    if highest - lowest > MAX_LOOKUP_SIZE:
        steps = np.unique(step).astype(np.int64)
        return steps, lambda numbers: np.searchsorted(steps, numbers)
    seen = _mark_values(step, lowest, highest)
    index = np.cumsum(seen) - 1
    return np.flatnonzero(seen) + lowest, lambda numbers: index[numbers.astype(np.int64) - lowest]


def _mark_values(values: Whole, lowest: int, highest: int) -> NDArray[np.bool_]:
    """Tell which of the numbers from ``lowest`` to ``highest`` occur."""
    seen = np.zeros(highest - lowest + 1, dtype=np.bool_)

    def mark(rows: slice) -> None:
        seen[values[rows].astype(np.int64) - lowest] = True

    map_slices(mark, len(values))
    return seen


def _index_workers(run: RunInfo) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
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
    seen = _mark_values(rank, 0, max(int(rank.max(initial=0)), len(worker_of_rank) - 1))
    seen[: len(worker_of_rank)] &= worker_of_rank < 0
    if seen.any():
        strange = int(np.flatnonzero(seen)[0])
        raise KeyError(f"run {run.run_id} has operations of rank {strange}, which it does not list")


def _sort_by_seq(
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
    placed = all(map_slices(place, num)) and int(order.min(initial=0)) >= 0
    return order if placed and all(map_slices(ascends, num)) else None


def _sort_by_start(
    columns: Columns, block: NDArray[np.int32]
) -> tuple[Whole, dict[int, str], tuple[str, ...]]:
    """Sort rows by block, then start, then seq; name what the numbers say against it.

    Returns:
        The order; the steps with an operation twice: of one worker, type and number, at one
        time; and what a reader should know.
    """
    order: NDArray[np.int64] = argsort_rows(block, columns.start_ns, columns.seq)
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


def find_contradictions(count: NDArray[np.int64], steps: NDArray[np.int64]) -> dict[int, str]:
    """Find the steps in which workers have other numbers of operations than their partners.

    A worker that the whole trace lacks has no part in it: the others may still be compared.

    Args:
        count: Shape (steps, replicas, stages, types): operations of each.
        steps: Shape (steps,): step numbers.

    Returns:
        By step number: what is missing.
    """
    traced: NDArray[np.bool_] = np.any(count, axis=(0, 3))
    found: dict[int, str] = {}
    missing = (traced & (count[..., CODE[OPTIMIZER]] == 0)).sum(axis=(1, 2))
    for index in np.flatnonzero(missing).tolist():
        found[int(steps[index])] = (
            f"{missing[index]} of {int(traced.sum())} workers have no {OPTIMIZER}"
        )
    for name, lowest, highest in _counts_that_should_agree(count, traced):
        for index in np.flatnonzero((lowest < highest).any(axis=1)).tolist():
            at = int(np.argmax(highest[index] - lowest[index]))
            found.setdefault(
                int(steps[index]),
                f"workers that belong together have {lowest[index, at]} to"
                f" {highest[index, at]} {name}",
            )
    return found


def describe_unpaired(num_by_step: Mapping[int, int]) -> dict[int, str]:
    """Say how many sends and receives of each step have no partner."""
    sentence = "{} sends and receives have no partner"
    return {step: sentence.format(num) for step, num in num_by_step.items() if num}


def warn_untraced(num_traced: int, num_workers: int) -> tuple[str, ...]:
    """Say how many workers the trace lacks.

    Args:
        num_traced: Workers with operations.
        num_workers: Workers of the job's layout.
    """
    if num_traced in (0, num_workers):
        return ()
    sentence = (
        f"{num_workers - num_traced} of {num_workers} workers are not in the trace:"
        " what others waited for them counts as transfer"
    )
    return (sentence,)


def _counts_that_should_agree(
    count: NDArray[np.int64], traced: NDArray[np.bool_]
) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield (what, lowest, highest), the numbers of shape (steps, groups)."""
    num_steps, num_workers = len(count), traced.size
    for code in (CODE[FORWARD_COMPUTE], CODE[BACKWARD_COMPUTE]):
        yield (TYPES[code], *_count_range(count[..., code], traced, axis=2))
    both = np.stack((count[..., CODE[FORWARD_COMPUTE]], count[..., CODE[BACKWARD_COMPUTE]]))
    yield (
        "forward and backward computes",
        both.min(axis=0).reshape(num_steps, num_workers),
        both.max(axis=0).reshape(num_steps, num_workers),
    )
    for name in sorted(DP_ONLY):
        yield (name, *_count_range(count[..., CODE[name]], traced, axis=1))
    ends = [0, -1]
    yield (
        EMBEDDING_GRADS,
        *_count_range(count[:, :, ends, CODE[EMBEDDING_GRADS]], traced[:, ends], axis=2),
    )
    everywhere = count[..., CODE[GRAD_CLIP]].reshape(num_steps, 1, num_workers)
    yield (GRAD_CLIP, *_count_range(everywhere, traced.reshape(1, num_workers), axis=2))


def _count_range(
    count: NDArray[np.int64], traced: NDArray[np.bool_], *, axis: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the lowest and highest number over an axis, of traced workers alone."""
    most = np.iinfo(np.int64).max
    lowest = np.where(traced, count, most).min(axis=axis)
    highest = np.where(traced, count, 0).max(axis=axis)
    return np.minimum(lowest, highest), highest


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns sorted by (step, dp, stage, type, seq), and the blocks of equal (worker, type)."""

    steps: tuple[int, ...]
    """Step numbers, ascending."""

    row: NDArray[np.int64]
    """Row in the span table."""

    step: NDArray[np.int32]
    dp: NDArray[np.int32]
    stage: NDArray[np.int32]
    type: NDArray[np.int8]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    chunk: NDArray[np.int32]
    worker: NDArray[np.int64]
    """Index of the (step, dp, stage)."""

    worker_dp: NDArray[np.int64]
    """Shape (workers,): index of the (step, dp)."""

    worker_stage: NDArray[np.int32]
    nth: NDArray[np.int64]
    """Position in the block."""

    first: NDArray[np.int64]
    """Shape (workers, types): where the block begins."""

    count: NDArray[np.int64]
    """Shape (workers, types): how many operations it has."""

    def of(self, name: str) -> NDArray[np.int64]:
        """Return the rows of one type, in order."""
        return np.flatnonzero(self.type == CODE[name])


def sort_rows(run: RunInfo, spans: SpanTable) -> tuple[Rows, Blocks]:
    """Sort a trace's operations; return them and the blocks that they were taken from.

    Raises:
        KeyError: An operation's rank is not in ``run``.
    """
    blocks = build_blocks(run, spans)
    num_stages, num_replicas = blocks.num_stages, len(blocks.replicas)
    count = blocks.count.reshape(-1, NUM_TYPES)
    place = np.flatnonzero(count.any(axis=1))
    count = count[place]
    by_dp, stage = place // num_stages, place % num_stages
    num = count.sum(axis=1)
    per_block = count.ravel()
    first = np.cumsum(per_block) - per_block
    columns, order = blocks.columns, blocks.order
    start = columns.start_ns[order]
    rows = Rows(
        steps=tuple(blocks.steps.tolist()),
        row=(order if blocks.taken is None else blocks.taken[order]).astype(np.int64, copy=False),
        step=np.repeat((by_dp // num_replicas).astype(np.int32), num),
        dp=np.repeat(blocks.replicas[by_dp % num_replicas].astype(np.int32), num),
        stage=np.repeat(stage.astype(np.int32), num),
        type=np.repeat(np.tile(np.arange(NUM_TYPES, dtype=np.int8), len(place)), per_block),
        start=start,
        end=start + columns.duration_ns[order],
        chunk=columns.chunk[order].astype(np.int32, copy=False),
        worker=np.repeat(np.arange(len(place)), num),
        worker_dp=by_dp,
        worker_stage=stage.astype(np.int32),
        nth=np.arange(len(order)) - np.repeat(first, per_block),
        first=first.reshape(count.shape),
        count=count,
    )
    return rows, blocks


def rows_by_start(rows: Rows, names: tuple[str, ...]) -> NDArray[np.int64]:
    """Return the rows of some types by worker, then by start."""
    members = np.flatnonzero(np.isin(rows.type, [CODE[name] for name in names]))
    if len(names) == 1:
        return members
    return members[argsort_rows(rows.worker[members], rows.start[members], rows.end[members])]
