"""Model FLOPs utilisation (MFU): the model's arithmetic over the peak of the devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NS_PER_S

from ..arrays.grouping import factorize
from ..readers.tracer.device_steps import measure_steps
from ..report.report import Mfu
from ..trace.devices import peak_flops_per_s
from ..trace.rows import select_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..trace.context import MicrobatchTable
    from ..trace.tables import EpochInfo, RankInfo, RunInfo, StepTable

TERA = 1e12


def compute_mfu(run: RunInfo, steps: StepTable, *, usual: float | None = None) -> Mfu | None:
    """Return the MFU of each step, unsmoothed; None if it is unknown.

    With P the sum of the peaks of all ranks::

        MFU[step] = flops_per_token * tokens[step] / (P * duration[step])

    The duration is that of `measure_steps`, so time that two steps share counts once. A step is
    left out unless every traced rank has ended it and every data position (dp, cp)
    reported its tokens. If a later epoch repeated a step, that epoch's value counts. There are no
    defaults: the MFU is unknown if ``flops_per_token``, the layout or the peak of a device is
    unknown, or if not all data positions were traced.

    Args:
        run: Layout, ranks and FLOPs per token.
        steps: Any number of epochs.
        usual: MFU of an earlier run that compares with this one; None if there is none.

    Source:
        arXiv 2204.02311, appendix B: recomputation is not counted.
    """
    if run.flops_per_token is None or run.layout.dsp > 1 or not run.has_layout:
        return None
    by_step: dict[int, float] = {}
    tokens: dict[int, int] = {}
    convention = ""
    restart_steps: list[int] = []
    for epoch in sorted(run.epochs, key=lambda known: known.epoch):
        peak = _job_peak(run, epoch)
        if peak is None:
            continue
        counted = _epoch_tokens(run, epoch, steps)
        found = {
            step: run.flops_per_token * num_tokens / (peak * seconds)
            for step, (num_tokens, seconds) in counted.items()
        }
        if found:
            if by_step:
                restart_steps.append(min(found))
            by_step.update(found)
            tokens.update({step: num_tokens for step, (num_tokens, _) in counted.items()})
            convention = _convention(run, epoch)
    if not by_step:
        return None
    ordered = dict(sorted(by_step.items()))
    return Mfu(
        convention=convention,
        mean=float(np.mean(list(ordered.values()))),
        by_step=ordered,
        tokens_by_step={step: tokens[step] for step in ordered},
        restart_steps=tuple(restart_steps),
        usual=usual,
    )


def explain_missing_mfu(run: RunInfo, steps: StepTable) -> str:
    """Return why `compute_mfu` returns None, and what makes it known.

    Args:
        run: Layout, ranks and FLOPs per token.
        steps: Any number of epochs.
    """
    install = "`tracer.install`"
    if run.source_format != "rankscope":
        return "the trace format has no FLOPs"
    if not run.has_layout:
        return f"parallel layout unknown: pass `layout` and `coords` to {install}"
    if run.flops_per_token is None:
        return (
            "FLOPs per token unknown: set RANKSCOPE_FLOPS_PER_TOKEN, or pass `flops_per_token` to"
            f" {install}"
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
    return "no step has an end and tokens of all ranks"


def count_tokens(run: RunInfo, steps: StepTable) -> dict[int, int]:
    """Return the tokens of each step of the job, in the steps of which `compute_mfu` speaks.

    Without a layout each rank counts as a position of its own, so only their ratios mean something.

    Args:
        run: Layout and ranks.
        steps: Any number of epochs.
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
    epoch, step, squared = microbatches.epoch, microbatches.step, microbatches.sum_squared_lengths
    of_rank, num_ranks = factorize(epoch, step, microbatches.rank)
    of_step, num_steps = factorize(epoch, step)
    sums, largest = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_steps, dtype=np.int64)
    np.add.at(sums, of_rank, squared)
    np.maximum.at(largest, of_step, sums[of_rank])
    is_known, first = np.ones(num_steps, dtype=np.bool_), np.zeros(num_steps, dtype=np.int64)
    is_known[of_step[squared < 0]] = False
    first[of_step] = np.arange(len(of_step))
    rows = first[is_known]
    return dict(zip(step[rows].tolist(), largest[is_known].tolist(), strict=True))  # epochs ascend


