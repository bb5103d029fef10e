"""Operations of a ByteDance trace sorted by step, replica, stage, type and number.

The operations of one (step, dp, stage, type) are a *block*. In a block, ``seq`` numbers the
operations from 0 in order of start, so an operation's sorted position is the block's begin plus
its ``seq``: counting replaces sorting. A trace is sorted only if its numbers have gaps or repeats,
or contradict the starts.

The format does not say which operations of two workers belong together: the n-th of one belongs
to the n-th of the other. If an operation is missing, all that follow it would be paired wrongly,
so such a step is left out and named.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ...arrays.sorting import argsort_rows, find_positions, first_rows
from .format import CODE, COMPUTE_CODES, DP_ONLY, TYPES, OpType, take_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from ...trace.tables import RunInfo
    from .format import Columns, IntArray

NUM_TYPES = len(TYPES)
NOTHING_KNOWN = "it has no operation of a known type"
"""Why a step is left out of which no operation is replayed."""

UNKNOWN, NO_PARTNERS = -1, -2
"""Instead of a type's code: the type is unknown; or it joins replicas, of which there is one."""

MAX_LOOKUP_SIZE = 1 << 22
"""A wider range of step numbers is searched instead of looked up."""

MAX_NAMES, MAX_NAME_LENGTH = 5, 60
"""Limits of a warning that lists unknown types."""

MAX_INT32 = (1 << 31) - 1

SLICE_ROWS = 1 << 19
"""Rows of a slice: the allocator reuses temporary arrays of this size instead of mapping new
pages."""

STEPS_ROWS = 1 << 17
"""Rows of the steps that are read together: a column of 64-bit numbers takes 1 MB."""

NUM_THREADS = 2

Result = TypeVar("Result")


def map_slices(
    work: Callable[[slice], Result], num_rows: int, *, slice_rows: int = SLICE_ROWS
) -> list[Result]:
    """Return the results of ``work`` for each slice of the rows, computed on several threads.

    numpy releases the interpreter's lock while it works on long arrays.
    """
    slices = [
        slice(first, min(first + slice_rows, num_rows)) for first in range(0, num_rows, slice_rows)
    ]
    if len(slices) <= 1:
        return [work(rows) for rows in slices]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(work, slices))


def _measure_bounds(
    steps: NDArray[np.int64], columns: Columns
) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], list[int]]:
    """Return the first start and the last end of each step, and the steps that are not listed."""
    first = np.full(len(steps), np.iinfo(np.int64).max)
    last = np.full(len(steps), np.iinfo(np.int64).min)
    begins = np.flatnonzero(np.append(True, columns.step[1:] != columns.step[:-1]))
    number = columns.step[begins[: len(columns.step)]].astype(np.int64)
    known = np.isin(number, steps)
    at = find_positions(number[known], steps)
    if len(number):
        end_ns = columns.start_ns + columns.duration_ns
        np.minimum.at(first, at, np.minimum.reduceat(columns.start_ns, begins)[known])
        np.maximum.at(last, at, np.maximum.reduceat(end_ns, begins)[known])
    return (first, last), np.unique(number[~known]).tolist()


