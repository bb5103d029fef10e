"""Input of replay and diagnosis: what a reader makes of a run of any format."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rankscope.tracer.span import KINDS

from ..arrays.grouping import code_groups
from ..arrays.intervals import Line
from ..arrays.sorting import first_rows, stable_argsort
from . import loop
from .operations import Operations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

FORWARD_KINDS = frozenset({"forward", "forward-compute"})
BACKWARD_KINDS = frozenset({"backward", "backward-compute"})
COMPUTE_KINDS = FORWARD_KINDS | BACKWARD_KINDS | {"optimizer"}
"""Kinds of compute: span kinds, and operation types of the ByteDance format."""

INTERRUPTING_KINDS = frozenset({"data", "gc", "checkpoint"})
"""Kinds of host spans whose time is subtracted from a compute span around them, if the host
computes."""

HOST_KINDS = INTERRUPTING_KINDS | {"host"}
EVALUATION_KIND = "evaluation"
"""Forwards without gradients that at most half of the steps have: planned, as a checkpoint is, so
that their ideal is 0."""

P2P_KINDS = frozenset({"pp-send", "pp-recv", "forward-pp-comm", "backward-pp-comm"})
BUFFERED_KIND = "pp-send"
"""A send without a group was buffered: it did not wait, and all of it is transfer."""

COMPUTE_CODES = tuple(code for code, kind in enumerate(KINDS) if kind.value in COMPUTE_KINDS)
"""Codes of the span kinds among `COMPUTE_KINDS`."""

COMPILATION_NAMES = frozenset({"compile", "recompile"})
"""Names of host spans that our tracer records of the compiler."""

INTERRUPTING_CODES = tuple(
    code for code, kind in enumerate(KINDS) if kind.value in INTERRUPTING_KINDS
)

Items = TypeVar("Items", "ComputeItems", "GapItems")

NO_LINK = -1

BLOCK_OPERATIONS = 1 << 17
"""A column of so many 64-bit numbers takes 1 MB and stays in a processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayModel:
    """Operations with their ideal durations, and the sets in which a what-if puts them back."""

    operations: Operations
    ideal_ns: NDArray[np.float64]
    """Shape (ops,): duration or transfer in a straggler-free step."""

    ideal_gap_ns: NDArray[np.float64]
    """Shape (ops,): launch gap in a straggler-free step."""

    kind: NDArray[np.int16]
    """Shape (ops,): code into ``kinds``."""

    kinds: tuple[str, ...]
    """Keys of ``slowdown_by_kind``."""

    rank: NDArray[np.int32]
    dp: NDArray[np.int32]
    stage: NDArray[np.int32]
    on_device: NDArray[np.bool_]
    """Shape (ops,): compute and communication. The others are in the full replay only."""

    overlap_ns: NDArray[np.int64] | None = None
    """Shape (steps,): time from the step's first begin in which the step before still ran, which
    the full replay does not count; None: none."""

    span: NDArray[np.int64] | None = None
    """Shape (ops,): for a piece of compute, the number of its span; undefined for the others.
    None: each operation is a whole span."""

    idle: NDArray[np.bool_] | None = None
    """Shape (ops,): host time in which a device had nothing to do, beside which communication may
    go on; None: there is none."""

    work: NDArray[np.int64] | None = None
    """Shape (ops,): for compute, equal for spans of equal kind, micro-batch part, chunk and
    stage, into however many pieces they are cut; undefined for the others. None: use the label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeItems:
    """Compute of each micro-batch on each rank, without its waits. Ordered by (step, rank)."""

    step: NDArray[np.int32]
    """Step number."""

    rank: NDArray[np.int32]
    kind: NDArray[np.int8]
    """Code into `tracer.span.KINDS`: forward or backward."""

    chunk: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    """Number among the items of the same (step, rank, kind, chunk), in order of start."""

    self_ns: NDArray[np.int64]
    deferred_ratio: float = 0.0
    """Share of the weights' gradients in all this compute, if a schedule splits them off and does
    them later in the step (zero bubble, of all or of some micro-batches). The parts of a
    micro-batch are one item."""

    def __len__(self) -> int:
        return len(self.self_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The result of reading a run: ready to replay and to diagnose."""

    model: ReplayModel
    items: ComputeItems
    waits: WaitIntervals
    gaps: GapItems
    transfers: Transfers
    steps: tuple[int, ...]
    """Steps that are replayed, ascending."""

    actual_ns: NDArray[np.int64]
    """Shape (steps,): time between the last ends of two steps (`measure_steps`). If
    ``bounds_ns`` is set, and for a step without one before it, last end - first start over the
    ranks."""

    left_out: dict[int, str]
    """Steps that cannot be replayed, and why."""

    startup_ns: dict[int, int] = field(default_factory=dict)
    """Duration of each step in which the job started up; none of them is in ``steps``."""

    ending_ns: dict[int, int] = field(default_factory=dict)
    """The same of a last step that is longer than all before: the job ended in it."""

    warnings: tuple[str, ...]
    bounds_ns: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    """Begin and end of each step on every rank, shape (steps,) each; None: on each rank as its step
    row says."""

    without_launch: frozenset[str] = frozenset()
    """Kinds of operations that a host launches at a time that the trace does not have: time before
    one of them, in which the rank does nothing, is the host's."""

    experts: NDArray[np.bool_] | None = None
    """Shape (ops,): the compute of experts, which ``items`` exclude; None if there is none."""

    not_compared: tuple[int, ...] = ()
    """Ranks that recorded no compute in more than half of ``steps``, ascending."""

    calls: ComputeItems | None = None
    """Forwards without gradients, which ``items`` exclude; None if there is none."""

    is_call: NDArray[np.bool_] | None = None
    """Shape (ops,): the compute of those of ``calls`` that are of no evaluation."""

    evaluated_steps: tuple[int, ...] = ()
    """Steps with forwards of an evaluation, ascending."""

    def in_steps(self, numbers: NDArray[np.integer]) -> Reading:
        """Return the evidence of some steps; the operations of the replay remain all."""
        transfers, of_step = self.transfers, np.isin(self.transfers.step, numbers)
        columns = ("step", "link", "alike", "transfer_ns", "num_bytes", "name")
        chosen = np.isin(self.steps, numbers)
        return replace(
            self,
            items=select_items(self.items, np.isin(self.items.step, numbers)),
            gaps=select_items(self.gaps, np.isin(self.gaps.step, numbers)),
            transfers=replace(
                transfers, **{name: getattr(transfers, name)[of_step] for name in columns}
            ),
            steps=tuple(np.array(self.steps)[chosen].tolist()),
            actual_ns=self.actual_ns[chosen],
            evaluated_steps=tuple(step for step in self.evaluated_steps if step in numbers),
        )