def _epoch_tokens(run: RunInfo, epoch: EpochInfo, steps: StepTable) -> dict[int, tuple[int, float]]:
    """Return tokens and seconds of each step of an epoch that all ranks have ended."""
    ended = select_rows(steps, (steps.epoch == epoch.epoch) & (steps.end_ns > steps.start_ns))
    if not len(ended):
        return {}
    seconds = measure_steps(ended).duration_ns / NS_PER_S
    numbers, num_ranks = np.unique(ended.step, return_counts=True)
    tokens = _tokens_by_step(
        run, epoch, step=ended.step, rank=ended.rank, num_tokens=ended.num_tokens
    )
    is_known = (num_ranks == len(epoch.ranks)) & (tokens >= 0)
    return {
        step: (num_tokens, s)
        for step, num_tokens, s in zip(
            numbers[is_known].tolist(),
            tokens[is_known].tolist(),
            seconds[is_known].tolist(),
            strict=True,
        )
    }


def _tokens_by_step(
    run: RunInfo,
    epoch: EpochInfo,
    *,
    step: NDArray[np.int32],
    rank: NDArray[np.int32],
    num_tokens: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the tokens of each distinct step, ascending; -1 if a data position is missing.

    Ranks of one (dp, cp) position train on the same tokens, so each position counts once. A rank
    outside the layout (an earlier epoch had a larger one, or the declared layout is wrong) makes
    the tokens of its steps unknown.
    """
    num_positions = run.layout.dp * run.layout.cp
    position_of = {
        known.rank: known.coords.dp * run.layout.cp + known.coords.cp for known in epoch.ranks
    }
    position = np.array([position_of.get(number, -1) for number in rank.tolist()], dtype=np.int64)
    numbers, row = np.unique(step, return_inverse=True)
    tokens = np.full((len(numbers), num_positions), -1, dtype=np.int64)
    is_placed = (position >= 0) & (position < num_positions)
    np.maximum.at(tokens, (row[is_placed], position[is_placed]), num_tokens[is_placed])
    tokens[row[position >= num_positions]] = -1
    return np.where((tokens >= 0).all(axis=1), tokens.sum(axis=1), -1)


def _job_peak(run: RunInfo, epoch: EpochInfo) -> float | None:
    """Return the sum of the peaks of all ranks, in FLOP/s; None if it is unknown.

    Ranks that were not traced have the peak of the traced ones, if these all have the same.
    """
    peaks = [rank_peak(rank) for rank in epoch.ranks]
    known = [peak for peak in peaks if peak is not None and peak > 0]
    if not peaks or len(known) < len(peaks):
        return None
    if len(known) == run.world_size:
        return float(sum(known))
    return known[0] * run.world_size if len(set(known)) == 1 else None


def rank_peak(rank: RankInfo) -> float | None:
    """Return the peak of a rank's device in FLOP/s, declared or known; None if it is unknown."""
    if rank.peak_flops_per_s is not None:
        return rank.peak_flops_per_s
    return peak_flops_per_s(rank.device_name, rank.dtype)


def _convention(run: RunInfo, epoch: EpochInfo) -> str:
    counted = run.flops_convention or "FLOPs per token as declared by the job"
    sources = sorted({_peak_source(run, rank) for rank in epoch.ranks})
    return f"{counted}; peak {', '.join(sources)}"


def _peak_source(run: RunInfo, rank: RankInfo) -> str:
    peak = rank_peak(rank)
    rate = "unknown" if peak is None else f"{peak / TERA:.4g} TFLOP/s per rank"
    if rank.peak_flops_per_s is None:
        return f"{rate}, dense {rank.dtype.removeprefix('torch.')} of {rank.device_name}"
    device = "paced CPU" if run.paced else rank.device_name or "unnamed device"
    return f"{rate}, declared by the job ({device})"
