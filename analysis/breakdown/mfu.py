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
from ..trace.device_peaks import peak_flops_per_s
from ..trace.rows import select_rows
from ..trace.tables import format_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..trace.context import MicrobatchTable
    from ..trace.tables import EpochInfo, RankInfo, RunInfo, SpanSource, StepTable

TERA = 1e12


def read_mfu(
    source: SpanSource, run_id: str, steps: StepTable, *, run: RunInfo | None = None
) -> Mfu | None:
    """Return the MFU of these steps of a stored run; None if it is unknown.

    Args:
        run: The description of the run, if it was just read.
    """
    run = run or source.run_info(run_id)
    first = int(steps.step.min(initial=0))
    needs_lengths = bool(len(steps)) and bool(
        run.flops_per_squared_length or run.flops_per_windowed_length
    )
    context = source.context(run_id, first=first) if needs_lengths else RunContext()
    return compute_mfu(run, steps, context.microbatches)


def compute_mfu(
    run: RunInfo, steps: StepTable, microbatches: MicrobatchTable, *, usual: float | None = None
) -> Mfu | None:
    """Return the MFU of each step, unsmoothed; None if it is unknown.

    With P the sum of the peaks of all ranks, squares the sum of the squared lengths of the
    sequences of all micro-batches, and windowed that of the lengths times the length or the
    attention's window, whichever is less::

        attention[step] = flops_per_squared_length * squares[step]
            + flops_per_windowed_length * windowed[step]
        flops[step] = flops_per_token * tokens[step] + attention[step]
        MFU[step] = flops[step] / (P * duration[step])
        HFU[step] = (flops[step] + recomputed_flops_per_token * tokens[step]
            + recomputed_attention_ratio * attention[step]) / (P * duration[step])

    The duration is that of `measure_steps`, so time that two steps share counts once. A step is
    left out unless every traced rank has ended it and every data position (dp, cp)
    reported its tokens, and its lengths if the FLOPs depend on them. A sequence is split evenly
    over the cp positions, so each of their squares counts cp times; with a window that is unknown.
    If a later epoch repeated a step, that epoch's value counts. There are no
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
    executed: dict[int, float] = {}
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
        attention = _epoch_attention(run, epoch, steps, microbatches)
        known = counted.keys() if attention is None else counted.keys() & attention
        if known:
            if by_step:
                restart_steps.append(min(known))
            for step in known:
                num_tokens, seconds = counted[step]
                of_attention = 0.0 if attention is None else attention[step]
                flops[step] = run.flops_per_token * num_tokens + of_attention
                by_step[step] = flops[step] / (peak * seconds)
                if (repeated := _recomputed(run, num_tokens, of_attention)) is not None:
                    executed[step] = (flops[step] + repeated) / (peak * seconds)
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
        hfu=float(np.mean(list(executed.values()))) if executed.keys() == by_step.keys() else None,
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
            f"FLOPs per token unknown{f' ({run.unknown_flops})' if run.unknown_flops else ''}: set"
            f" RANKSCOPE_FLOPS_PER_TOKEN, or pass `flops_per_token` to {install}, or set"
            " RANKSCOPE_COUNT_FLOPS=1: torch counts them in the first step"
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
    if run.flops_per_windowed_length:
        lengths += ", and lengths within the attention's window, which the tracer counts"
        lengths += " unless sequences are split over context-parallel ranks"
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
    sums = _rank_sums(microbatches, "sum_squared_lengths")
    of_step, num_steps = factorize(sums.epoch, sums.step)
    largest, step = np.zeros(num_steps, dtype=np.int64), np.zeros(num_steps, dtype=np.int64)
    np.maximum.at(largest, of_step, sums.sum_squared_lengths)
    largest[of_step[sums.sum_squared_lengths < 0]] = -1
    step[of_step] = sums.step
    is_known = largest >= 0
    return dict(zip(step[is_known].tolist(), largest[is_known].tolist(), strict=True))


def _rank_sums(microbatches: MicrobatchTable, column: str) -> MicrobatchTable:
    """Return one row for each epoch, step and rank with the sum of a column; -1 if unknown."""
    values: NDArray[np.int64] = getattr(microbatches, column)
    code, num = factorize(microbatches.epoch, microbatches.step, microbatches.rank)
    sums, row = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.int64)
    np.add.at(sums, code, values)
    sums[code[values < 0]] = -1
    row[code] = np.arange(len(code))
    rows = select_rows(microbatches, row)
    if column == "sum_windowed_lengths":
        return replace(rows, sum_windowed_lengths=sums)
    return replace(rows, sum_squared_lengths=sums)


def _epoch_attention(
    run: RunInfo, epoch: EpochInfo, steps: StepTable, microbatches: MicrobatchTable
) -> dict[int, float] | None:
    """Return the FLOPs that depend on lengths of each step in which these are known.

    None if none of the run's FLOPs depend on them.
    """
    factors = {
        "sum_squared_lengths": run.flops_per_squared_length,
        "sum_windowed_lengths": run.flops_per_windowed_length,
    }
    columns = [column for column, factor in factors.items() if factor]
    if not columns:
        return None
    if factors["sum_windowed_lengths"] and run.layout.cp > 1:
        return {}
    own = select_rows(microbatches, microbatches.epoch == epoch.epoch)
    own = select_rows(own, np.isin(own.step, steps.step))
    numbers = np.unique(own.step)
    total, is_known = np.zeros(len(numbers)), np.ones(len(numbers), dtype=bool)
    for column in columns:
        sums = _rank_sums(own, column)
        values = getattr(sums, column)
        summed = _sum_positions(run, epoch, step=sums.step, rank=sums.rank, values=values)
        total = total + factors[column] * run.layout.cp * summed
        is_known &= summed >= 0
    of_step = zip(numbers[is_known].tolist(), total[is_known].tolist(), strict=True)
    return dict(of_step)


def _recomputed(run: RunInfo, num_tokens: int, of_attention: float) -> float | None:
    """Return the FLOPs of a step that activation recomputation repeats; None if unknown."""
    per_token, ratio = run.recomputed_flops_per_token, run.recomputed_attention_ratio
    if per_token is None or (of_attention and ratio is None):
        return None
    return per_token * num_tokens + (ratio or 0.0) * of_attention


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