def select_items(items: Items, rows: NDArray[np.bool_]) -> Items:
    """Return some rows of compute or of gaps."""
    columns = {field.name: getattr(items, field.name) for field in fields(items)}
    kept: dict[str, Any] = {
        name: each[rows] for name, each in columns.items() if isinstance(each, np.ndarray)
    }
    return replace(items, **kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitIntervals:
    """Time that ranks waited for the last member of a communication to arrive.

    Intervals of one rank do not overlap.
    """

    rank: NDArray[np.int32]
    """The rank that waits ..."""

    operation: NDArray[np.int64]
    """... in this operation: its own member of the communication."""

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    """The last member's arrival."""


class Place(IntEnum):
    """Place of a host gap in a rank's step."""

    INPUT = 0
    """Before the step's first compute, if no ``data`` span shows when its input was there."""

    FORWARD = 1
    """Before a forward that is not the step's first compute or whose input was there, or before
    the launch of a collective that a forward follows."""

    BACKWARD = 2
    LAUNCH = 3
    """Right before the launch of a collective that neither forward nor backward follows in the
    step."""

    OTHER = 4
    """Before the optimizer, or after the step's last compute."""

    GC = 5
    """In a ``gc`` span."""

    CHECKPOINT = 6
    """In a ``checkpoint`` span."""

    DATA = 7
    """In a ``data`` span."""

    EVALUATION = 8
    """Before or after a forward without gradients, of those that few steps have."""

    SPAN = 9
    """In a span of the job's own, of kind ``host``."""

    COMPILATION = 10
    """In a span of the compiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapItems:
    """Host gaps: time of a rank outside its compute in which it waited for no other rank."""

    step: NDArray[np.int32]
    """Step number."""

    rank: NDArray[np.int32]
    place: NDArray[np.int8]
    """Codes of `Place`."""

    gap_ns: NDArray[np.int64]
    operation: NDArray[np.int64]
    """The operation that contains the gap, -1 if none does."""

    name: NDArray[np.int32] | None = None
    """Name of the host span that took it, as a code into ``names``, -1 if none did; None: no host
    span took any."""

    names: tuple[str, ...] = ()
    in_compute: NDArray[np.bool_] | None = None
    """Whether it is idle time inside a compute span; None: none is."""

    def __len__(self) -> int:
        return len(self.gap_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The ranks between which alike transfers go: an ordered pair, or a group."""

    members: tuple[int, ...]
    """Global ranks: (source, destination) of a pair, ascending for a group."""

    kind: str
    """Span kind of its transfers; ``pp-send`` for a pair of stages."""

    is_pair: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """One row per communication instance whose transfer is known."""

    step: NDArray[np.int32]
    """Step number."""

    link: NDArray[np.int32]
    """Index into ``links``."""

    alike: NDArray[np.int32]
    """Equal for instances of equal operation, size and number of members, which should take
    equally long."""

    transfer_ns: NDArray[np.int64]
    """Duration of the member that entered last, by its own clock, so free of clock error."""

    num_bytes: NDArray[np.int64]
    """-1 if unknown."""

    name: NDArray[np.int32]
    """The operation, as a code into ``names``."""

    names: tuple[str, ...]
    links: tuple[Link, ...]
    link_of_operation: NDArray[np.int32]
    """Shape (ops,): index into ``links``, or `NO_LINK`."""

    def __len__(self) -> int:
        return len(self.step)


def has_kind(
    model: ReplayModel, names: frozenset[str], rows: NDArray[np.int64] | None = None
) -> NDArray[np.bool_]:
    """Return which operations, all or those of ``rows``, are of one of these kinds."""
    wanted = np.array([name in names for name in model.kinds], dtype=np.bool_)
    found: NDArray[np.bool_] = wanted[model.kind if rows is None else model.kind[rows]]
    return found


def last_members(model: ReplayModel) -> NDArray[np.int32]:
    """Return the member of each operation's instance that began last; itself outside any.

    Of several it is the one of the lowest rank.
    """
    operations, num = model.operations, len(model.rank)
    code, num_groups = code_groups(operations.group)
    last = np.empty(num, dtype=np.int32)
    loop.functions.last_members(num, num_groups, code, operations.start_ns, model.rank, last)
    return last


def remove_overlaps(waits: WaitIntervals) -> WaitIntervals:
    """Trim waits of one rank that overlap, so that each moment belongs to the earlier one."""
    if not len(waits.rank):
        return waits
    line = Line.over(waits.rank, waits.start_ns, waits.end_ns)
    begin = line.place(waits.rank, waits.start_ns)
    order = stable_argsort(begin)
    begin = begin[order]
    end = begin + (waits.end_ns - waits.start_ns)[order]
    reach = np.append(begin[0], np.maximum.accumulate(end)[:-1])
    overlap = np.maximum(reach - begin, 0)
    is_left = overlap < end - begin
    order, overlap = order[is_left], overlap[is_left]
    return WaitIntervals(
        rank=waits.rank[order],
        operation=waits.operation[order],
        start_ns=waits.start_ns[order] + overlap,
        end_ns=waits.end_ns[order],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBlock:
    """Neighbouring steps of a run, with operations and waits of their own."""

    model: ReplayModel
    waits: WaitIntervals
    first_step: int
    """Index of its first step."""

    rows: slice
    """Its operations."""

    wait_rows: NDArray[np.int64] | slice
    """Its waits, ascending."""


def split_by_time(
    model: ReplayModel,
    waits: WaitIntervals,
    *,
    begin_ns: NDArray[np.int64] | None = None,
    end_ns: NDArray[np.int64] | None = None,
) -> Iterator[StepBlock]:
    """Split a run into blocks of steps that do not overlap in time.

    Passes that sort a run by time take one block after the other: their memory is that of a block,
    and what they sort fits into a processor's cache.

    Args:
        model: Its operations, sorted by step.
        begin_ns: Shape (steps,): times that belong to a step as well: the first of them ...
        end_ns: Shape (steps,): ... and the last; None: only those of the operations.
    """
    operations = model.operations
    first_row = first_rows(operations.step, len(operations.steps))
    starts = [0, len(operations.steps)]
    if len(operations) > BLOCK_OPERATIONS and np.diff(first_row).all():
        earliest = np.minimum.reduceat(operations.start_ns, first_row[:-1])
        latest = np.maximum.reduceat(operations.end_ns, first_row[:-1])
        earliest = earliest if begin_ns is None else np.minimum(earliest, begin_ns)
        latest = latest if end_ns is None else np.maximum(latest, end_ns)
        starts = _step_borders(first_row, earliest, latest)
    num_blocks = len(starts) - 1
    block_by_step = np.repeat(np.arange(num_blocks, dtype=np.int32), np.diff(starts))
    waits_of = _rows_by_block(block_by_step[operations.step[waits.operation]], num_blocks)
    edges_of = _rows_by_block(block_by_step[operations.step[operations.dst]], num_blocks)
    for block, (first, end) in enumerate(pairwise(starts)):
        rows = slice(int(first_row[first]), int(first_row[end]))
        edges, mine = edges_of[block], waits_of[block]
        yield StepBlock(
            model=_select_steps(model, slice(first, end), rows, edges),
            waits=WaitIntervals(
                rank=waits.rank[mine],
                operation=waits.operation[mine] - rows.start,
                start_ns=waits.start_ns[mine],
                end_ns=waits.end_ns[mine],
            ),
            first_step=first,
            rows=rows,
            wait_rows=mine,
        )


def select_step(model: ReplayModel, index: int) -> tuple[ReplayModel, slice]:
    """Return the operations of one step, numbered from 0, and their rows.

    Args:
        model: Its operations, sorted by step.
        index: Index of the step.
    """
    operations = model.operations
    rows = slice(*np.searchsorted(operations.step, (index, index + 1)).tolist())
    edges = np.flatnonzero((operations.dst >= rows.start) & (operations.dst < rows.stop))
    return _select_steps(model, slice(index, index + 1), rows, edges), rows


def _select_steps(
    model: ReplayModel, steps: slice, rows: slice, edges: NDArray[np.int64] | slice
) -> ReplayModel:
    """Return the operations of neighbouring steps, numbered from 0."""
    operations = model.operations
    own = {
        name: getattr(operations, name)[rows]
        for name in ("replica", "label", "group", "duration_ns", "gap_ns", "start_ns", "end_ns",
                     "closes_step")
    }  # fmt: skip
    columns = {
        name: getattr(model, name)[rows]
        for name in ("ideal_ns", "ideal_gap_ns", "kind", "rank", "dp", "stage", "on_device")
    }
    return ReplayModel(
        operations=Operations(
            steps=operations.steps[steps],
            step=operations.step[rows] - np.int32(steps.start),
            src=operations.src[edges] - rows.start,
            dst=operations.dst[edges] - rows.start,
            **own,
        ),
        kinds=model.kinds,
        idle=None if model.idle is None else model.idle[rows],
        overlap_ns=None if model.overlap_ns is None else model.overlap_ns[steps],
        **columns,
    )


def _rows_by_block(block: NDArray[np.int32], num: int) -> list[NDArray[np.int64]] | list[slice]:
    """Return the rows of each block, ascending: a slice if all rows are in order of their block."""
    if not (block[1:] < block[:-1]).any():
        return [slice(*ends) for ends in pairwise(first_rows(block, num).tolist())]
    by_block = stable_argsort(block)
    return np.split(by_block, np.searchsorted(block[by_block], np.arange(1, num)))


def _step_borders(
    first_row: NDArray[np.int64], earliest_ns: NDArray[np.int64], latest_ns: NDArray[np.int64]
) -> list[int]:
    """Return the first step of each block, and the number of steps.

    A block ends as soon as it has `BLOCK_OPERATIONS`, but not before all its times have passed.
    """
    before = np.maximum.accumulate(latest_ns)
    after = np.minimum.accumulate(earliest_ns[::-1])[::-1]
    borders = [0]
    for step in (np.flatnonzero(before[:-1] <= after[1:]) + 1).tolist():
        if first_row[step] - first_row[borders[-1]] >= BLOCK_OPERATIONS:
            borders.append(step)
    return [*borders, len(latest_ns)]
