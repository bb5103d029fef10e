"""Read a run of our own tracer: groups, sequences and waits are read, not inferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.distinct import distinct, number_rows
from analysis.intervals import NOWHERE
from analysis.merging import worker_numbers
from analysis.model import ComputeItems, Reading
from analysis.operations import positions_in_runs
from analysis.pieces import Pieces, cut, own_compute
from analysis.source import rows_of_spans, rows_of_steps
from analysis.starved import WaitIntervals, without_overlap
from analysis.traced_evidence import gaps_of, transfers_of
from analysis.traced_graph import graph_of
from analysis.traced_join import Joined, join_waits
from analysis.traced_ranks import groups_as_traced, num_expected
from analysis.waits import is_communication, is_one_sided, split_waits
from analysis.words import duration_text
from tracer.span import KIND_CODES, KINDS, NONE, SpanKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.source import RunInfo, SpanTable, StepTable
    from analysis.waits import WaitSplit


UNMEASURED_CLOCK_ERROR_NS = 10_000_000
"""Error allowed for between clocks that nobody measured. Source: arXiv 2505.05713 takes transfers
of -10 ms and less for clock error."""


def read_traced(
    run: RunInfo, spans: SpanTable, steps: StepTable, *, clock_error_ns: int | None
) -> Reading:
    """Build the operations of a traced run.

    Args:
        run: Layout, ranks and groups.
        spans: Spans of the steps asked for, of any epochs; where a step occurs
            in several, the latest counts.
        steps: The steps' rows.
        clock_error_ns: Largest error between the ranks' clocks; None where nobody measured it:
            then `UNMEASURED_CLOCK_ERROR_NS` is allowed for, and the run's warnings say so.

    Returns:
        The run; steps with a missing rank, a missing member of a communication
        or a transfer negative beyond the clock error are left out and named.
    """
    steps, spans, repeated = _latest_epochs(steps, spans)
    tolerance = UNMEASURED_CLOCK_ERROR_NS if clock_error_ns is None else clock_error_ns
    split = split_waits(spans, groups_as_traced(run), clock_error_ns=tolerance)
    left_out = _unusable(run, spans, steps, split)
    numbers = np.array(sorted(set(distinct(steps.step).tolist()) - set(left_out)), dtype=np.int32)
    steps = rows_of_steps(steps, np.isin(steps.step, numbers))
    joined, warnings = join_waits(spans, steps, numbers, split)
    pieces = cut(
        spans,
        joined.line,
        joined.windows,
        joined.blocked(),
        joined.launch(),
    )
    if clock_error_ns is None and (split.transfer_ns < -1).any():
        worst = float(-split.transfer_ns.min())
        warnings.append(
            f"nobody measured the hosts' clocks against each other: some ranks leave"
            f" communications {duration_text(worst)} before the last one enters, so who waits for"
            " whom is known no better than that"
        )
    if num_expected(run) < run.world_size:
        warnings.append("one tensor-parallel rank of each worker was traced; it stands for all")
    if repeated:
        warnings.append(f"{repeated} steps ran again in a later epoch; their last run counts")
    model, number = graph_of(run, joined, pieces, tuple(numbers.tolist()))
    piece_number, comm_number = number[: len(pieces.start)], number[len(pieces.start) :]
    index = np.searchsorted(numbers, steps.step)
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    last = np.full(len(numbers), np.iinfo(np.int64).min)
    np.minimum.at(first, index, steps.start_ns)
    np.maximum.at(last, index, steps.end_ns)
    return Reading(
        model=model,
        items=_items(joined, pieces, numbers, run),
        steps=tuple(numbers.tolist()),
        actual_ns=last - first,
        left_out=left_out,
        waits=_wait_intervals(joined, comm_number),
        gaps=gaps_of(joined, pieces, steps, numbers=numbers, piece_number=piece_number),
        transfers=transfers_of(joined, numbers, run, number=number),
        warnings=tuple(warnings),
    )


def _latest_epochs(steps: StepTable, spans: SpanTable) -> tuple[StepTable, SpanTable, int]:
    """Keep each step's last epoch only; count the steps that had more than one."""
    if not len(steps) or (steps.epoch == steps.epoch[0]).all():
        return steps, spans, 0
    pairs = np.unique(np.stack((steps.step, steps.epoch), axis=1), axis=0)
    is_last = np.append(pairs[1:, 0] != pairs[:-1, 0], True) if len(pairs) else np.ones(0, bool)
    if is_last.all():
        return steps, spans, 0
    numbers, epochs = pairs[is_last].T
    keep = np.isin(steps.step, numbers) & (
        steps.epoch == epochs[np.searchsorted(numbers, steps.step)]
    )
    at = np.minimum(np.searchsorted(numbers, spans.step), len(numbers) - 1)
    keep_spans = (numbers[at] == spans.step) & (spans.epoch == epochs[at])
    return (
        rows_of_steps(steps, keep),
        rows_of_spans(spans, keep_spans),
        len(np.unique(pairs[~is_last, 0])),
    )


