"""Reader of traced runs, whose groups and sequence numbers are recorded, not inferred."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import COMM_KINDS, KINDS, NONE, SpanKind, pack_kinds, unpack_kinds

from ...arrays.grouping import cumcount, sorted_unique
from ...arrays.intervals import NOT_FOUND
from ...arrays.sorting import find_positions
from ...replay.model import COMPUTE_CODES, Reading, WaitIntervals, remove_overlaps
from ...report.text import format_count, format_ranks
from ...statistics.thresholds import THRESHOLDS
from ...trace.rows import select_rows
from ...trace.tables import is_tp_collapsed, num_expected_ranks
from ..transfers import find_truncated
from ..waits import is_communication, is_one_sided, is_p2p, split_traced_waits
from .compute_items import build_compute_items
from .device_steps import measure_steps
from .evidence import find_gaps, find_transfers
from .graph import build_model, find_idle
from .incomplete_steps import RANK_COMPUTE_BITS, drop_incomplete
from .job_ends import find_job_ends
from .matched_waits import MatchedWaits, match_waits
from .pieces import EVALUATION, GENERATION, cut_pieces

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import RunInfo, SpanTable, StepTable
    from ..waits import WaitSplit
    from .pieces import Pieces

OTHER = SpanKind.OTHER
NEEDED_KINDS = COMM_KINDS | {SpanKind.WAIT} | {KINDS[code] for code in COMPUTE_CODES}
"""Kinds that the replay is built of, besides collectives of `OTHER` groups. A step without one of
them is unknown, not empty."""


def read_traced(
    run: RunInfo, spans: SpanTable, steps: StepTable, *, num_earlier_steps: int = 0
) -> Reading:
    """Build the operations of a traced run.

    Steps at the ends of an epoch, in which the job only starts up or ends, are excluded
    (`job_ends`). Steps with a missing rank, a rank without a description, a missing member of a
    communication or a transfer negative beyond the clock error are left out and named.

    Args:
        spans: Spans of the requested steps, of any epochs; of a step that is in several epochs,
            the latest is used.
        num_earlier_steps: Steps of the run before these.
    """
    steps, spans, num_repeated = _select_latest_epochs(steps, spans)
    steps, spans, undescribed = _drop_undescribed(run, steps, spans)
    split = split_traced_waits(run, spans)
    left_out = undescribed | _find_unusable(run, spans, steps, split)
    startup_ns, ending_ns = find_job_ends(
        run, spans, steps, split, num_earlier_steps=num_earlier_steps
    )
    ends = startup_ns.keys() | ending_ns.keys()
    excluded = left_out.keys() | ends
    numbers = np.array(sorted(set(sorted_unique(steps.step).tolist()) - excluded), dtype=np.int32)
    all_steps, steps = steps, select_rows(steps, np.isin(steps.step, numbers))
    matched, warnings = match_waits(spans, steps, numbers, split)
    pieces = cut_pieces(
        spans,
        matched.line,
        matched.rank_steps,
        compute=matched.compute,
        waits=(matched.wait_start, matched.wait_end),
        launches=matched.launch,
    )
    if is_tp_collapsed(run, run.epochs[-1]):
        warnings.append(
            "one tensor-parallel rank of each worker was traced, and is taken for all of them"
        )
    if num_repeated:
        warnings.append(
            f"{format_count(num_repeated, 'step')} repeated in a later epoch; the last epoch counts"
        )
    job_steps = measure_steps(all_steps)
    at = np.flatnonzero(np.isin(job_steps.step, numbers))
    at = at[np.argsort(job_steps.step[at])]
    with ThreadPoolExecutor(2) as pool:
        built_items = pool.submit(build_compute_items, matched, pieces, numbers, run)
        step_numbers = tuple(numbers.tolist())
        truncated = find_truncated(spans, split, matched.comm)
        model, number = build_model(
            run,
            matched,
            pieces,
            numbers=step_numbers,
            overlap_ns=job_steps.overlap_ns[at],
            truncated=truncated,
        )
        piece_number, comm_number = number[: len(pieces.start)], number[len(pieces.start) :]
        transfers = pool.submit(
            find_transfers, matched, numbers, run, number=number, truncated=truncated
        )
        gaps = find_gaps(
            matched,
            pieces,
            steps,
            numbers=numbers,
            piece_number=piece_number,
            records_loader=run.records_loader,
        )
        waits = _find_wait_intervals(matched, pieces, comm_number)
    items, calls, expert_pieces = built_items.result()
    items, gaps, more, not_compared = drop_incomplete(
        items, gaps, run=run, spans=spans, steps=all_steps, numbers=numbers
    )

    def of_pieces(chosen: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        if not chosen.any():
            return None
        operations = np.zeros(len(number), dtype=np.bool_)
        operations[piece_number[chosen]] = True
        return operations

    return Reading(
        model=model,
        items=items,
        steps=step_numbers,
        actual_ns=job_steps.duration_ns[at],
        left_out={step: why for step, why in left_out.items() if step not in ends},
        startup_ns=startup_ns,
        ending_ns=ending_ns,
        waits=waits,
        gaps=gaps,
        transfers=transfers.result(),
        warnings=(*warnings, *more),
        experts=of_pieces(expert_pieces),
        calls=calls if len(calls) else None,
        is_call=of_pieces(pieces.is_call & (pieces.part[pieces.compute] == GENERATION)),
        not_compared=not_compared,
        evaluated_steps=tuple(sorted_unique(spans.step[pieces.part == EVALUATION]).tolist()),
    )


def _select_latest_epochs(steps: StepTable, spans: SpanTable) -> tuple[StepTable, SpanTable, int]:
    """Keep each step's last epoch; return also the number of steps with several epochs."""
    if not len(steps) or (steps.epoch == steps.epoch[0]).all():
        return steps, spans, 0
    pairs = np.unique(np.stack((steps.step, steps.epoch), axis=1), axis=0)
    is_last = np.append(pairs[1:, 0] != pairs[:-1, 0], True) if len(pairs) else np.ones(0, bool)
    if is_last.all():
        return steps, spans, 0
    numbers, epochs = pairs[is_last].T
    last_epoch = epochs[find_positions(steps.step, numbers)]
    keep = np.isin(steps.step, numbers) & (steps.epoch == last_epoch)
    index = np.minimum(find_positions(spans.step, numbers), len(numbers) - 1)
    keep_spans = (numbers[index] == spans.step) & (spans.epoch == epochs[index])
    return (
        select_rows(steps, keep),
        select_rows(spans, keep_spans),
        len(np.unique(pairs[~is_last, 0])),
    )


