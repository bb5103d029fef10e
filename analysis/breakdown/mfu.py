"""Model FLOPs utilisation (MFU): the model's arithmetic over the peak of the devices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NS_PER_S

from ..arrays.grouping import factorize
from ..readers.tracer.device_steps import measure_steps
from ..report.report import Mfu
from ..trace.context import RunContext
from ..trace.devices import peak_flops_per_s
from ..trace.rows import select_rows
from ..trace.tables import format_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..trace.context import MicrobatchTable
    from ..trace.tables import EpochInfo, RankInfo, RunInfo, SpanSource, StepTable

TERA = 1e12


def read_mfu(source: SpanSource, run_id: str, steps: StepTable) -> Mfu | None:
    """Return the MFU of these steps of a stored run; None if it is unknown."""
    run, first = source.run_info(run_id), int(steps.step.min(initial=0))
    needs_lengths = bool(run.flops_per_squared_length and len(steps))
    context = source.context(run_id, first=first) if needs_lengths else RunContext()
    return compute_mfu(run, steps, context.microbatches)


def compute_mfu(
    run: RunInfo, steps: StepTable, microbatches: MicrobatchTable, *, usual: float | None = None
) -> Mfu | None:
    """Return the MFU of each step, unsmoothed; None if it is unknown.

    With P the sum of the peaks of all ranks, and squares the sum of the squared lengths of the
    sequences of all micro-batches::

        flops[step] = flops_per_token * tokens[step] + flops_per_squared_length * squares[step]
        MFU[step] = flops[step] / (P * duration[step])

    The duration is that of `measure_steps`, so time that two steps share counts once. A step is
    left out unless every traced rank has ended it and every data position (dp, cp)
    reported its tokens, and its lengths if the FLOPs depend on them. A sequence is split evenly
    over the cp positions, so each of their squares counts cp times. If a later epoch repeated a
    step, that epoch's value counts. There are no
    defaults: the MFU is unknown if ``flops_per_token``, the layout or the peak of a device is
    unknown, or if not all data positions were traced.

    Args:
        steps: Any number of epochs.
        microbatches: Lengths of the same steps.
        usual: MFU of an earlier run that compares with this one; None if there is none.

    Source:
        arXiv 2204.02311, appendix B: recomputation is not counted.
    """
    if run.flops_per_token is None or run.layout.dsp > 1 or not run.has_layout:
        return None
    by_step: dict[int, float] = {}
    flops: dict[int, float] = {}
    convention = ""
    restart_steps: list[int] = []
    for epoch in sorted(run.epochs, key=lambda known: known.epoch):
        peaks = [rank_peak(rank) or 0.0 for rank in epoch.ranks]
        if not peaks or min(peaks) <= 0:
            continue
        # Ranks that were not traced have the peak of the traced ones, if these all have the same.
        if len(peaks) == run.world_size:
            peak = sum(peaks)
        elif len(set(peaks)) == 1:
            peak = peaks[0] * run.world_size
        else:
            continue
        counted = _epoch_tokens(run, epoch, steps)
        per_square = run.flops_per_squared_length or 0.0
        squares = _epoch_squares(run, epoch, steps, microbatches) if per_square else {}
        known = counted.keys() & squares if per_square else counted.keys()
        if known:
            if by_step:
                restart_steps.append(min(known))
            for step in known:
                num_tokens, seconds = counted[step]
                flops[step] = run.flops_per_token * num_tokens + per_square * squares.get(step, 0)
                by_step[step] = flops[step] / (peak * seconds)
            counted_as = run.flops_convention or "FLOPs per token as declared by the job"
            sources = sorted({_peak_source(run, rank) for rank in epoch.ranks})
            convention = f"{counted_as}; peak {', '.join(sources)}"
    if not by_step:
        return None
    ordered = dict(sorted(by_step.items()))
    return Mfu(
        convention=convention,
        mean=float(np.mean(list(ordered.values()))),
        by_step=ordered,
        flops_by_step={step: flops[step] for step in ordered},
        restart_steps=tuple(restart_steps),
        usual=usual,
    )


def explain_missing_mfu(run: RunInfo, steps: StepTable) -> str:
    """Return why `compute_mfu` returns None, and what makes it known."""
    install = "`tracer.install`"
    if not format_of(run).has_flops:
        return "the trace format has no FLOPs"
    if not run.has_layout:
        return f"parallel layout unknown: pass `layout` and `coords` to {install}"
    if run.flops_per_token is None:
        return (
            "FLOPs per token unknown: set RANKSCOPE_FLOPS_PER_TOKEN, or pass `flops_per_token` to"
            f" {install}, or set RANKSCOPE_COUNT_FLOPS=1: torch counts them in the first step"
        )
    unknown = [
        rank for epoch in run.epochs for rank in epoch.ranks if rank_peak(rank) in {None, 0.0}
    ]
    if unknown:
        device = unknown[0].device_name or "a device without a name"
        dtype = unknown[0].dtype.removeprefix("torch.") or "an unknown dtype"
        return (
            f"peak of {device} at {dtype} unknown: set RANKSCOPE_PEAK_FLOPS to its FLOP/s, or pass"
            f" `peak_flops_per_s` to {install}"
        )
    if not (steps.num_tokens > 0).any():
        return "tokens unknown: pass `tokens` to `tracer.step`"
    lengths = ", and squared lengths (`tracer.microbatch`)" if run.flops_per_squared_length else ""
    return f"no step has an end and tokens of all ranks{lengths}"


def count_tokens(run: RunInfo, steps: StepTable) -> dict[int, int]:
    """Return the tokens of each step of the job, in the steps of which `compute_mfu` speaks.

    Without a layout each rank counts as a position of its own, so only their ratios mean something.
    """
    return {
        step: num_tokens
        for epoch in sorted(run.epochs, key=lambda known: known.epoch)
        for step, (num_tokens, _) in _epoch_tokens(run, epoch, steps).items()
    }


def sum_squares(microbatches: MicrobatchTable) -> dict[int, int]:
    """Return the largest sum of squared lengths of a rank in each step; the others wait for it.

    Steps in which those of a micro-batch are unknown are left out. If a later epoch repeated a
    step, that epoch's value counts.
    """
    sums = _rank_squares(microbatches)
    of_step, num_steps = factorize(sums.epoch, sums.step)
    largest, step = np.zeros(num_steps, dtype=np.int64), np.zeros(num_steps, dtype=np.int64)
    np.maximum.at(largest, of_step, sums.sum_squared_lengths)
    largest[of_step[sums.sum_squared_lengths < 0]] = -1
    step[of_step] = sums.step
    is_known = largest >= 0
    return dict(zip(step[is_known].tolist(), largest[is_known].tolist(), strict=True))


def _rank_squares(microbatches: MicrobatchTable) -> MicrobatchTable:
    """Return one row for each epoch, step and rank; -1 if a sum of squares is unknown."""
    squared = microbatches.sum_squared_lengths
    code, num = factorize(microbatches.epoch, microbatches.step, microbatches.rank)
    sums, row = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.int64)
    np.add.at(sums, code, squared)
    sums[code[squared < 0]] = -1
    row[code] = np.arange(len(code))
    return replace(select_rows(microbatches, row), sum_squared_lengths=sums)


def _epoch_squares(
    run: RunInfo, epoch: EpochInfo, steps: StepTable, microbatches: MicrobatchTable
) -> dict[int, int]:
    """Return the sum of squared lengths of each step of an epoch in which all are known."""
    own = select_rows(microbatches, microbatches.epoch == epoch.epoch)
    sums = _rank_squares(select_rows(own, np.isin(own.step, steps.step)))
    squares = _sum_positions(
        run, epoch, step=sums.step, rank=sums.rank, values=sums.sum_squared_lengths
    )
    of_step = zip(np.unique(sums.step).tolist(), squares.tolist(), strict=True)
    return {step: run.layout.cp * total for step, total in of_step if total >= 0}


def _epoch_tokens(run: RunInfo, epoch: EpochInfo, steps: StepTable) -> dict[int, tuple[int, float]]:
    """Return tokens and seconds of each step of an epoch that all ranks have ended."""
    ended = select_rows(steps, (steps.epoch == epoch.epoch) & (steps.end_ns > steps.start_ns))
    if not len(ended):
        return {}
    seconds = measure_steps(ended).duration_ns / NS_PER_S
    numbers, num_ranks = np.unique(ended.step, return_counts=True)
    tokens = _sum_positions(run, epoch, step=ended.step, rank=ended.rank, values=ended.num_tokens)
    is_known = (num_ranks == len(epoch.ranks)) & (tokens >= 0)
    of_step = zip(tokens[is_known].tolist(), seconds[is_known].tolist(), strict=True)
    return dict(zip(numbers[is_known].tolist(), of_step, strict=True))


def _sum_positions(
    run: RunInfo,
    epoch: EpochInfo,
    *,
    step: NDArray[np.int32],
    rank: NDArray[np.int32],
    values: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the sum of each distinct step, ascending; -1 if a data position is missing.

    Ranks of one (dp, cp) position train on the same tokens, so each position counts once. A rank
    outside the layout (an earlier epoch had a larger one, or the declared layout is wrong) makes
    the sums of its steps unknown.
    """
    num_positions = run.layout.dp * run.layout.cp
    position_of = {
        known.rank: known.coords.dp * run.layout.cp + known.coords.cp for known in epoch.ranks
    }
    position = np.array([position_of.get(number, -1) for number in rank.tolist()], dtype=np.int64)
    numbers, row = np.unique(step, return_inverse=True)
    if num_positions > len(position_of):  # a declared layout may be far larger than the job
        return np.full(len(numbers), -1, dtype=np.int64)
    known = np.full((len(numbers), num_positions), -1, dtype=np.int64)
    is_placed = (position >= 0) & (position < num_positions)
    np.maximum.at(known, (row[is_placed], position[is_placed]), values[is_placed])
    known[row[position >= num_positions]] = -1
    return np.where((known >= 0).all(axis=1), known.sum(axis=1), -1)


def rank_peak(rank: RankInfo) -> float | None:
    """Return the peak of a rank's device in FLOP/s, declared or known; None if it is unknown."""
    if rank.peak_flops_per_s is not None:
        return rank.peak_flops_per_s
    return peak_flops_per_s(rank.device_name, rank.dtype)


def _peak_source(run: RunInfo, rank: RankInfo) -> str:
    peak = rank_peak(rank)
    rate = "unknown" if peak is None else f"{peak / TERA:.4g} TFLOP/s per rank"
    if rank.peak_flops_per_s is None:
        return f"{rate}, dense {rank.dtype.removeprefix('torch.')} of {rank.device_name}"
    device = "paced CPU" if run.paced else rank.device_name or "unnamed device"
    return f"{rate}, declared by the job ({device})"