def _unusable(run: RunInfo, spans: SpanTable, steps: StepTable, split: WaitSplit) -> dict[int, str]:
    """Name the steps that cannot be replayed: nothing is patched over."""
    reasons: dict[int, str] = {}
    expected = num_expected(run)
    comm = is_communication(spans) & (spans.group_id != 0) & (spans.seq != NONE)
    for step in distinct(spans.step[comm & (split.instance == NOWHERE)]).tolist():
        reasons[step] = "a communication lacks the record of a member"
    for step in distinct(spans.step[split.negative & ~is_one_sided(spans, split)]).tolist():
        reasons[step] = "a rank left a communication before the last one entered it"
    numbers, counts = np.unique(steps.step, return_counts=True)
    for step, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        if count != expected:
            reasons[step] = f"{expected - count} of {expected} ranks have no record of it"
    return reasons


def _items(
    joined: Joined, pieces: Pieces, numbers: NDArray[np.int32], run: RunInfo
) -> ComputeItems:
    """Sum each forward and backward span's own pieces.

    Partners whose inner communication is not traced cannot work alone: the time
    until the last of them began the same micro-batch is no compute.
    """
    spans, windows = joined.spans, joined.windows
    kinds = (KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD])
    own = np.flatnonzero(own_compute(pieces, len(pieces.start)))
    own = own[np.isin(spans.kind[pieces.compute[own]], kinds)]
    index, num = number_rows(pieces.compute[own])
    first = np.zeros(num, dtype=np.int64)
    first[index] = np.arange(len(index))
    span = pieces.compute[own[first]]
    self_ns = np.bincount(index, weights=(pieces.end - pieces.start)[own], minlength=len(span))
    window = pieces.window[own[first]]
    step = windows.step_index[window]
    rank, kind, chunk = spans.rank[span], spans.kind[span], spans.chunk[span]
    order = np.lexsort((spans.start_ns[span], chunk, kind, rank, step))
    kind_of_rank, _ = number_rows(step[order], rank[order], kind[order], chunk[order])
    microbatch = positions_in_runs(kind_of_rank).astype(np.int32)
    own_ns = np.rint(self_ns[order]).astype(np.int64)
    kinds_traced = {KINDS[code].value for code in distinct(spans.kind[joined.comm]).tolist()}
    ranks = {info.rank: info for epoch in run.epochs for info in epoch.ranks}
    worker = worker_numbers(ranks, kinds_traced, joined.line.ranks)
    late_ns = _partners_late(
        (step[order], worker[np.searchsorted(joined.line.ranks, rank[order])], kind[order],
         chunk[order], microbatch),
        spans.start_ns[span][order],
    )  # fmt: skip
    return ComputeItems(
        step=numbers[step[order]],
        rank=rank[order],
        kind=kind[order],
        chunk=chunk[order],
        microbatch=microbatch,
        self_ns=np.where(late_ns < own_ns, own_ns - late_ns, own_ns),
    )


def _partners_late(key: tuple[NDArray[Any], ...], start_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how long after each item the last partner began the same one. Shape (items,)."""
    same, num = number_rows(*key)
    latest = np.full(num, np.iinfo(np.int64).min)
    np.maximum.at(latest, same, start_ns)
    late: NDArray[np.int64] = latest[same] - start_ns
    return late


def _wait_intervals(joined: Joined, number: NDArray[np.int64]) -> WaitIntervals:
    """Return the part of each blocked interval that lies before the last member's arrival."""
    spans, split = joined.spans, joined.split
    known = joined.wait_comm != NOWHERE
    wait, member = joined.wait[known], joined.wait_comm[known]
    comm = joined.comm[member]
    start = spans.start_ns[wait]
    arrival = spans.start_ns[comm] + split.wait_ns[comm]
    end = np.minimum(arrival, start + spans.duration_ns[wait])
    real = (end > start) & ~is_one_sided(spans, split)[comm]
    # Threads of one rank may wait at the same time.
    return without_overlap(
        WaitIntervals(
            rank=spans.rank[wait][real],
            operation=number[member[real]],
            start_ns=start[real],
            end_ns=end[real],
        )
    )