def _find_unusable(
    run: RunInfo, spans: SpanTable, steps: StepTable, split: WaitSplit
) -> dict[int, str]:
    """Return the steps that cannot be replayed, and why. Nothing is repaired."""
    reasons: dict[int, str] = {}
    expected = num_expected_ranks(run)
    comm = is_communication(spans) & (spans.group_id != 0) & (spans.seq != NONE)
    no_group = is_communication(spans) & (spans.group_id == 0) & is_p2p(spans)
    pairs = np.flatnonzero(is_p2p(spans))
    described = list(run.ranks)
    is_known = np.isin(spans.src_rank[pairs], described) & np.isin(spans.dst_rank[pairs], described)
    for rows, reason in (
        (comm & (split.instance == NOT_FOUND), "a member of a communication has no record"),
        (no_group, "a p2p operation has group id 0, which joins no send with its receive"),
        (pairs[~is_known], "a p2p operation names a rank without a description"),
        (
            split.negative & ~is_one_sided(spans, split),
            "a rank left a communication before the last one entered it",
        ),
    ):
        reasons |= dict.fromkeys(sorted_unique(spans.step[rows]).tolist(), reason)
    for step in set(sorted_unique(steps.step).tolist()) - set(sorted_unique(spans.step).tolist()):
        reasons[step] = "none of its spans is stored"
    for step, missing in _find_not_recorded_kinds(run, steps).items():
        reasons[step] = f"spans were not recorded: {missing}"
    numbers, counts = np.unique(steps.step, return_counts=True)
    without = tuple(sorted(run.ranks.keys() - set(sorted_unique(steps.rank).tolist())))
    why = ""
    if without and len(numbers) >= THRESHOLDS.min_lasting_steps:
        why = (
            f" ({format_ranks(without)} recorded none: a rank without an optimizer marks its steps"
            " with `tracer.step`)"
        )
    for step, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        if count != expected:
            reasons[step] = f"{expected - count} of {expected} ranks have no record of it{why}"
    return reasons