def sort_rows(run: RunInfo, trace: Columns) -> Rows:
    """Return a trace's operations sorted.

    Args:
        run: Its layout and the (dp, stage) of each rank.
        trace: Its operations, in any order.

    Raises:
        KeyError: An operation's rank is not in ``run``.
    """
    codes = dict(CODE)
    if run.layout.dp * run.layout.dsp == 1:
        codes |= dict.fromkeys(DP_ONLY, NO_PARTNERS)
    type_by_name = np.array([codes.get(name, UNKNOWN) for name in trace.names], dtype=np.int32)
    taken, warnings = _find_known_types(trace, type_by_name)
    operations = trace if taken is None else take_rows(trace, taken)
    steps, find_step_index = _index_steps(operations.step)
    replicas, worker_by_rank = _index_workers(run)
    highest = max(int(operations.rank.max(initial=0)), len(worker_by_rank) - 1)
    unlisted = _mark_values(operations.rank, 0, highest)
    unlisted[: len(worker_by_rank)] &= worker_by_rank < 0
    if unlisted.any():
        rank = int(np.flatnonzero(unlisted)[0])
        raise KeyError(f"run {run.run_id} has operations of rank {rank}, which it does not list")
    num_workers = len(replicas) * run.layout.pp
    num_blocks = len(steps) * num_workers * NUM_TYPES
    block = np.empty(len(operations.name), dtype=np.int32)
    block_sizes = np.zeros(num_blocks, dtype=np.int64)
    lock = Lock()

    def number(rows: slice) -> None:
        step = find_step_index(operations.step[rows])
        numbers = (step * num_workers + worker_by_rank[operations.rank[rows]]) * NUM_TYPES
        numbers += type_by_name[operations.name[rows]]
        block[rows] = numbers
        counts = np.bincount(numbers, minlength=num_blocks)
        with lock:
            np.add(block_sizes, counts, out=block_sizes)

    map_slices(number, len(block), slice_rows=max(SLICE_ROWS, num_blocks))
    order, repeated = _sort_by_seq(operations, block, block_sizes), dict[int, str]()
    if order is None:
        order, repeated, more = _sort_by_start(operations, block)
        warnings += more
    shape = len(steps), len(replicas), run.layout.pp, NUM_TYPES
    num_traced = int(block_sizes.reshape(shape).any(axis=(0, 3)).sum())
    num_untraced = run.layout.dp * run.layout.pp - num_traced
    if num_traced and num_untraced:
        sentence = (
            f"{num_untraced} of {num_traced + num_untraced} workers are not in the trace:"
            " time that others waited for them counts as transfer"
        )
        warnings += (sentence,)
    uneven = _find_contradictions(block_sizes.reshape(shape), steps) | repeated
    bounds_ns, unlisted_steps = _measure_bounds(steps, trace)
    count = block_sizes.reshape(-1, NUM_TYPES)
    worker = np.flatnonzero(count.any(axis=1))
    count = count[worker]
    step_dp, stage = worker // run.layout.pp, worker % run.layout.pp
    num = count.sum(axis=1)
    sizes = count.ravel()
    first = np.cumsum(sizes) - sizes
    start = operations.start_ns[order]
    return Rows(
        steps=tuple(steps.tolist()),
        bounds_ns=bounds_ns,
        uneven=uneven | dict.fromkeys(unlisted_steps, NOTHING_KNOWN),
        warnings=warnings,
        row=order if taken is None else taken[order],
        step=np.repeat((step_dp // len(replicas)).astype(np.int32), num),
        rank=operations.rank[order].astype(np.int32, copy=False),
        dp=np.repeat(replicas[step_dp % len(replicas)].astype(np.int32), num),
        stage=np.repeat(stage.astype(np.int32), num),
        type=np.repeat(np.tile(np.arange(NUM_TYPES, dtype=np.int8), len(worker)), sizes),
        start=start,
        end=start + operations.duration_ns[order],
        chunk=operations.chunk[order].astype(np.int32, copy=False),
        worker=np.repeat(np.arange(len(worker), dtype=np.int32), num),
        worker_dp=step_dp,
        worker_stage=stage.astype(np.int32),
        first=first.reshape(count.shape),
        count=count,
    )


def _find_known_types(
    trace: Columns, type_by_name: NDArray[np.int32]
) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Return the rows whose type has a code, None for all, and a warning about the others."""
    if (type_by_name >= 0).all():
        return None, ()
    per_name = np.bincount(trace.name, minlength=len(trace.names))
    if not per_name[type_by_name < 0].any():
        return None, ()
    taken = np.flatnonzero(type_by_name[trace.name] >= 0)
    unknown = np.flatnonzero((type_by_name == UNKNOWN) & (per_name > 0))
    if not len(unknown):
        return taken, ()
    unknown_names = sorted(trace.names[code][:MAX_NAME_LENGTH] for code in unknown)
    more = f" and {len(unknown_names) - MAX_NAMES} more" * (len(unknown_names) > MAX_NAMES)
    names = ", ".join(unknown_names[:MAX_NAMES]) + more
    num = int(per_name[unknown].sum())
    return taken, (f"{num} operations of unknown type are left out of the replay: {names}",)


def _index_steps(
    step: IntArray,
) -> tuple[NDArray[np.int64], Callable[[IntArray], NDArray[np.int64]]]:
    """Return the step numbers, ascending, and a function that returns their indices."""
    lowest, highest = (int(step.min()), int(step.max())) if len(step) else (0, -1)
    if highest - lowest > MAX_LOOKUP_SIZE:
        steps = np.unique(step).astype(np.int64)
        return steps, lambda numbers: np.searchsorted(steps, numbers)
    seen = _mark_values(step, lowest, highest)
    index = np.cumsum(seen) - 1
    return np.flatnonzero(seen) + lowest, lambda numbers: index[numbers.astype(np.int64) - lowest]


def _mark_values(values: IntArray, lowest: int, highest: int) -> NDArray[np.bool_]:
    """Return which of the numbers from ``lowest`` to ``highest`` occur."""
    seen = np.zeros(highest - lowest + 1, dtype=np.bool_)

    def mark(rows: slice) -> None:
        seen[values[rows].astype(np.int64) - lowest] = True

    map_slices(mark, len(values))
    return seen


def _index_workers(run: RunInfo) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the dp positions, and the worker number of each rank.

    The number of a rank that the run does not list is -1.
    """
    infos = [info for epoch in run.epochs for info in epoch.ranks]
    rank = np.array([info.rank for info in infos], dtype=np.int64)
    replicas, replica = np.unique([info.coords.dp for info in infos], return_inverse=True)
    worker = replica * run.layout.pp + np.array([info.coords.pp for info in infos])
    worker_by_rank = np.full(int(rank.max()) + 1, -1)
    worker_by_rank[rank] = worker
    return replicas.astype(np.int64), worker_by_rank


def _sort_by_seq(
    operations: Columns, block: NDArray[np.int32], block_sizes: NDArray[np.int64]
) -> IntArray | None:
    """Sort rows by block, then seq; None if that is not also the order of their starts."""
    begins = np.cumsum(block_sizes) - block_sizes
    num = len(operations.name)
    order: IntArray = np.full(num, -1, dtype=np.int32 if num < MAX_INT32 else np.int64)

    def place(rows: slice) -> bool:
        seq = operations.seq[rows]
        position = begins[block[rows]]
        position += seq
        fits = int(seq.min()) >= 0 and int(position.max()) < num
        if fits:
            order[position] = np.arange(rows.start, rows.start + len(position), dtype=order.dtype)
        return fits

    def ascends(rows: slice) -> bool:
        here = order[max(rows.start - 1, 0) : rows.stop]
        later = np.diff(operations.start_ns[here]) >= 0
        return bool((later | (block[here[1:]] != block[here[:-1]])).all())

    # No row is placed before its block, so if every position is taken, the first block holds only
    # its own rows. Then the same is true of the second block, and so on.
    placed = all(map_slices(place, num)) and int(order.min(initial=0)) >= 0
    return order if placed and all(map_slices(ascends, num)) else None


def _sort_by_start(
    operations: Columns, block: NDArray[np.int32]
) -> tuple[IntArray, dict[int, str], tuple[str, ...]]:
    """Sort rows by block, then start, then seq.

    Returns:
        The order; the steps with repeated operations (equal worker, type, number and time);
        warnings.
    """
    order: NDArray[np.int64] = argsort_rows(block, operations.start_ns, operations.seq)
    before, after = order[:-1], order[1:]
    same = block[before] == block[after]
    num_reversed = int((same & (operations.seq[before] > operations.seq[after])).sum())
    for column in (operations.seq, operations.start_ns, operations.duration_ns):
        same &= column[before] == column[after]
    steps, num = np.unique(operations.step[after[same]], return_counts=True)
    repeated = {
        step: f"{count} operations are in the trace twice"
        for step, count in zip(steps.tolist(), num.tolist(), strict=True)
    }
    sentence = (
        f"{num_reversed} operations began before one of a lower seq_id:"
        " they are sorted by start instead"
    )
    return order, repeated, (sentence,) if num_reversed else ()


def _find_contradictions(count: NDArray[np.int64], steps: NDArray[np.int64]) -> dict[int, str]:
    """Return the steps in which workers whose operations belong together differ in their number.

    A worker that the whole trace lacks is ignored: the others can still be compared.

    Args:
        count: Shape (steps, replicas, stages, types): number of operations.
        steps: Shape (steps,): step numbers.

    Returns:
        By step number: what is missing.
    """
    traced: NDArray[np.bool_] = np.any(count, axis=(0, 3))
    reasons: dict[int, str] = {}
    missing = (traced & (count[..., CODE[OpType.OPTIMIZER]] == 0)).sum(axis=(1, 2))
    for index in np.flatnonzero(missing).tolist():
        reasons[int(steps[index])] = (
            f"{missing[index]} of {int(traced.sum())} workers have no {OpType.OPTIMIZER}"
        )
    for name, lowest, highest in _counts_that_should_agree(count, traced):
        for index in np.flatnonzero((lowest < highest).any(axis=1)).tolist():
            worst = int(np.argmax(highest[index] - lowest[index]))
            reasons.setdefault(
                int(steps[index]),
                f"workers that should have equally many {name} have {lowest[index, worst]} to"
                f" {highest[index, worst]}",
            )
    return reasons


def _counts_that_should_agree(
    count: NDArray[np.int64], traced: NDArray[np.bool_]
) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield (name, lowest count, highest count), the counts of shape (steps, groups)."""
    num_steps, num_workers = len(count), traced.size
    for code in COMPUTE_CODES:
        yield (TYPES[code], *_count_range(count[..., code], traced, axis=2))
    both = np.stack([count[..., code] for code in COMPUTE_CODES])
    yield (
        "forward and backward computes",
        both.min(axis=0).reshape(num_steps, num_workers),
        both.max(axis=0).reshape(num_steps, num_workers),
    )
    for name in sorted(DP_ONLY):
        yield (name, *_count_range(count[..., CODE[name]], traced, axis=1))
    ends = [0, -1]
    yield (
        OpType.EMBEDDING_GRADS,
        *_count_range(count[:, :, ends, CODE[OpType.EMBEDDING_GRADS]], traced[:, ends], axis=2),
    )
    everywhere = count[..., CODE[OpType.GRAD_CLIP]].reshape(num_steps, 1, num_workers)
    yield (OpType.GRAD_CLIP, *_count_range(everywhere, traced.reshape(1, num_workers), axis=2))


def _count_range(
    count: NDArray[np.int64], traced: NDArray[np.bool_], *, axis: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the lowest and highest count over an axis, among traced workers."""
    most = np.iinfo(np.int64).max
    lowest = np.where(traced, count, most).min(axis=axis)
    highest = np.where(traced, count, 0).max(axis=axis)
    return np.minimum(lowest, highest), highest


@dataclass(frozen=True, slots=True)
class Rows:
    """Operations as columns sorted by (step, dp, stage, type, seq), and their blocks.

    Here a worker is counted once per step.
    """

    steps: tuple[int, ...]
    """Step numbers, ascending."""

    bounds_ns: tuple[NDArray[np.int64], NDArray[np.int64]]
    """Shape (steps,) each: first start and last end of the step's operations, of any type."""

    uneven: dict[int, str]
    """Steps with a missing or surplus operation, and which it is."""

    warnings: tuple[str, ...]
    row: IntArray
    """Row in the span table."""

    step: NDArray[np.int32]
    rank: NDArray[np.int32]
    """The rank that the trace names."""

    dp: NDArray[np.int32]
    stage: NDArray[np.int32]
    type: NDArray[np.int8]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    chunk: NDArray[np.int32]
    worker: NDArray[np.int32]
    """Index of the (step, dp, stage)."""

    worker_dp: NDArray[np.int64]
    """Shape (workers,): index of the (step, dp)."""

    worker_stage: NDArray[np.int32]
    first: NDArray[np.int64]
    """Shape (workers, types): index of the block's first row."""

    count: NDArray[np.int64]
    """Shape (workers, types): number of operations of the block."""

    def __len__(self) -> int:
        return len(self.step)

    def part(self, rows: slice, workers: slice) -> Rows:
        """Return some of the rows, numbered from 0: those of neighbouring steps' workers."""
        return self._take(
            rows, workers, self.worker[rows] - np.int32(workers.start or 0),
            self.first[workers] - (rows.start or 0)
        )  # fmt: skip

    def without(self, left_out: Iterable[int]) -> Rows:
        """Return the rows of the other steps."""
        kept = ~np.isin(self.steps, [*left_out])
        workers = np.flatnonzero(kept[self.step[self.first[:, 0]]])
        rows = np.flatnonzero(kept[self.step])
        worker = np.repeat(np.arange(len(workers), dtype=np.int32), self.count[workers].sum(axis=1))
        sizes = self.count[workers].ravel()
        first = (np.cumsum(sizes) - sizes).reshape(len(workers), NUM_TYPES)
        rest = self._take(rows, workers, worker, first)
        number = (np.cumsum(kept) - 1).astype(np.int32)
        return replace(
            rest,
            steps=tuple(np.array(self.steps)[kept].tolist()),
            bounds_ns=(self.bounds_ns[0][kept], self.bounds_ns[1][kept]),
            uneven={},
            step=number[rest.step],
        )

    def _take(
        self,
        rows: slice | NDArray[np.int64],
        workers: slice | NDArray[np.int64],
        worker: NDArray[np.int32],
        first: NDArray[np.int64],
    ) -> Rows:
        of_rows = ("row", "step", "rank", "dp", "stage", "type", "start", "end", "chunk")
        of_workers = ("worker_dp", "worker_stage", "count")
        return replace(
            self,
            worker=worker,
            first=first,
            **{name: getattr(self, name)[rows] for name in of_rows},
            **{name: getattr(self, name)[workers] for name in of_workers},
        )

    def of(self, name: str) -> NDArray[np.int64]:
        """Return the rows of one type, in order."""
        return np.flatnonzero(self.type == CODE[name])

    def nth(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of some rows in their blocks."""
        return rows - self.first[self.worker[rows], self.type[rows]]


def map_steps(work: Callable[[Rows, slice], Result], rows: Rows) -> list[Result]:
    """Return the results of ``work`` for neighbouring steps, computed on several threads.

    Operations of different steps do not depend on each other. ``work`` gets the rows of some steps,
    numbered from 0, and which rows of all they are. What it sorts stays in a processor's cache.
    """
    borders = _row_borders(rows)
    workers = np.searchsorted(rows.first[:, 0], borders).tolist()

    def work_on(part: int) -> Result:
        own = slice(borders[part], borders[part + 1])
        return work(rows.part(own, slice(workers[part], workers[part + 1])), own)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(work_on, range(len(borders) - 1)))


def map_steps_of(
    work: Callable[[slice], Result], rows: Rows, operations: NDArray[np.int64]
) -> list[Result]:
    """Return the results of ``work`` for slices of some operations, as `map_steps` does.

    Args:
        work: Gets a slice of ``operations``: those of the same steps as in `map_steps`.
        operations: Some of them, in the order of `map_steps`; in any order within its parts.
    """
    # In order of the parts, the operations before a part's first row are the lower ones.
    borders = np.searchsorted(operations, _row_borders(rows)).tolist()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(lambda ends: work(slice(*ends)), pairwise(borders)))


def _row_borders(rows: Rows) -> list[int]:
    """Return the first row of each part, of whole steps with `STEPS_ROWS`, and the rows' number."""
    borders = [0]
    for begin in first_rows(rows.step, len(rows.steps)).tolist():
        if begin - borders[-1] >= STEPS_ROWS:
            borders.append(begin)
    return borders if borders[-1] == len(rows.step) else [*borders, len(rows.step)]


def rows_by_start(rows: Rows, names: tuple[str, ...]) -> NDArray[np.int64]:
    """Return the rows of some types by worker, then by start."""
    members = np.flatnonzero(np.isin(rows.type, [CODE[name] for name in names]))
    if len(names) == 1:
        return members
    return members[argsort_rows(rows.worker[members], rows.start[members], rows.end[members])]
