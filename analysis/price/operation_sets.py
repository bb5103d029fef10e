"""What a set of operations costs, and what the job would take if something were otherwise.

Source: arXiv 2505.05713 for S of a set and M of a set made ideal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ..arrays.grouping import factorize
from ..replay.model import BACKWARD_KINDS, FORWARD_KINDS, has_kind
from ..replay.what_if import ratio, recoverable_ratio
from ..report.report import CulpritComparison
from .selection import EmptyPartError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from ..replay.what_if import Replayer, WhatIf
    from ..trace.tables import RunInfo

K = TypeVar("K", int, str)

PAUSE_KINDS = frozenset({"gc", "checkpoint"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPrice:
    """A run in which something is otherwise, beside the run as it was and as it should be."""

    slowdown: float | None
    """S of the set, in the device replay; None where no set was made ideal, or undefined."""

    recoverable_ratio: float | None
    """``(T - T_without) / (T - T_ideal)`` in the full replay; negative where it would cost time,
    None where the run is no slower than ideal."""

    steps: tuple[int, ...]
    step_ns: NDArray[np.float64]
    """Shape (steps,): the full replay's steps then."""

    recorded_step_ns: NDArray[np.float64]
    """Shape (steps,): the full replay's steps as recorded."""


def slowdown_of(replayer: Replayer, mask: NDArray[np.bool_]) -> float | None:
    """Return S of a set: the ideal run with the set's recorded durations put back, over ideal.

    Args:
        replayer: The run.
        mask: Shape (ops,): the set.
    """
    return ratio(float(replayer.put_back(mask).mean()), float(replayer.ideal().mean()))


def recoverable_of(replayer: Replayer, mask: NDArray[np.bool_]) -> float | None:
    """Return which share of the lost time making a set ideal would win back; see `PartPrice`.

    Args:
        replayer: The run.
        mask: Shape (ops,): the set.
    """
    return _recoverable(replayer, replayer.full_without(mask))


def price_part(replayer: Replayer, mask: NDArray[np.bool_]) -> PartPrice:
    """Return what a set costs: what if this rank, link, stage, ... were healthy.

    Args:
        replayer: The run.
        mask: Shape (ops,): the set, as of `analysis.price.selection.select_operations`.
    """
    return _price(replayer, replayer.full_without(mask), slowdown=slowdown_of(replayer, mask))


def price_rebalanced_stage(replayer: Replayer, stage: int) -> PartPrice:
    """Return what the run would take if a stage had as much compute as the mean stage.

    Its forward and backward are scaled to the mean over all stages of what a
    rank computes, and the others' up, so that no work is lost.

    Args:
        replayer: The run.
        stage: Its number.

    Raises:
        EmptyPartError: The stage has no compute, or no other stage has.
    """
    model = replayer.model
    duration = model.operations.duration_ns
    compute = has_kind(model, FORWARD_KINDS | BACKWARD_KINDS)
    pair, num_pairs = factorize(model.stage[compute], model.rank[compute])
    stage_of_pair = np.zeros(num_pairs, dtype=np.int64)
    stage_of_pair[pair] = model.stage[compute]
    num_ranks = np.bincount(stage_of_pair)
    work = np.bincount(model.stage[compute], weights=duration[compute])
    a_rank = np.divide(work, num_ranks, out=np.zeros_like(work), where=num_ranks > 0)
    whole, own = float(a_rank.sum()), float(a_rank[stage]) if stage < len(a_rank) else 0.0
    if not 0 < own < whole:
        raise EmptyPartError(f"stage {stage} cannot be rebalanced: it or all others do not compute")
    mean = whole / int((num_ranks > 0).sum())
    scale = np.where(model.stage == stage, mean / own, (whole - mean) / (whole - own))
    return _price(replayer, replayer.full_with(np.where(compute, duration * scale, duration)))


