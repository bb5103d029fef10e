"""Read a run of our own tracer: groups, sequences and waits are read, not inferred."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import COMM_KINDS, NONE, SpanKind, pack_kinds, unpack_kinds

from ...arrays.grouping import sorted_unique
from ...arrays.intervals import NOT_FOUND
from ...arrays.sorting import find_positions
from ...replay.model import Reading, WaitIntervals, remove_overlaps
from ...report.text import format_count, format_duration, format_ranks
from ...trace.rows import select_rows
from ...trace.tables import num_expected_ranks
from ..waits import is_communication, is_one_sided, split_traced_waits
from .compute_items import build_compute_items
from .evidence import find_gaps, find_transfers
from .graph import build_model
from .incomplete_steps import RANK_COMPUTE_BITS, drop_incomplete
from .matched_waits import MatchedWaits, match_waits
from .pieces import cut_pieces, number_parts_by_span

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import RunInfo, SpanTable, StepTable
    from ..waits import WaitSplit


OTHER = SpanKind.OTHER
NEEDED_KINDS = COMM_KINDS | {
    SpanKind.FORWARD,
    SpanKind.BACKWARD,
    SpanKind.OPTIMIZER,
    SpanKind.WAIT,
}
"""What a replay is built of, beside collectives of `OTHER` groups; without it a step is not empty
but unknown."""


def read_traced(run: RunInfo, spans: SpanTable, steps: StepTable) -> Reading:
    """Build the operations of a traced run.

    Args:
        run: Layout, ranks, groups and clock error.
        spans: Spans of the steps asked for, of any epochs; where a step occurs
            in several, the latest counts.
        steps: The steps' rows.

    Returns:
        The run; steps with a missing rank, a rank that nobody described, a missing member of a
        communication or a transfer negative beyond the clock error are left out and named.
    """
    steps, spans, repeated = _latest_epochs(steps, spans)
    steps, spans, unplaced = _placed(run, steps, spans)
    split = split_traced_waits(run, spans)
    left_out = unplaced | _unusable(run, spans, steps, split)
    numbers = np.array(
        sorted(set(sorted_unique(steps.step).tolist()) - set(left_out)), dtype=np.int32
    )
    all_steps, steps = steps, select_rows(steps, np.isin(steps.step, numbers))
    joined, warnings = match_waits(spans, steps, numbers, split)
    pieces = cut_pieces(
        spans,
        joined.line,
        joined.windows,
        joined.blocked(),
        joined.launch,
    )
    if run.clock_error_ns is None and (split.transfer_ns < -1).any():
        worst = float(-split.transfer_ns.min())
        warnings.append(
            "the clock error between the hosts is unknown, and some ranks leave communications"
            f" {format_duration(worst)} before the last one enters: waiting times are uncertain by"
            " as much"
        )
    if num_expected_ranks(run) < run.world_size:
        warnings.append(
            "one tensor-parallel rank of each worker was traced, and is taken for all of them"
        )
    if repeated:
        warnings.append(
            f"{format_count(repeated, 'step')} repeated in a later epoch; the last epoch counts"
        )
    portion = number_parts_by_span(spans, pieces.compute)
    with ThreadPoolExecutor(2) as aside:
        found = aside.submit(build_compute_items, joined, pieces, numbers, run, portion=portion)
        named = tuple(numbers.tolist())
        model, number = build_model(run, joined, pieces, numbers=named, portion=portion)
        piece_number, comm_number = number[: len(pieces.start)], number[len(pieces.start) :]
        transfers = aside.submit(find_transfers, joined, numbers, run, number=number)
        gaps = find_gaps(joined, pieces, steps, numbers=numbers, piece_number=piece_number)
        waits = _wait_intervals(joined, comm_number)
    index = find_positions(steps.step, numbers)
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    last = np.full(len(numbers), np.iinfo(np.int64).min)
    np.minimum.at(first, index, steps.start_ns)
    np.maximum.at(last, index, steps.end_ns)
    items, of_experts = found.result()
    judged = drop_incomplete(items, gaps, run=run, spans=spans, steps=all_steps, numbers=numbers)
    experts = None
    if of_experts.any():
        experts = np.zeros(len(number), dtype=np.bool_)
        experts[piece_number[of_experts]] = True
    return Reading(
        model=model,
        items=judged.items,
        steps=named,
        actual_ns=last - first,
        left_out=left_out,
        waits=waits,
        gaps=judged.gaps,
        transfers=transfers.result(),
        warnings=(*warnings, *judged.warnings),
        experts=experts,
        not_compared=judged.without,
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
        steps.epoch == epochs[find_positions(steps.step, numbers)]
    )
    at = np.minimum(find_positions(spans.step, numbers), len(numbers) - 1)
    keep_spans = (numbers[at] == spans.step) & (spans.epoch == epochs[at])
    return (
        select_rows(steps, keep),
        select_rows(spans, keep_spans),
        len(np.unique(pairs[~is_last, 0])),
    )


def _unusable(run: RunInfo, spans: SpanTable, steps: StepTable, split: WaitSplit) -> dict[int, str]:
    """Name the steps that cannot be replayed: nothing is patched over."""
    reasons: dict[int, str] = {}
    expected = num_expected_ranks(run)
    comm = is_communication(spans) & (spans.group_id != 0) & (spans.seq != NONE)
    for step in sorted_unique(spans.step[comm & (split.instance == NOT_FOUND)]).tolist():
        reasons[step] = "a communication lacks the record of a member"
    for step in sorted_unique(spans.step[split.negative & ~is_one_sided(spans, split)]).tolist():
        reasons[step] = "a rank left a communication before the last one entered it"
    for step in set(sorted_unique(steps.step).tolist()) - set(sorted_unique(spans.step).tolist()):
        reasons[step] = "no span of it is stored"
    for step, missing in _not_recorded(run, steps).items():
        reasons[step] = f"spans of it were not recorded: {missing}"
    numbers, counts = np.unique(steps.step, return_counts=True)
    for step, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        if count != expected:
            reasons[step] = f"{expected - count} of {expected} ranks have no record of it"
    return reasons


def _placed(
    run: RunInfo, steps: StepTable, spans: SpanTable
) -> tuple[StepTable, SpanTable, dict[int, str]]:
    """Leave out the steps that hold rows of ranks of which no description came, and name them."""
    told = [rank.rank for epoch in run.epochs for rank in epoch.ranks]
    found: dict[int, set[int]] = {}
    for table in (spans, steps):
        strange = np.setdiff1d(sorted_unique(table.rank), told)
        if not len(strange):
            continue
        rows = np.flatnonzero(np.isin(table.rank, strange))
        pairs = sorted_unique(table.step[rows].astype(np.int64) << 32 | table.rank[rows])
        for pair in pairs.tolist():
            found.setdefault(pair >> 32, set()).add(pair & 0xFFFF_FFFF)
    if found:
        steps = select_rows(steps, ~np.isin(steps.step, list(found)))
        spans = select_rows(spans, ~np.isin(spans.step, list(found)))
    reasons = {
        step: f"nobody described {format_ranks(tuple(sorted(ranks)))}"
        for step, ranks in found.items()
    }
    return steps, spans, reasons


def _not_recorded(run: RunInfo, steps: StepTable) -> dict[int, str]:
    """Name, by step, the kinds that the replay needs and ranks say that they did not record.

    A step in which few ranks lack compute alone is replayed; these ranks are not judged in it.
    """
    has_other = any(group.kind == OTHER for epoch in run.epochs for group in epoch.groups)
    needed = NEEDED_KINDS | {OTHER} if has_other else NEEDED_KINDS
    bits = pack_kinds(needed)
    found: dict[int, int] = {}
    mask = steps.left_out & np.uint32(bits)
    alone = np.flatnonzero((mask != 0) & ((mask & ~np.uint32(RANK_COMPUTE_BITS)) == 0))
    numbers, counts = np.unique(steps.step[alone], return_counts=True)
    few = numbers[2 * counts < num_expected_ranks(run)]
    mask[alone[np.isin(steps.step[alone], few)]] = 0
    lacking = np.flatnonzero(mask)
    for step, kinds in zip(steps.step[lacking].tolist(), mask[lacking].tolist(), strict=True):
        found[step] = found.get(step, 0) | kinds
    return {step: ", ".join(unpack_kinds(kinds)) for step, kinds in found.items()}


def _wait_intervals(joined: MatchedWaits, number: NDArray[np.int64]) -> WaitIntervals:
    """Return the part of each blocked interval that lies before the last member's arrival."""
    spans, split = joined.spans, joined.split
    known = joined.wait_comm != NOT_FOUND
    member = joined.wait_comm[known]
    comm = joined.comm[member]
    begin, until = (positions[known] for positions in joined.blocked())
    start = joined.line.time_at(begin)
    arrival = spans.start_ns[comm] + split.wait_ns[comm]
    end = np.minimum(arrival, start + (until - begin))
    real = (end > start) & ~joined.one_sided[member]
    # Threads of one rank may wait at the same time.
    return remove_overlaps(
        WaitIntervals(
            rank=spans.rank[comm][real],
            operation=number[member[real]],
            start_ns=start[real],
            end_ns=end[real],
        )
    )