def _drop_undescribed(
    run: RunInfo, steps: StepTable, spans: SpanTable
) -> tuple[StepTable, SpanTable, dict[int, str]]:
    """Drop the steps with rows of ranks that have no description; return also the reasons."""
    described = list(run.ranks)
    undescribed: dict[int, set[int]] = {}
    for table in (spans, steps):
        unknown = np.setdiff1d(sorted_unique(table.rank), described)
        if not len(unknown):
            continue
        rows = np.flatnonzero(np.isin(table.rank, unknown))
        pairs = sorted_unique(table.step[rows].astype(np.int64) << 32 | table.rank[rows])
        for pair in pairs.tolist():
            undescribed.setdefault(pair >> 32, set()).add(pair & 0xFFFF_FFFF)
    if undescribed:
        steps = select_rows(steps, ~np.isin(steps.step, list(undescribed)))
        spans = select_rows(spans, ~np.isin(spans.step, list(undescribed)))
    reasons = {
        step: f"no description of {format_ranks(tuple(sorted(ranks)))} was received"
        for step, ranks in undescribed.items()
    }
    return steps, spans, reasons


def _find_not_recorded_kinds(run: RunInfo, steps: StepTable) -> dict[int, str]:
    """Return, by step, the needed kinds that ranks report as not recorded.

    A step in which only few ranks miss only compute is replayed; those ranks are not compared.
    """
    has_other = any(group.kind == OTHER for epoch in run.epochs for group in epoch.groups)
    needed = NEEDED_KINDS | {OTHER} if has_other else NEEDED_KINDS
    bits = pack_kinds(needed)
    kinds_of_step: dict[int, int] = {}
    mask = steps.left_out & np.uint32(bits)
    only_compute = np.flatnonzero((mask != 0) & ((mask & ~np.uint32(RANK_COMPUTE_BITS)) == 0))
    numbers, counts = np.unique(steps.step[only_compute], return_counts=True)
    few = numbers[2 * counts < num_expected_ranks(run)]
    mask[only_compute[np.isin(steps.step[only_compute], few)]] = 0
    rows = np.flatnonzero(mask)
    for step, kinds in zip(steps.step[rows].tolist(), mask[rows].tolist(), strict=True):
        kinds_of_step[step] = kinds_of_step.get(step, 0) | kinds
    return {step: ", ".join(unpack_kinds(kinds)) for step, kinds in kinds_of_step.items()}


def _find_wait_intervals(
    matched: MatchedWaits, pieces: Pieces, number: NDArray[np.int64]
) -> WaitIntervals:
    """Return the part of each wait that is before the last member's arrival.

    If the device of a rank is idle while one of its communications waits for a member, the rank
    waits, even if its host is late too.
    """
    spans, split = matched.spans, matched.split
    known = matched.wait_comm != NOT_FOUND
    member = matched.wait_comm[known]
    comm = matched.comm[member]
    begin, until = matched.wait_start[known], matched.wait_end[known]
    start = matched.line.time_at(begin)
    arrival = spans.start_ns[comm] + split.wait_ns[comm]
    end = np.minimum(arrival, start + (until - begin))
    beside, idle_start, idle_end = _find_idle_waits(matched, pieces)
    member = np.concatenate((member, beside))
    start = np.concatenate((start, matched.line.time_at(idle_start)))
    end = np.concatenate((end, matched.line.time_at(idle_end)))
    is_real = (end > start) & ~matched.one_sided[member]
    # Threads of one rank may wait at the same time.
    return remove_overlaps(
        WaitIntervals(
            rank=spans.rank[matched.comm[member]][is_real],
            operation=number[member[is_real]],
            start_ns=start[is_real],
            end_ns=end[is_real],
        )
    )


def _find_idle_waits(
    matched: MatchedWaits, pieces: Pieces
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return communications that wait beside an idle device, and begin and end on the line.

    A communication occurs once for each idle time.
    """
    spans, comm = matched.spans, matched.comm
    idle = np.flatnonzero(find_idle(matched, pieces) & (pieces.end > pieces.start))
    start = matched.line.place(spans.rank[comm], spans.start_ns[comm])
    end = start + matched.split.wait_ns[comm]
    waits = np.flatnonzero((end > start) & ~matched.has_no_wait)
    first = np.searchsorted(pieces.end[idle], start[waits], side="right")
    num = np.maximum(np.searchsorted(pieces.start[idle], end[waits]) - first, 0)
    member = np.repeat(waits, num)
    piece = idle[np.repeat(first, num) + cumcount(np.repeat(np.arange(len(waits)), num))]
    return (
        member,
        np.maximum(start[member], pieces.start[piece]),
        np.minimum(end[member], pieces.end[piece]),
    )