def planned_pauses(replayer: Replayer) -> PartPrice:
    """Return what the run would take if all ranks paused at the same time, once.

    All ``gc`` and ``checkpoint`` time goes, and comes back in the first step as
    one pause, as long as the longest of any rank over all steps.

    Args:
        replayer: The run.

    Raises:
        EmptyPartError: The run has no such pause.
    """
    model = replayer.model
    pauses = has_kind(model, PAUSE_KINDS)
    duration = model.operations.duration_ns
    if not duration[pauses].any():
        raise EmptyPartError("the run has no gc or checkpoint pause to plan")
    by_rank = np.bincount(model.rank[pauses], weights=duration[pauses])
    step_ns = replayer.full_with(np.where(pauses, 0.0, duration))
    step_ns[0] += by_rank.max()
    return _price(replayer, step_ns)


def slowdown_by_tp(run: RunInfo, replayer: Replayer) -> dict[int, float | None]:
    """Return S of each tp position; one replay each."""
    of_rank = {rank: coords.tp for rank, coords in _coords(run).items()}
    return _slowdowns_by(replayer, of_rank)


def slowdown_by_host(run: RunInfo, replayer: Replayer) -> dict[str, float | None]:
    """Return S of each host that has a name; one replay each, so on demand only."""
    of_rank = {info.rank: info.host for epoch in run.epochs for info in epoch.ranks}
    return _slowdowns_by(replayer, {rank: host for rank, host in of_rank.items() if host})


def slowdown_by_rank(run: RunInfo, replayer: Replayer) -> dict[int, float | None]:
    """Return S of each rank, exact.

    All dp positions of the ranks that agree in every other coordinate are
    replayed at once, so the cost is that of two replays for each of these sets.
    """
    ideal = float(replayer.ideal().mean())
    families: dict[tuple[int, ...], dict[int, int]] = {}
    for rank, at in _coords(run).items():
        families.setdefault((at.tp, at.pp, at.cp, at.ep), {})[at.dp] = rank
    found: dict[int, float | None] = {}
    for by_dp in families.values():
        mask = np.isin(replayer.model.rank, list(by_dp.values()))
        for dp, times in replayer.put_back_by_dp(mask).items():
            if dp in by_dp:
                found[by_dp[dp]] = ratio(float(times.mean()), ideal)
    return dict(sorted(found.items()))


def compare_culprits(result: WhatIf) -> CulpritComparison:
    """Compare the workers that S_w = min(S_dp, S_stage) and the exact S_w name.

    Args:
        result: A run's what-if.
    """
    workers = sorted(result.by_worker_ns)
    exact = np.stack([result.by_worker_ns[worker] for worker in workers])
    shortcut = np.stack(
        [np.minimum(result.by_dp_ns[dp], result.by_stage_ns[stage]) for dp, stage in workers]
    )
    of_run = [result.worker_slowdown(*worker) or 0.0 for worker in workers]
    return CulpritComparison(
        num_steps=len(result.steps),
        num_different=int((exact.argmax(axis=0) != shortcut.argmax(axis=0)).sum()),
        by_shortcut=workers[int(np.argmax(of_run))],
        by_exact=workers[int(exact.mean(axis=1).argmax())],
    )


def _slowdowns_by(replayer: Replayer, of_rank: Mapping[int, K]) -> dict[K, float | None]:
    """Return S of the ranks of each value."""
    members: dict[K, list[int]] = {}
    for rank, value in of_rank.items():
        members.setdefault(value, []).append(rank)
    return {
        value: slowdown_of(replayer, np.isin(replayer.model.rank, members[value]))
        for value in sorted(members)
    }


def _coords(run: RunInfo) -> Mapping[int, Coords]:
    return {info.rank: info.coords for epoch in run.epochs for info in epoch.ranks}


def _price(
    replayer: Replayer, step_ns: NDArray[np.float64], *, slowdown: float | None = None
) -> PartPrice:
    return PartPrice(
        slowdown=slowdown,
        recoverable_ratio=_recoverable(replayer, step_ns),
        steps=replayer.model.operations.steps,
        step_ns=step_ns,
        recorded_step_ns=replayer.full_recorded(),
    )


def _recoverable(replayer: Replayer, step_ns: NDArray[np.float64]) -> float | None:
    return recoverable_ratio(
        float(replayer.full_recorded().mean()),
        float(step_ns.mean()),
        float(replayer.full_ideal().mean()),
    )
